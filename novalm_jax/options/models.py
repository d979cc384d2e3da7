"""Models that are made: of random weights, or by training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from novalm_jax.errors import OptionError
from novalm_jax.options.checks import Checked, Dtype, check_dtype, no_more_choices_than_experts


@dataclass(frozen=True)
class ModelShape(Checked):
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
        no_more_choices_than_experts(self.experts_per_token, self.experts)

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
