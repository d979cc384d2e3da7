"""How a model is held and run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from novalm_jax.errors import OptionError
from novalm_jax.options.checks import (
    Dtype,
    Kernels,
    PolicyName,
    as_path,
    as_real,
    as_whole,
    check_dtype,
    number_range,
    one_of,
    positive,
    shown,
    size_of,
)


@dataclass(frozen=True)
class EngineOptions:
    """How a model is held and run.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    device_memory: str | int = "auto"
    """Device memory to use at most: weights, KV cache and workspace together (8GiB, 500MB, 90%, auto)."""
    host_memory: str | int = "auto"
    """Pinned host memory to use at most (0: none)."""
    dtype: Dtype = "bfloat16"
    """What weights are rounded to and computed in."""
    context_length: str | int = "auto"
    """Tokens of prompt and output together; auto: the model's own, cut to what the memory holds."""
    max_batch: int = 8
    """Requests that are decoded together."""
    kv_memory: str | int = "auto"
    """Of device memory, what pages of the KV cache take; auto: what requests can use, beside the weights, and where
    experts are streamed what requests need that are there, so that experts have the rest. Where it is short, requests
    wait on the host."""
    prefill_seconds: float = 0.1
    """Seconds that requests wait for the prompts of others between two tokens at most, and for the layer that those
    are in."""
    decode_quantum: int = 0
    """Steps for which one half of the requests decodes before the other half does, so that a step needs fewer different
    experts; 0: all decode together."""
    prefix_cache: bool = True
    """Whether prompts that begin alike share pages, which stay until others are needed."""
    dense_weights: Literal["auto", "device", "stream"] = "auto"
    """Where weights are that every token needs. device: there, or the model is refused. stream: layer by layer from
    the host, with as many layers on the device as have room. auto: on the device if they fit, else streamed."""
    kernels: Kernels = "auto"
    """What multiplies and attends in decode steps. native: C++, on the CPU alone, built at first need, for which a C++
    compiler must be there. xla: XLA, several times slower there. auto: native where it can be had."""
    policy: PolicyName = "default"
    """Which expert leaves when a slot is needed: the one expected to be unused for longest, that with the lowest
    decayed count or count of uses, or that used longest ago."""
    prefetch: Literal["lookahead", "off"] = "lookahead"
    """lookahead: fetch experts that the router of the next layer would choose for the hidden state of this one."""
    link: str | int | None = None
    """Bytes a second that uploads take at least (2GB/s), to measure what a slower link would do; None for what there
    is."""
    warm_up: bool = False
    """Compile all programs at the start, so that no request waits for one."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, for a quick next start."""
    timeline: Path | None = None
    """File for a trace that shows, in Perfetto or Chrome, what is read, uploaded and computed when: written at the end,
    in place of one that may be there. The run is a little slower."""
    trace_out: Path | None = None
    """File (.npz) for the experts that every decoded token chose, to be replayed by simulate and bench; written at the
    end."""
    profile_out: Path | None = None
    """File (.npz) for how often each expert was used, to start from the next time; written at the end."""
    expert_profile: Path | None = None
    """File that profile_out or trace_out wrote: the experts that were used most are on the device from the start."""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        one_of(self, "dense_weights")
        one_of(self, "kernels")
        one_of(self, "policy")
        one_of(self, "prefetch")
        if self.link_rate is not None and self.link_rate < 1:
            raise OptionError(f"link: {shown(self.link)} lets nothing through; give 2GB/s, or so.")
        written = self._paths("timeline", "trace_out", "profile_out")
        self._paths("expert_profile")
        for name, path in written.items():
            if name != "timeline" and path.suffix != ".npz":
                raise OptionError(f"{name}: {path} is no name of an .npz file; give one.")
        if len(set(written.values())) < len(written):
            raise OptionError(f"{' and '.join(written)} are to write the same file; give each a file of its own.")
        positive("max_batch", self.max_batch)
        if as_whole(self.decode_quantum) is None or self.decode_quantum < 0:
            raise OptionError(f"decode_quantum: expected {number_range(0, None)}, got {shown(self.decode_quantum)}.")
        seconds = as_real(self.prefill_seconds)
        if seconds is None or not 0 <= seconds < math.inf:
            raise OptionError(f"prefill_seconds: expected a number of at least 0, got {shown(self.prefill_seconds)}.")
        context = self.context_length
        if isinstance(context, str) and context != "auto":
            # Python refuses to read numbers of thousands of digits.
            if not context.isdecimal() or len(context) > 18:
                raise OptionError(f"context_length: expected auto or a number of tokens, got {shown(context)}.")
            object.__setattr__(self, "context_length", int(context))
        if self.context_length != "auto":
            positive("context_length", self.context_length)

    def _paths(self, *names: str) -> dict[str, Path]:
        """Makes paths of those options that are given."""
        given = {name: as_path(name, value) for name in names if (value := getattr(self, name)) is not None}
        for name, path in given.items():
            object.__setattr__(self, name, path)
        return given

    @property
    def link_rate(self) -> int | None:
        """`link` in bytes a second."""
        return size_of(self, "link")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options, in order."""
        return tuple(field.name for field in fields(cls))
