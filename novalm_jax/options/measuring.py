"""How things are measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from novalm_jax.errors import OptionError
from novalm_jax.options.checks import Checked, Dtype, PolicyName, check_dtype, one_of, positive, shown


@dataclass(frozen=True)
class BenchOptions:
    """How something is measured.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    dtype: Dtype = "bfloat16"
    """What weights are rounded to, and computed in."""
    rounds: int = 5
    """How often it is measured; medians count."""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        positive("rounds", self.rounds)


@dataclass(frozen=True)
class BatchBenchOptions(Checked):
    """How many requests are decoded together, and for how long.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    batches: str = "1,4,16,32"
    """Numbers of requests, with commas between them."""
    prompt_tokens: str = "32"
    """Random tokens of prompts: numbers with commas between them, which requests take in turn."""
    tokens: int = 64
    """Steps that are measured."""

    def __post_init__(self) -> None:
        self._whole("tokens", 2, 2**31 - 1)
        self._listed("batches")
        self._listed("prompt_tokens")

    @property
    def sizes(self) -> tuple[int, ...]:
        """`batches` as numbers."""
        return self._listed("batches")

    @property
    def lengths(self) -> tuple[int, ...]:
        """`prompt_tokens` as numbers."""
        return self._listed("prompt_tokens")

    def _listed(self, name: str) -> tuple[int, ...]:
        parts = [part.strip() for part in str(getattr(self, name)).split(",")]
        # Python refuses to read numbers of thousands of digits.
        if not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
            given = shown(getattr(self, name))
            raise OptionError(f"{name}: expected whole numbers of at least 1 with commas between them, got {given}.")
        return tuple(map(int, parts))


@dataclass(frozen=True)
class SweepOptions(Checked):
    """Which cells are measured, and how. Lists are separated by commas.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    slots: str = "100,50,25,12"
    """Percent of all experts that there are slots for on the device; with 100 nothing streams."""
    ratios: str = "0.25,1,4"
    """Times that the experts which a token misses take on the link, where 1 is the time of a token with nothing to
    miss."""
    prefetch: str = "off,lookahead,oracle"
    """Ways to prefetch; oracle knows the experts of the next layer."""
    prompt_tokens: int = 1
    """Random tokens of the prompt; each brings experts that are not recorded."""
    warm_up: int = 32
    """Tokens before those that are measured, in each cell."""
    tokens: int = 64
    """Tokens that are measured, in each cell."""
    rounds: int = 3
    """How often each cell is measured, in turns with the others; medians count."""
    dtype: Dtype = "bfloat16"
    """What weights are rounded to and computed in."""
    policy: PolicyName = "default"
    """Which expert leaves when a slot is needed."""
    host_memory: str | int = "auto"
    """Pinned host memory to use at most (0: none)."""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        one_of(self, "policy")
        for name, least in (("prompt_tokens", 1), ("warm_up", 0), ("tokens", 1), ("rounds", 1)):
            self._whole(name, least, 2**31 - 1)
        self._listed("slots", most=100.0)
        self._listed("ratios")
        strange = [way for way in self.ways if way not in ("off", "lookahead", "oracle")]
        if strange:
            raise OptionError(f"prefetch: {shown(strange[0])} is not one of off, lookahead, oracle.")

    @property
    def percents(self) -> tuple[float, ...]:
        """`slots` as numbers."""
        return self._listed("slots", most=100.0)

    @property
    def link_ratios(self) -> tuple[float, ...]:
        """`ratios` as numbers."""
        return self._listed("ratios")

    @property
    def ways(self) -> tuple[str, ...]:
        """`prefetch`, one by one."""
        return tuple(part.strip() for part in self.prefetch.split(","))

    def _listed(self, name: str, most: float = math.inf) -> tuple[float, ...]:
        given = getattr(self, name)
        try:
            numbers = tuple(float(part) for part in given.split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(0 < number <= most and math.isfinite(number) for number in numbers):
            bounds = "above 0" if most == math.inf else f"above 0 and at most {most:g}"
            raise OptionError(f"{name}: expected numbers {bounds} with commas between them, got {shown(given)}.")
        return numbers


@dataclass(frozen=True)
class PolicyBenchOptions(Checked):
    """How long policies are watched.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    warm_up: int = 200
    """Steps before those that are measured."""
    steps: int = 100
    """Steps of each round."""
    rounds: int = 5
    """Rounds, each of other steps, the policies in turns; medians count."""

    def __post_init__(self) -> None:
        for name, least in (("warm_up", 0), ("steps", 1), ("rounds", 1)):
            self._whole(name, least, 2**31 - 1)

    @property
    def all_steps(self) -> int:
        """Steps that are run in all."""
        return self.warm_up + self.rounds * self.steps


@dataclass(frozen=True)
class ComparePlanOptions(SweepOptions):
    """Which runs are forecast and measured, and how. Lists are separated by commas."""

    slots: str = "100,50,25,12,6"
    ratios: str = "1"
    prefetch: str = "off"
