import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from novalm_jax.errors import CheckpointError
from novalm_jax.text.sentencepiece import Piece, SentencePieceModel, from_proto, to_tokenizer
from novalm_jax.text.tokenizer import Tokenizer

SPECIAL = [Piece("<unk>", 0.0, 2), Piece("<s>", 0.0, 3), Piece("</s>", 0.0, 3), Piece("<call>", 0.0, 4)]
BYTES = [Piece(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]


def model(words: dict[str, float], **options) -> SentencePieceModel:
    options = {"is_bpe": True, "byte_fallback": True} | options
    pieces = [*SPECIAL, *BYTES, *(Piece(text, score) for text, score in words.items())]
    return SentencePieceModel(pieces=[*pieces, Piece("▁▁", 0.0, 4)], **options)


WORDS = {"▁a": -1, "ab": -2, "▁ab": -3, "bc": -4, "▁": -5, "a": -6, "b": -7, "c": -8}


def tokens(backend, text, **options) -> list[str]:
    return backend.encode(text, add_special_tokens=False, **options).tokens


def test_bpe_joins_the_best_score_first():
    backend = to_tokenizer(model(WORDS))
    # "▁a" (-1) is joined before "ab" (-2), so "b" is left for "▁ab" (-3), which comes before "bc" (-4).
    assert tokens(backend, "abc") == ["▁ab", "c"]
    assert tokens(backend, "cabc ab") == ["▁", "c", "ab", "c", "▁ab"]


def test_ids_are_positions_and_the_first_token_is_in_front():
    source = model(WORDS)
    backend = to_tokenizer(source)
    assert [backend.token_to_id(piece.text) for piece in source.pieces] == list(range(len(source.pieces)))
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("abc")[0] == tokenizer.bos_id == 1
    assert tokenizer.eos_id == 2
    assert to_tokenizer(model(WORDS, bos_id=-1)).encode("abc").tokens == ["▁ab", "c"]


def test_unknown_characters_fall_back_to_bytes():
    backend = to_tokenizer(model(WORDS))
    assert tokens(backend, "aé") == ["▁a", "<0xC3>", "<0xA9>"]
    assert tokens(to_tokenizer(model(WORDS, byte_fallback=False)), "aé") == ["▁a", "<unk>"]


def test_special_and_user_defined_pieces_stay_whole():
    backend = to_tokenizer(model(WORDS))
    assert tokens(backend, "a<call></s>") == ["▁a", "<call>", "</s>"]
    assert tokens(backend, "c  a") == ["▁", "c", "▁▁", "a"]
    assert Tokenizer(backend).decode(backend.encode("a<call></s>").ids) == "a<call>"


@pytest.mark.parametrize("text", ["abc", " abc  ab", "日本 a😀", "a\nb"])
def test_text_survives(text):
    tokenizer = Tokenizer(to_tokenizer(model(WORDS)))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_white_space_rules_of_the_model():
    squeezing = to_tokenizer(model(WORDS, remove_extra_whitespaces=True))
    assert tokens(squeezing, "  ab   c ") == ["▁ab", "▁", "c"]
    bare = to_tokenizer(model(WORDS, add_dummy_prefix=False))
    assert tokens(bare, "ab") == ["ab"]
    assert Tokenizer(bare).decode(bare.encode(" ab").ids) == " ab"


def test_unigram_takes_the_likeliest_pieces():
    words = {"▁": -1.0, "a": -3.0, "b": -3.0, "ab": -4.0, "▁a": -2.0, "▁ab": -9.0}
    assert tokens(to_tokenizer(model(words, is_bpe=False)), "ab") == ["▁", "ab"]
    assert tokens(to_tokenizer(model(words, is_bpe=False)), "é") == ["▁", "<0xC3>", "<0xA9>"]


def proto(model_type: int, pieces=(("<unk>", 0.0, 2), ("a", -1.0, 1))) -> SimpleNamespace:
    return SimpleNamespace(
        pieces=[SimpleNamespace(piece=text, score=score, type=kind) for text, score, kind in pieces],
        trainer_spec=SimpleNamespace(model_type=model_type, unk_id=0, bos_id=-1, byte_fallback=True),
        normalizer_spec=SimpleNamespace(
            add_dummy_prefix=False, remove_extra_whitespaces=True, precompiled_charsmap=b"map"
        ),
    )


@pytest.mark.parametrize("model_type, is_bpe", [(1, False), (2, True)])
def test_the_parts_of_the_file(model_type, is_bpe):
    assert from_proto(proto(model_type), Path("m")) == SentencePieceModel(
        pieces=[Piece("<unk>", 0.0, 2), Piece("a", -1.0)],
        is_bpe=is_bpe,
        bos_id=-1,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=True,
        charsmap=b"map",
    )


@pytest.mark.parametrize("other", [proto(3), proto(4), proto(2, pieces=())])
def test_other_kinds_of_models_are_refused(other):
    with pytest.raises(CheckpointError, match="not a BPE or unigram SentencePiece model"):
        from_proto(other, Path("m"))


def test_without_the_packages_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(CheckpointError, match=r"pip install 'novalm-jax\[sentencepiece\]'"):
        Tokenizer.load(tmp_path)
