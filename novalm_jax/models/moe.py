"""Mixture of experts (arXiv:1701.06538), split where experts may live elsewhere: `route`, `experts`, `combine`.

Knows routers, weights and sums. Refuses to know where a runtime keeps its experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from novalm_jax.config import MoEConfig
from novalm_jax.kernels import experts as kernel
from novalm_jax.kernels.linear import einsum
from novalm_jax.models.linear import GatedMLP, Linear
from novalm_jax.models.params import parameter


class Routing(NamedTuple):
    """The router's choice for each token, best first: ids int32 `[t, k]` and weights float32 `[t, k]`."""

    ids: jax.Array
    weights: jax.Array


class Experts(nnx.Module):
    """The weights of all routed experts of a layer, stacked, each in the checkpoint's layout `[out, in]`."""

    def __init__(self, hidden_size: int, config: MoEConfig, *, dtype: Any, rngs: nnx.Rngs):
        e, f, d = config.num_experts, config.expert_width, hidden_size

        def stack(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
            return parameter(rngs, shape, axes, dtype)

        self.gate = stack((e, f, d), ("expert", "expert_mlp", "embed"))
        self.up = stack((e, f, d), ("expert", "expert_mlp", "embed"))
        self.down = stack((e, d, f), ("expert", "embed", "expert_mlp"))

    def weights(self) -> kernel.Weights:
        """The arrays, as the expert kernels take them."""
        return kernel.Weights(self.gate.get_value(), self.up.get_value(), self.down.get_value())


class MoE(nnx.Module):
    """Routed experts and, beside them, an optional shared expert that sees every token."""

    def __init__(self, hidden_size: int, config: MoEConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.router = Linear(hidden_size, config.num_experts, ("expert", "embed"), dtype=dtype, rngs=rngs)
        self.experts = Experts(hidden_size, config, dtype=dtype, rngs=rngs)
        self.shared = None
        self.shared_gate = None
        if config.shared_width:
            self.shared = nnx.data(
                GatedMLP(hidden_size, config.shared_width, config.activation, dtype=dtype, rngs=rngs)
            )
        if config.shared_width and config.shared_gate:
            self.shared_gate = nnx.data(Linear(hidden_size, 1, ("one", "embed"), dtype=dtype, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x [t, d]` -> `[t, d]`, with all experts at hand."""
        routing = self.route(x)
        products = kernel.reference(x, routing.ids, self.experts.weights(), self.config.activation)
        return self.combine(x, products, routing.weights)

    def route(self, x: jax.Array) -> Routing:
        """Chooses experts for `x [t, d]`; logits and softmax are float32 whatever the dtype of x."""
        logits = einsum("td,ed->te", x, self.router.weight[...])
        return choose(logits, self.config)

    def combine(self, x: jax.Array, products: jax.Array, weights: jax.Array) -> jax.Array:
        """Weighted sum of `products [t, k, d]` in router order, plus the shared expert on `x [t, d]`: `[t, d]`."""
        total = jnp.zeros(x.shape, jnp.float32)
        for i in range(products.shape[1]):
            total += weights[:, i, None] * products[:, i].astype(jnp.float32)
        if self.shared is not None:
            shared = self.shared(x).astype(jnp.float32)
            if self.shared_gate is not None:
                shared *= jax.nn.sigmoid(self._gate_logit(x, self.shared_gate.weight[...]))
            total += shared
        return total.astype(x.dtype)

    @staticmethod
    def _gate_logit(x: jax.Array, gate: jax.Array) -> jax.Array:
        """The shared expert's gate `[1, d]` on `x [t, d]`, before its sigmoid: float32 `[t, 1]`.

        Eight columns instead of one: XLA's CPU backend rounds a narrower product differently for 2 rows and 8.
        """
        columns = einsum("td,ed->te", x, jnp.concatenate([gate] * 8))
        return columns[:, :1].astype(x.dtype).astype(jnp.float32)


def choose(logits: jax.Array, config: MoEConfig) -> Routing:
    """The k most likely experts of each row of float32 `logits [t, e]`; of equal ones the lower id."""
    if config.softmax == "after":
        top, ids = lax.top_k(logits, config.experts_per_token)
        return Routing(ids, jax.nn.softmax(top, axis=-1))
    weights, ids = lax.top_k(jax.nn.softmax(logits, axis=-1), config.experts_per_token)
    if config.renormalise:
        weights /= weights.sum(axis=-1, keepdims=True)
    return Routing(ids, weights)
