"""Every option a user can set, once: command line, Python and server share these definitions.

Plain data with the checks that need nothing but the values themselves. Knows no file, no model and no JAX, so that
`--help` is quick.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from novalm_jax.errors import OptionError, RequestError, UserError
from novalm_jax.units import parse_size

Dtype = Literal["float32", "bfloat16"]
PolicyName = Literal["default", "decayed", "lfu", "lru"]

MAX_LOGPROBS = 20
"""Most log-probabilities a request may ask for per token (the limit of the OpenAI interface)."""


@dataclass(frozen=True)
class _Checked:
    """Options whose numbers are checked and made plain, whatever types they are given in."""

    _error: ClassVar[type[UserError]] = OptionError

    def _whole(self, name: str, least: int, most: int | None = None) -> None:
        """Makes the field an int within these bounds; None stays where it is the default."""
        value = getattr(self, name)
        if value is None and self.__dataclass_fields__[name].default is None:
            return
        number = _as_whole(value)
        if number is None or number < least or (most is not None and number > most):
            raise self._error(f"{name}: expected {_range(least, most)}, got {_shown(value)}.")
        object.__setattr__(self, name, number)

    def _real(self, name: str, least: float = -math.inf, most: float = math.inf) -> None:
        """Makes the field a finite float within these bounds; None stays where it is the default."""
        value = getattr(self, name)
        if value is None and self.__dataclass_fields__[name].default is None:
            return
        number = _as_real(value)
        if number is None or not math.isfinite(number):
            raise self._error(f"{name}: expected a number, got {_shown(value)}.")
        if not least <= number <= most:
            bounds = f"of at least {least:g}" if least == 0 else "above 0"
            bounds += f" and at most {most:g}" if most < math.inf else ""
            raise self._error(f"{name}: expected a number {bounds}, got {value}.")
        object.__setattr__(self, name, number)


@dataclass(frozen=True)
class SamplingParams(_Checked):
    """How the tokens of one request are chosen. None means the checkpoint's own default, else the field's.

    Raises:
      RequestError: a value no sampler can honour; the message names the field.
    """

    _error: ClassVar[type[UserError]] = RequestError

    max_tokens: int | None = None
    """Most tokens to generate. None: as many as the context holds."""
    min_tokens: int = 0
    """End tokens are ruled out until this many tokens are generated."""
    temperature: float | None = None
    """0 takes the most likely token; 1 samples from the model's own distribution."""
    top_k: int | None = None
    """Sample only from the k most likely tokens (0: all)."""
    top_p: float | None = None
    """Sample only from the most likely tokens that hold this much probability (0: the most likely one)."""
    min_p: float | None = None
    """Drop tokens less likely than this fraction of the most likely one."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens in the prompt or the output (1: off)."""
    presence_penalty: float = 0.0
    """Taken once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for every time it was generated."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    seed: int | None = None
    """Makes this request's random choices repeatable, whatever else runs beside it."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation; they are not part of the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the generation, besides the checkpoint's own."""
    ignore_eos: bool = False
    """Go on after the checkpoint's end tokens."""
    logprobs: int | None = None
    """Log-probabilities to return per token besides the sampled one's own (at most 20)."""
    n: int = 1
    """Independent completions of each prompt."""

    def __post_init__(self) -> None:
        self._all_of("stop", _as_text, "texts", (self.stop,) if isinstance(self.stop, str) else self.stop)
        self._all_of("stop_token_ids", _as_whole, "token ids", self.stop_token_ids)
        self._whole("max_tokens", 0)
        self._whole("min_tokens", 0)
        self._whole("top_k", 0)
        self._whole("n", 1)
        self._whole("logprobs", 0, MAX_LOGPROBS)
        self._whole("seed", -(2**63), 2**63 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens: {self.min_tokens} is more than max_tokens, which is {self.max_tokens}.")
        self._real("temperature", 0.0)
        self._real("top_p", 0.0, 1.0)
        self._real("min_p", 0.0, 1.0)
        self._real("repetition_penalty", math.ulp(0.0))
        self._real("presence_penalty")
        self._real("frequency_penalty")
        if any(not text for text in self.stop):
            raise RequestError("stop: an empty text would end every generation at once; leave it out.")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def _all_of(self, name: str, read: Callable[[object], Any], what: str, values: Iterable[object] | None) -> None:
        """Makes the field a tuple; None is an empty one."""
        listed = tuple(values) if isinstance(values, Iterable) else () if values is None else (values,)
        items = tuple(map(read, listed))
        if None in items:
            raise RequestError(f"{name}: expected a list of {what}, got {_shown(values)}.")
        object.__setattr__(self, name, items)


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
    dense_weights: Literal["auto", "device", "stream"] = "auto"
    """Where weights are that every token needs. device: there, or the model is refused. stream: layer by layer from
    the host, with as many layers on the device as have room. auto: on the device if they fit, else streamed."""
    policy: PolicyName = "default"
    """Which expert leaves when a slot is needed: the one expected to be unused for longest, that with the lowest
    decayed count or count of uses, or that used longest ago."""
    prefetch: Literal["lookahead", "off"] = "lookahead"
    """lookahead: fetch experts that the router of the next layer would choose for the hidden state of this one."""
    link: str | int | None = None
    """Bytes a second that uploads take at least (2GB/s), to measure what a slower link would do; None for what there
    is."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, for a quick next start."""
    timeline: Path | None = None
    """File for a trace that shows, in Perfetto or Chrome, what is read, uploaded and computed when: written at the end,
    in place of one that may be there. The run is a little slower."""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        _one_of(self, "dense_weights")
        _one_of(self, "policy")
        _one_of(self, "prefetch")
        if self.link_rate is not None and self.link_rate < 1:
            raise OptionError(f"link: {_shown(self.link)} lets nothing through; give 2GB/s, or so.")
        if self.timeline is not None:
            object.__setattr__(self, "timeline", _as_path("timeline", self.timeline))
        _positive("max_batch", self.max_batch)
        context = self.context_length
        if isinstance(context, str) and context != "auto":
            # Python refuses to read numbers of thousands of digits.
            if not context.isdecimal() or len(context) > 18:
                raise OptionError(f"context_length: expected auto or a number of tokens, got {_shown(context)}.")
            object.__setattr__(self, "context_length", int(context))
        if self.context_length != "auto":
            _positive("context_length", self.context_length)

    @property
    def link_rate(self) -> int | None:
        """`link` in bytes a second."""
        return _size_of(self, "link")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options, in order."""
        return tuple(field.name for field in fields(cls))


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
        _one_of(self, "to")
        _one_of(self, "dtype")
        if self.shard_bytes < 1:
            raise OptionError(f"shard_size: {_shown(self.shard_size)} leaves no room for weights; give 5GB, or so.")
        if self.to != "safetensors" and self.shard_size != ConvertOptions.shard_size:
            raise OptionError("shard_size: only plain .safetensors files have one; leave it out, or convert to those.")

    @property
    def shard_bytes(self) -> int:
        """The shard size in bytes."""
        return parse_size(self.shard_size, name="shard_size")


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
        _positive("rounds", self.rounds)


@dataclass(frozen=True)
class RoutingOptions(_Checked):
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
class SweepOptions(_Checked):
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
        _one_of(self, "policy")
        for name, least in (("prompt_tokens", 1), ("warm_up", 0), ("tokens", 1), ("rounds", 1)):
            self._whole(name, least, 2**31 - 1)
        self._listed("slots", most=100.0)
        self._listed("ratios")
        strange = [way for way in self.ways if way not in ("off", "lookahead", "oracle")]
        if strange:
            raise OptionError(f"prefetch: {_shown(strange[0])} is not one of off, lookahead, oracle.")

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
            raise OptionError(f"{name}: expected numbers {bounds} with commas between them, got {_shown(given)}.")
        return numbers


@dataclass(frozen=True)
class SimulateOptions(_Checked):
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
    pool: Literal["global", "layer"] = "global"
    """One pool for all layers, or the same number of slots in each."""
    record_bytes: str | int | None = None
    """Bytes of an expert (9MB), where the recording does not say."""
    link: str | int | None = None
    """Bytes a second of the way to the device (25GB/s)."""
    compute_ms: float = 0.0
    """Milliseconds that a step takes with all experts on the device."""

    def __post_init__(self) -> None:
        _one_of(self, "pool")
        if self.batch is not None:
            self._whole("batch", 1, 2**31 - 1)
        self._real("compute_ms", 0.0, 1e9)
        known = (*get_args(PolicyName), "belady")
        if strange := [name for name in self.policies if name not in known]:
            raise OptionError(f"policy: {_shown(strange[0])} is not one of {', '.join(known)}.")
        self.slots_of(100)
        if self.compute_ms and self.link is None:
            raise OptionError("compute_ms: without a link there is nothing to add it to; add link (25GB/s).")
        for name in ("record_bytes", "link"):
            if _size_of(self, name) == 0:
                raise OptionError(f"{name}: {_shown(getattr(self, name))} is nothing; give 9MB, or so.")

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """`record_bytes` and `link` as numbers."""
        return _size_of(self, "record_bytes"), _size_of(self, "link")

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
                    f"slots: expected numbers or percentages (25%) with commas between them, got {_shown(part)}."
                )
            found.append(min(records, max(1, round(number))))
        return tuple(found)


@dataclass(frozen=True)
class MakeTraceOptions(_Checked):
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
        _one_of(self, "like")
        for name in ("layers", "experts_per_token", "sequences", "tokens"):
            self._whole(name, 1, 2**31 - 1)
        self._whole("experts", 1, 2**15)
        self._whole("seed", 0, 2**31 - 1)
        _no_more_choices_than_experts(self)


@dataclass(frozen=True)
class ModelShape(_Checked):
    """The sizes of a Mixture-of-Experts model.

    Raises:
      OptionError: a value outside its range, or that does not fit another; the message names the option.
    """

    vocab_size: int = 4096
    """Tokens of the vocabulary; of a model that is trained, of a byte-level BPE."""
    context_length: int = 512
    """Tokens that the model sees at once."""
    layers: int = 5
    """Decoder layers."""
    hidden_size: int = 256
    """Width of the hidden state."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key-value heads."""
    experts: int = 16
    """Experts of each layer."""
    experts_per_token: int = 2
    """Experts that a token chooses in each layer."""
    expert_width: int = 128
    """Inner width of an expert."""

    def __post_init__(self) -> None:
        sizes = "vocab_size context_length layers hidden_size heads kv_heads experts experts_per_token expert_width"
        for name in sizes.split():
            self._whole(name, 1, 2**31 - 1)
        self._divides("heads", "hidden_size")
        self._divides("kv_heads", "heads")
        if self.hidden_size // self.heads % 2:
            raise OptionError(f"heads: a head of {self.hidden_size // self.heads} is odd; rotary positions need pairs.")
        _no_more_choices_than_experts(self)

    def _divides(self, name: str, of: str) -> None:
        if getattr(self, of) % getattr(self, name):
            raise OptionError(f"{name}: {getattr(self, name)} does not divide {of}, which is {getattr(self, of)}.")


@dataclass(frozen=True)
class MakeModelOptions(ModelShape):
    """A model of random weights, to measure with. The default has 0.9 billion parameters, 1.8 GB in bfloat16."""

    vocab_size: int = 32000
    context_length: int = 4096
    layers: int = 16
    hidden_size: int = 1024
    heads: int = 16
    kv_heads: int = 4
    experts: int = 32
    experts_per_token: int = 4
    expert_width: int = 512
    dtype: Dtype = "bfloat16"
    """What weights are stored in."""
    seed: int = 0
    """Of the weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dtype(self.dtype)
        self._whole("seed", 0, 2**31 - 1)


@dataclass(frozen=True)
class TrainOptions(ModelShape):
    """What is trained, and how. A run goes on only with the options it began with.

    Raises:
      OptionError: a value outside its range; the message names the option.
    """

    steps: int = 2000
    """Updates of the weights."""
    batch_size: int = 8
    """Sequences of one update."""
    accumulate: int = 1
    """Parts that a batch is computed in, one after another: less memory, and the same update but for the balance loss,
    which is that of each part."""
    learning_rate: float = 2e-3
    """The highest; it rises to it in `warmup` steps and falls to a tenth of it along a cosine."""
    warmup: int = 200
    """Steps until then."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases have none."""
    clip_norm: float = 1.0
    """Gradients longer than this are scaled down to it."""
    balance_loss: float = 0.05
    """Weight of the loss that spreads tokens over experts (arXiv:2101.03961)."""
    router_z_loss: float = 0.001
    """Weight of the loss that keeps router logits small (arXiv:2202.08906)."""
    balance_bias: float = 0.0
    """Step of biases that spread tokens beside the balance loss, or in its place where that is 0 (arXiv:2408.15664).
    Above 0 routers are those of DeepSeek-V3: sigmoids, and one more expert for all tokens; the model is a glm4_moe in
    place of a qwen3_moe."""
    dtype: Dtype = "float32"
    """What is computed in; weights and the optimiser's state are float32."""
    validation: float = 0.02
    """Part of the text, in whole documents, that is kept to measure the loss on."""
    evaluate_every: int = 500
    """Steps between two measurements of that loss."""
    save_every: int = 100
    """Steps between two checkpoints."""
    seed: int = 0
    """Of the split, the first weights and the order of the data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dtype(self.dtype)
        for name in ("steps", "batch_size", "accumulate", "evaluate_every", "save_every"):
            self._whole(name, 1, 2**31 - 1)
        self._whole("vocab_size", 257, 65536)
        self._whole("warmup", 0, 2**31 - 1)
        self._whole("seed", 0, 2**31 - 1)
        for name in ("weight_decay", "balance_loss", "router_z_loss", "balance_bias"):
            self._real(name, 0.0)
        for name in ("learning_rate", "clip_norm", "validation"):
            self._real(name, math.ulp(0.0))
        if self.validation >= 1:
            raise OptionError(f"validation: expected a part between 0 and 1, got {self.validation}.")
        if self.warmup >= self.steps:
            raise OptionError(f"warmup: {self.warmup} steps leave none of {self.steps} for the highest learning rate.")
        self._divides("accumulate", "batch_size")


def check_dtype(dtype: str) -> None:
    """Refuses a dtype that models are not computed in.

    Raises:
      OptionError: not one of `Dtype`.
    """
    if dtype not in get_args(Dtype):
        raise OptionError(f"dtype: {dtype!r} is not one of {', '.join(get_args(Dtype))}.")


def _size_of(options: Any, name: str) -> int | None:
    """The bytes, or bytes a second, of a field."""
    value = getattr(options, name)
    return (
        None if value is None else parse_size(value.removesuffix("/s") if isinstance(value, str) else value, name=name)
    )


def _no_more_choices_than_experts(options: MakeTraceOptions | ModelShape) -> None:
    if options.experts_per_token > options.experts:
        raise OptionError(
            f"experts_per_token: {options.experts_per_token} is more than experts, which is {options.experts}."
        )


def _one_of(options: object, name: str) -> None:
    """Refuses a value that the type of the field does not list."""
    value, allowed = getattr(options, name), get_args(get_type_hints(type(options))[name])
    if value not in allowed:
        raise OptionError(f"{name}: {_shown(value)} is not one of {', '.join(allowed)}.")


def _positive(name: str, value: object) -> None:
    """Refuses what does not count rows or tokens: those are int32 on the device."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise OptionError(f"{name}: expected {_range(1, 2**31 - 1)}, got {_shown(value)}.")


def _biases(given: object) -> dict[int, float]:
    """A `logit_bias` with plain numbers in it."""
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias: expected an object of token ids and numbers, got {_shown(given)}.")
    biases = {}
    for key, value in given.items():
        token, bias = _as_whole(key), _as_real(value)
        if token is None:
            raise RequestError(f"logit_bias: {_shown(key)} is not a token id.")
        if bias is None or math.isnan(bias):
            raise RequestError(f"logit_bias: the bias of token {_shown(token)} is {_shown(value)}, not a number.")
        biases[token] = bias
    return biases


def _as_path(name: str, value: object) -> Path:
    """The path of a file; whether it can be there is not looked at.

    Raises:
      OptionError: no path. `name` is the option to blame.
    """
    given = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(given, str) or not given or "\0" in given:
        raise OptionError(f"{name}: expected the path of a file, got {_shown(value)}.")
    return Path(given)


def _as_text(value: object) -> str | None:
    return value if type(value) is str else None


def _as_whole(value: object) -> int | None:
    """A whole number of any type, numpy's too, as an int; None for anything else. A bool is no number."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _as_real(value: object) -> float | None:
    """As `_as_whole`, for a number with or without a fraction; None also for an integer that no float can hold."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _range(least: int, most: int | None) -> str:
    return f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}")


def _shown(value: object) -> str:
    """A value for a message, cut where it is long. Python refuses to write integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
