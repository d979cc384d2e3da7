"""Routing that was recorded or is made up, and the caches that it is tried with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from novalm_jax.errors import OptionError
from novalm_jax.options.checks import Checked, PolicyName, no_more_choices_than_experts, one_of, shown, size_of

_MOST_SCORES = 2**31


@dataclass(frozen=True)
class RoutingOptions(Checked):
    """Recorded choices of experts, to have real ones with a model of random weights.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    routing: str | None = None
    """File of recorded routing (.npz or .csv), which decoding takes its experts from in place of the model's routers.
    What is moved is real then; the text means nothing."""
    accuracy: float = 0.8
    """Part of the experts of the next layer that lookahead predicts with recorded routing. Published gates reach 0.79
    (DeepSeek-V2-Lite, arXiv:2502.12224) to 0.89 (Qwen3-30B-A3B, BigMoeOnEdge)."""

    def __post_init__(self) -> None:
        self._real("accuracy", 0.0, 1.0)
        if self.routing is None and self.accuracy != RoutingOptions.accuracy:
            raise OptionError("accuracy: only recorded routing has one; leave it out, or give routing.")

    def __str__(self) -> str:
        """What is replayed, for people; empty where it is nothing."""
        if self.routing is None:
            return ""
        return f"{self.routing}, replayed; lookahead is right in {100 * self.accuracy:g} %"


@dataclass(frozen=True)
class SimulateOptions(Checked):
    """What a cache of experts is tried with. Lists are separated by commas.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    slots: str = "6%,12%,25%,50%"
    """Slots on the device: numbers, or with % parts of all experts."""
    policy: str = "default,lru,belady"
    """Which expert leaves when a slot is needed: default, decayed, lfu, lru, or belady, which knows the future."""
    batch: int | None = None
    """Sequences side by side; where one ends the next begins. None: as recorded."""
    quantum: int = 0
    """Of sequences side by side one half runs for so many steps before the other half does, as decode_quantum has it;
    0: all run in every step."""
    pool: Literal["global", "layer", "fitted"] = "global"
    """One pool for all layers, the same number of slots in each, or in each as many as fit_trace says."""
    fit_trace: str | None = None
    """File of recorded routing (.npz or .csv) that fitted pools are fitted to. None: the trace that is replayed, which
    flatters them."""
    first_tokens: int | None = None
    """Tokens that are replayed, from the start of the trace; None: all."""
    admission: float | None = None
    """What is missed is computed elsewhere, and gets a slot only if it is worth more than so many times what would
    leave for it (1.0). None: everything is uploaded and gets one."""
    expert_profile: str | None = None
    """File of --profile-out, or recorded routing: the most used experts have slots at the start. None: slots are
    empty."""
    record_bytes: str | int | None = None
    """Bytes of an expert (9MB), where the recording does not say."""
    link: str | int | None = None
    """Bytes a second of the way to the device (25GB/s)."""
    compute_ms: float = 0.0
    """Milliseconds that a step takes with all experts on the device."""

    def __post_init__(self) -> None:
        one_of(self, "pool")
        if self.batch is not None:
            self._whole("batch", 1, 2**31 - 1)
        self._whole("quantum", 0, 2**31 - 1)
        if self.quantum and self.batch is None:
            raise OptionError("quantum: steps as recorded have none; give batch, too, or leave it out.")
        self._whole("first_tokens", 1, 2**31 - 1)
        self._real("compute_ms", 0.0, 1e9)
        self._real("admission", 1e-9, 1e9)
        known = (*get_args(PolicyName), "belady")
        if strange := [name for name in self.policies if name not in known]:
            raise OptionError(f"policy: {shown(strange[0])} is not one of {', '.join(known)}.")
        if self.admission is not None and "lru" in self.policies:
            raise OptionError(
                "admission: lru only knows what is newer, not what is worth more. Leave it out of policy "
                "(default,belady)."
            )
        if self.fit_trace is not None and self.pool != "fitted":
            raise OptionError("fit_trace: only fitted pools are fitted; leave it out, or give pool fitted.")
        self.slots_of(100)
        if self.compute_ms and self.link is None:
            raise OptionError("compute_ms: without a link there is nothing to add it to; add link (25GB/s).")
        for name in ("record_bytes", "link"):
            if size_of(self, name) == 0:
                raise OptionError(f"{name}: {shown(getattr(self, name))} is nothing; give 9MB, or so.")

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """`record_bytes` and `link` as numbers."""
        return size_of(self, "record_bytes"), size_of(self, "link")

    @property
    def policies(self) -> tuple[str, ...]:
        """`policy`, one by one."""
        return tuple(part.strip() for part in self.policy.split(","))

    def slots_of(self, records: int) -> tuple[int, ...]:
        """`slots` as numbers, of so many records; at least 1 each.

        Raises:
          OptionError: something else, or more than all.
        """
        found = []
        for part in self.slots.split(","):
            match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", part)
            number = float(match[1]) * (records / 100 if match[2] else 1) if match else 0.0
            if not match or not number or (number > records and match[2]) or (number != int(number) and not match[2]):
                raise OptionError(
                    f"slots: expected numbers or percentages (25%) with commas between them, got {shown(part)}."
                )
            found.append(min(records, max(1, round(number))))
        return tuple(found)


@dataclass(frozen=True)
class MakeTraceOptions(Checked):
    """A made-up trace: its size, and which recorded one it is like.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    like: Literal["gpt-oss-20b", "deepseek-v2-lite"] = "gpt-oss-20b"
    """Whose routing it is like."""
    layers: int = 24
    """Layers with experts."""
    experts: int = 32
    """Experts of each layer."""
    experts_per_token: int = 4
    """Experts that a token chooses in each layer."""
    sequences: int = 16
    """Sequences, one after another."""
    tokens: int = 150
    """Tokens of each sequence."""
    seed: int = 0
    """Of all that is drawn."""

    def __post_init__(self) -> None:
        one_of(self, "like")
        for name in ("layers", "experts_per_token", "sequences", "tokens"):
            self._whole(name, 1, 2**31 - 1)
        self._whole("experts", 1, 2**15)
        self._whole("seed", 0, 2**31 - 1)
        no_more_choices_than_experts(self.experts_per_token, self.experts)
        if self.layers * self.experts * self.sequences * self.tokens > _MOST_SCORES:
            asked = f"{self.layers} x {self.experts} x {self.sequences} x {self.tokens}"
            raise OptionError(
                f"tokens: {asked} are more than {_MOST_SCORES} scores to draw. Give fewer, or less layers."
            )
