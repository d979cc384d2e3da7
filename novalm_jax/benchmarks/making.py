"""A checkpoint of random weights in any shape, to measure with: nothing is downloaded, nothing held in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from zlib import crc32

import jax.numpy as jnp
import numpy as np

from novalm_jax.checkpoint.atomic import Work, check_destination
from novalm_jax.checkpoint.companions import config_bytes, with_dtype
from novalm_jax.checkpoint.dtypes import rounded
from novalm_jax.checkpoint.load import parameter_shapes
from novalm_jax.checkpoint.mapping import Shape
from novalm_jax.checkpoint.sources import IN_MEMORY
from novalm_jax.checkpoint.write import Plan
from novalm_jax.config import ModelConfig
from novalm_jax.models.families import find_family
from novalm_jax.options import ConvertOptions, MakeModelOptions
from novalm_jax.training.recipe import config_json

_SCALE = 0.02  # of weights; norms are ones


class RandomSource:
    """Weights of a normal distribution, the same for the same seed."""

    def __init__(self, config: ModelConfig, dtype: np.dtype, seed: int):
        self._shapes = parameter_shapes(config)
        self._dtype = dtype
        self._seed = seed

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Parameter path -> shape."""
        return self._shapes

    def dtypes(self, path: str, row: int | None) -> Collection[np.dtype]:
        """One for all."""
        return (self._dtype,)

    def read(self, path: str, row: int | None, dtype: np.dtype) -> np.ndarray:
        """The numbers, drawn anew each time."""
        shape = self._shapes[path] if row is None else self._shapes[path][1:]
        if path.endswith("scale"):
            return np.ones(shape, dtype)
        draw = np.random.default_rng((self._seed, crc32(path.encode()), 0 if row is None else row + 1))
        numbers = draw.standard_normal(shape, np.float32) * np.float32(_SCALE)
        return rounded(path, numbers, dtype)

    def keep_only(self, paths: Collection[str]) -> None:
        """Nothing is held."""


def make_model(folder: str | Path, options: MakeModelOptions) -> Path:
    """Writes a qwen3_moe checkpoint of random weights, without a tokenizer: prompts are token ids.

    Raises:
      OptionError: the folder cannot be made there, or the disk has no room.
      WriteError: it cannot be written.
    """
    destination = check_destination(folder)
    raw = config_json(options, options.vocab_size)
    family = find_family(raw)
    source = RandomSource(family.read_config(raw), np.dtype(jnp.dtype(options.dtype)), options.seed)
    plan = Plan.of(family, source, None, ConvertOptions().shard_bytes)
    with Work(destination, IN_MEMORY, resumable=False) as work:
        work.put("config.json", config_bytes(with_dtype(raw, options.dtype)))
        plan.write(work, source)
        work.finish()
    return destination
