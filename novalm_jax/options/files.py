"""In which form a checkpoint is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from novalm_jax.errors import OptionError
from novalm_jax.options.checks import one_of, shown
from novalm_jax.units import parse_size


@dataclass(frozen=True)
class ConvertOptions:
    """In which form a checkpoint is written.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    to: Literal["safetensors", "store", "orbax"] = "safetensors"
    """safetensors: a folder as on the Hugging Face Hub. store: .safetensors files laid out for streaming, in which an
    expert is one read and has a checksum. orbax: weights as Orbax keeps them, for work in JAX."""
    dtype: Literal["as-stored", "float32", "bfloat16"] = "as-stored"
    """What weights are rounded to; as-stored leaves every bit as it is."""
    shard_size: str | int = "5GB"
    """Most bytes of weights in one .safetensors file; a tensor that is larger has a file of its own."""

    def __post_init__(self) -> None:
        one_of(self, "to")
        one_of(self, "dtype")
        if self.shard_bytes < 1:
            raise OptionError(f"shard_size: {shown(self.shard_size)} leaves no room for weights; give 5GB, or so.")
        if self.to != "safetensors" and self.shard_size != ConvertOptions.shard_size:
            raise OptionError("shard_size: only plain .safetensors files have one; leave it out, or convert to those.")

    @property
    def shard_bytes(self) -> int:
        """The shard size in bytes."""
        return parse_size(self.shard_size, name="shard_size")
