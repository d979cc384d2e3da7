"""Mixture of experts (arXiv:1701.06538), split where experts may live elsewhere: `route`, `experts`, `combine`.

Knows weights and sums. Refuses to know where a runtime keeps its experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from novalm_jax.config import ExpertConfig, MoEConfig
from novalm_jax.kernels import experts as kernel
from novalm_jax.kernels.linear import einsum
from novalm_jax.models.linear import GatedMLP, Linear
from novalm_jax.models.params import parameter, zeros
from novalm_jax.models.router import Routing, choose


class Experts(nnx.Module):
    """The weights of all routed experts of a layer, stacked, each in the checkpoint's layout."""

    def __init__(self, hidden_size: int, num_experts: int, config: ExpertConfig, *, dtype: Any, rngs: nnx.Rngs):
        e, f, d = num_experts, config.width, hidden_size
        joint = 1 if config.joint == "no" else 2

        def matrix(outputs: int, inputs: int, axes: tuple[str, str], inputs_first: bool) -> nnx.Param:
            shape = (inputs, outputs) if inputs_first else (outputs, inputs)
            return parameter(rngs, (e, *shape), ("expert", *(axes[::-1] if inputs_first else axes)), dtype)

        def bias(size: int, axis: str) -> nnx.Param | None:
            return parameter(rngs, (e, size), ("expert", axis), dtype, zeros) if config.bias else None

        inward = ("expert_mlp", "embed")
        self.gate = matrix(f, d, inward, config.inputs_first) if joint == 1 else None
        self.up = matrix(joint * f, d, inward, config.inputs_first)
        self.down = matrix(d, f, ("embed", "expert_mlp"), config.down_inputs_first)
        self.gate_bias = bias(f, "expert_mlp") if joint == 1 else None
        self.up_bias = bias(joint * f, "expert_mlp")
        self.down_bias = bias(d, "embed")

    def weights(self) -> kernel.Weights:
        """The arrays, as the expert kernels take them."""
        return kernel.Weights(
            gate=_value(self.gate),
            up=self.up.get_value(),
            down=self.down.get_value(),
            gate_bias=_value(self.gate_bias),
            up_bias=_value(self.up_bias),
            down_bias=_value(self.down_bias),
        )


def _value(param: nnx.Param | None) -> jax.Array | None:
    return None if param is None else param.get_value()


class RouterTrace(NamedTuple):
    """What the router of a layer did with some tokens: logits float32 `[t, e]`, and ids int32 `[t, k]`, best first."""

    logits: jax.Array
    ids: jax.Array


class MoE(nnx.Module):
    """Routed experts and, beside them, an optional shared expert that sees every token."""

    def __init__(self, hidden_size: int, config: MoEConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.router = Linear(
            *(hidden_size, config.num_experts, ("expert", "embed")), bias=config.router.bias, dtype=dtype, rngs=rngs
        )
        self.choice_bias: nnx.Param | None = None
        if config.router.choice_bias:
            # Always float32: rounded to bfloat16 it would be coarser than the differences between scores.
            self.choice_bias = nnx.data(parameter(rngs, (config.num_experts,), ("expert",), jnp.float32, zeros))
        self.experts = Experts(hidden_size, config.num_experts, config.expert, dtype=dtype, rngs=rngs)
        self.shared = None
        self.shared_gate = None
        if config.shared_width:
            width, activation = config.shared_width, config.expert.activation
            self.shared = nnx.data(
                GatedMLP(hidden_size, width, activation, bias=config.shared_bias, dtype=dtype, rngs=rngs)
            )
        if config.shared_width and config.shared_gate:
            self.shared_gate = nnx.data(Linear(hidden_size, 1, ("one", "embed"), dtype=dtype, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x [t, d]` -> `[t, d]`, with all experts at hand."""
        return self.traced(x)[0]

    def traced(self, x: jax.Array) -> tuple[jax.Array, RouterTrace]:
        """As calling the layer, and what its router did."""
        logits = self.router_logits(x)
        routing = self.choose(logits)
        weights, scales = self.experts.weights(), input_scales(self.config, routing)
        group = kernel.group_size(routing.ids.size, self.config.num_experts)
        products = kernel.grouped(x, routing.ids, weights, self.config.expert, group, scales)
        return self.combine(x, products, routing.weights), RouterTrace(logits, routing.ids)

    def route(self, x: jax.Array) -> Routing:
        """Chooses experts for `x [t, d]`."""
        return self.choose(self.router_logits(x))

    def router_logits(self, x: jax.Array) -> jax.Array:
        """What the choice of experts for `x [t, d]` is made from: `[t, e]`, float32 whatever the dtype of x."""
        return self.router.unrounded(x)

    def choose(self, logits: jax.Array) -> Routing:
        """The experts of each row of `logits [t, e]`, and their weights."""
        bias = None if self.choice_bias is None else self.choice_bias[...]
        return choose(logits, self.config.router, self.config.experts_per_token, bias)

    def combine(self, x: jax.Array, products: jax.Array, weights: jax.Array) -> jax.Array:
        """Weighted sum of `products [t, k, d]` in router order, plus the shared expert on `x [t, d]`: `[t, d]`."""
        total = jnp.zeros(x.shape, jnp.float32)
        for i in range(products.shape[1]):
            product = products[:, i].astype(jnp.float32)
            total += product if self.config.router.scale_inputs else weights[:, i, None] * product
        if self.shared is not None:
            shared = self.shared(x).astype(jnp.float32)
            if self.shared_gate is not None:
                shared *= jax.nn.sigmoid(self._gate_logit(x, self.shared_gate.weight[...]))
            total += shared
        return total.astype(x.dtype)

    @staticmethod
    def _gate_logit(x: jax.Array, gate: jax.Array) -> jax.Array:
        """The shared expert's gate `[1, d]` on `x [t, d]`, before its sigmoid: float32 `[t, 1]`.

        Eight columns instead of one: XLA's CPU backend rounds a narrower product differently for 2 rows and 8. It
        always multiplies here.
        """
        columns = einsum("td,ed->te", x, jnp.concatenate([gate] * 8))
        return columns[:, :1].astype(x.dtype).astype(jnp.float32)


def input_scales(config: MoEConfig, routing: Routing) -> jax.Array | None:
    """What the inputs of the chosen experts are multiplied by, float32 `[t, k]`; None: weights scale their outputs."""
    return routing.weights if config.router.scale_inputs else None
