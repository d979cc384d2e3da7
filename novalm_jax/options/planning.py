"""What a model is planned for: memory, rates of a machine, and how often experts are where they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from novalm_jax.errors import OptionError
from novalm_jax.options.checks import Checked, Dtype, one_of, shown, size_of
from novalm_jax.options.engine import EngineOptions

ExpertsDtype = Literal["float32", "bfloat16", "float8", "int8", "int4", "mxfp4"]


@dataclass(frozen=True)
class PlanOptions(Checked):
    """What a model is planned for. Rates that are not given are those of the machine with --measure, else assumed.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    device_memory: str | int = "auto"
    """Device memory to use at most (8GiB, 500MB); auto, or a part (90%): of this machine."""
    host_memory: str | int = "auto"
    """Pinned host memory to use at most (0: none); auto, or a part: of this machine."""
    dtype: Dtype = "bfloat16"
    """What weights are rounded to and computed in."""
    experts_dtype: ExpertsDtype | None = None
    """What experts are stored in; None: as they are computed in. Other formats can be planned with, not loaded: int8
    and int4 have a scale of 16 bits for 32 numbers, mxfp4 one of 8 bits."""
    context_length: str | int = "auto"
    """Tokens of prompt and output together; auto: the model's own, cut to what the memory holds."""
    batch: int = 1
    """Requests that are decoded together."""
    prompt_tokens: int = 1000
    """Tokens of a prompt; decoding is forecast after so many."""
    device_bandwidth: str | int | None = None
    """Bytes a second that programs read weights with (1TB/s)."""
    device_tflops: float | None = None
    """Million million operations a second in large matrix products."""
    link: str | int | None = None
    """Bytes a second of the way to the device (25GB/s)."""
    disk: str | int | None = None
    """Bytes a second that are read from disk (5GB/s)."""
    measure: bool = False
    """Measure this machine first, with programs of the model's shapes and weights of zeros."""
    hit_rate: float | None = None
    """Part of the needed experts that are on the device."""
    routing: str | None = None
    """File of recorded routing (.npz or .csv), in which hits are counted."""
    expert_profile: str | None = None
    """Expert profile (.npz), of which the most used experts stay on the device."""
    like: Literal["gpt-oss-20b", "deepseek-v2-lite"] = "gpt-oss-20b"
    """Whose routing that is like in which hits are counted otherwise: it is made up, in the model's shape."""
    price: float | None = None
    """Price of the machine for an hour, in any currency."""

    def __post_init__(self) -> None:
        one_of(self, "like")
        if self.experts_dtype is not None and self.experts_dtype not in EXPERT_BITS:
            raise OptionError(f"experts_dtype: {shown(self.experts_dtype)} is not one of {', '.join(EXPERT_BITS)}.")
        for name in ("batch", "prompt_tokens"):
            self._whole(name, 1, 2**31 - 1)
        self._real("hit_rate", 0.0, 1.0)
        self._real("price", 0.0)
        self._real("device_tflops", 1e-6, 1e9)
        for name in ("device_bandwidth", "link", "disk"):
            if size_of(self, name) == 0:
                raise OptionError(f"{name}: {shown(getattr(self, name))} lets nothing through; give 25GB/s, or so.")
        given = [name for name in ("hit_rate", "routing", "expert_profile") if getattr(self, name) is not None]
        if len(given) > 1:
            raise OptionError(f"{given[1]}: {given[0]} says already how many experts hit; leave one of them out.")
        object.__setattr__(self, "context_length", self.engine.context_length)

    @property
    def engine(self) -> EngineOptions:
        """What is planned, as the engine is told."""
        return EngineOptions(
            device_memory=self.device_memory,
            host_memory=self.host_memory,
            dtype=self.dtype,
            context_length=self.context_length,
            max_batch=self.batch,
        )

    @property
    def expert_bits(self) -> float | None:
        """Bits of a number of an expert, with their part of its scale; None where it is stored as it is computed."""
        same = self.experts_dtype in (None, self.dtype)
        return None if same or self.experts_dtype is None else EXPERT_BITS[self.experts_dtype]

    @property
    def rates(self) -> dict[str, float]:
        """The rates of the machine that are given, by name: bytes and operations a second."""
        sizes = {name: size_of(self, name) for name in ("device_bandwidth", "link", "disk")}
        operations = None if self.device_tflops is None else 1e12 * self.device_tflops
        given = {**sizes, "device_operations": operations}
        return {name: float(rate) for name, rate in given.items() if rate is not None}


EXPERT_BITS = {"float32": 32.0, "bfloat16": 16.0, "float8": 8.0, "int8": 8.5, "int4": 4.5, "mxfp4": 4.25}
"""Bits of a number in each format, with scales where they count."""
