"""Small tokenizers of the kinds that checkpoints have, built in code."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Once upon a time there was a little girl named Lily. She loved to play outside in the park.",
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high.",
    "Il était une fois… 日本語の文章 и немного текста 😀 👩‍👩‍👧 naïve café",
]


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as Qwen, OLMoE, DeepSeek and GPT-OSS have; adds no special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece-like BPE with byte tokens and `Prepend ▁`, as Mixtral has; puts <s> in front."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += ["▁", *"abcdehilnoprstuw.,é", "▁t", "he", "▁the", "on", "ce", "▁▁"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "n"), ("c", "e"), ("▁", "▁")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="session")
def metaspace() -> tokenizers.Tokenizer:
    """A Metaspace tokenizer without byte tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture
def write(tmp_path):
    """Write the files of a checkpoint folder: texts as they are, everything else as JSON; gives the folder."""

    def write(backend=None, **files) -> Path:
        if backend is not None:
            backend.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            stem, _, ending = name.rpartition("_")
            path = tmp_path / f"{stem}.{ending}"
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return tmp_path

    return write
