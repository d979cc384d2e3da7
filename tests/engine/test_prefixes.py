"""Pages are shared between prompts that are computed alike, and between no others."""

from dataclasses import replace
from pathlib import Path

import pytest

from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.config import AttentionConfig
from novalm_jax.engine.prefixes import fingerprint, prefix_seed
from tiny_checkpoints import tiny_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden"


def test_another_model_dtype_or_file_is_another_fingerprint(tmp_path: Path) -> None:
    one, same, other = (
        Checkpoint.open(tiny_checkpoint(tmp_path / name, seed=seed, rope_theta=theta))
        for name, seed, theta in (("one", 0, 10000.0), ("same", 0, 10000.0), ("other", 0, 20000.0))
    )
    known = fingerprint(one, "float32")
    assert known == fingerprint(one, "float32") and len(known) == 16
    # The files of the second were written later.
    assert len({known, fingerprint(one, "bfloat16"), fingerprint(same, "float32"), fingerprint(other, "float32")}) == 4
    (one.folder / "model.safetensors").touch()
    assert fingerprint(one, "float32") != known


@pytest.mark.parametrize(
    ("case", "differ"),
    [("mixtral", (False, False)), ("llama-dynamic", (True, True)), ("phimoe-longrope", (True, False))],
)
def test_where_rotations_depend_on_the_length_so_do_seeds(case: str, differ: tuple[bool, bool]) -> None:
    config = Checkpoint.open(GOLDEN / case).config
    attention = config.layers[0].attention
    assert isinstance(attention, AttentionConfig) and attention.rope is not None
    trained = attention.rope.original_context or 40
    short, longest_short, longer, longest = (
        prefix_seed(b"model", config, tokens) for tokens in (1, trained, trained + 1, trained + 2)
    )
    assert short == longest_short == b"model"
    assert (longer != short, longest != longer) == differ
    assert prefix_seed(b"other", config, trained + 1) != longer


def test_one_layer_whose_rotation_depends_on_the_length_is_enough() -> None:
    config = Checkpoint.open(GOLDEN / "llama-dynamic").config
    plain = Checkpoint.open(GOLDEN / "llama-hub").config
    mixed = replace(config, layers=(plain.layers[0], config.layers[0]))
    assert prefix_seed(b"model", mixed, 1000) == prefix_seed(b"model", config, 1000) != b"model"
