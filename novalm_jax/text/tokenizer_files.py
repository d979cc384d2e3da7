"""Which file of a checkpoint folder holds the tokenizer, and what to do about the ones that cannot be read.

Knows file names and formats. Refuses to know what a tokenizer is used for.
"""

from __future__ import annotations

import re
from pathlib import Path

import tokenizers

from novalm_jax.errors import CheckpointError
from novalm_jax.text.files import is_there
from novalm_jax.text.sentencepiece import convert_sentencepiece

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*")
# Files of other tokenizers of the field that hold no tokenizer by themselves or in a format of their own.
_FOREIGN = ("tekken.json", "vocab.json", "vocab.txt", "spiece.model")
_CONVERT_ONCE = (
    "Write a tokenizer.json once with `pip install transformers{extra}` and "
    "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`, or copy the tokenizer.json of the same model "
    "from another copy of it."
)


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of `folder`: `tokenizer.json`, else a SentencePiece `tokenizer.model` converted on the way.

    Raises:
      CheckpointError: there is no such file, it is damaged, a link to nowhere, or of another kind.
    """
    path = folder / "tokenizer.json"
    if is_there(path):
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        # The library raises bare Exception for everything.
        except Exception as error:
            raise CheckpointError(
                f"{path} is not a tokenizer that can be read ({error}); download the file again, or upgrade the "
                "`tokenizers` package if the file is newer than it."
            ) from error
    model = folder / "tokenizer.model"
    for tiktoken in [model, *sorted(folder.glob("*.tiktoken")), *sorted(folder.glob("tiktoken.model"))]:
        if is_there(tiktoken) and _is_tiktoken(tiktoken):
            raise CheckpointError(
                f"{tiktoken} is a tiktoken vocabulary: byte strings and their ranks, without the splitting rule and "
                f"special tokens, which are in the model's own Python code. {_CONVERT_ONCE.format(extra=' tiktoken')}"
            )
    if is_there(model):
        return convert_sentencepiece(model)
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder {folder}; give the folder of a checkpoint.")
    if found := [name for name in _FOREIGN if (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, only {', '.join(found)}. {_CONVERT_ONCE.format(extra=' sentencepiece')}"
        )
    raise CheckpointError(
        f"{folder} has no tokenizer: looked for tokenizer.json, tokenizer.model and *.tiktoken. Copy tokenizer.json "
        "and tokenizer_config.json of the model there."
    )


def _is_tiktoken(path: Path) -> bool:
    with path.open("rb") as file:
        return _TIKTOKEN_LINE.fullmatch(file.readline(4096)) is not None
