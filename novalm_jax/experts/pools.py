"""Slots: preallocated memory for expert records, on the device and in pinned host memory.

Which record lies where is not known here. The device's pool belongs to the compute thread alone: a program that it is
given to returns the next one, and the one before is gone. Slots of the host's pool are written and read by whoever
holds them, one thread at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from novalm_jax.compat import compile_program, pinned_array
from novalm_jax.kernels.experts import Weights
from novalm_jax.kernels.storage import delete_arrays


def pool_shapes(layout: Weights, slots: int) -> Weights:
    """The arrays of a pool, as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((slots, *leaf.shape), leaf.dtype), layout)


def compile_insert(layout: Weights, slots: int) -> jax.stages.Compiled:
    """(pool, record, int32 slot) -> (pool, a scalar that is there once the record is in place); the pool is donated."""
    arguments = (pool_shapes(layout, slots), layout, jax.ShapeDtypeStruct((), jnp.int32))
    return compile_program(_insert, arguments, donate=(0,))


def compile_new(layout: Weights, slots: int) -> jax.stages.Compiled:
    """() -> an empty pool."""
    shapes = pool_shapes(layout, slots)
    return compile_program(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), ())


def _insert(pool: Weights, record: Weights, slot: jax.Array) -> tuple[Weights, jax.Array]:
    pool = jax.tree.map(lambda stack, one: lax.dynamic_update_index_in_dim(stack, one, slot, 0), pool, record)
    # Read back from the pool, so that it cannot be there before.
    return pool, lax.dynamic_index_in_dim(pool.down.reshape(pool.down.shape[0], -1), slot, keepdims=False)[0]


class DevicePool:
    """Slots on the device.

    Attributes:
      arrays: the newest arrays, `[slots, ...]` each.
    """

    def __init__(self, new: jax.stages.Compiled, insert: jax.stages.Compiled):
        """Made by `compile_new` and `compile_insert`."""
        self._new, self._insert = new, insert
        self.arrays: Weights = new()

    def __len__(self) -> int:
        return len(self.arrays.down)

    def insert(self, record: Weights, slot: int) -> jax.Array:
        """Puts a record, arrays on the device, into a slot; gives what is there once that is done."""
        self.arrays, done = self._insert(self.arrays, record, np.int32(slot))
        return done

    def settle(self) -> None:
        """Returns once all that was put into slots is there."""
        jax.block_until_ready(self.arrays)

    @property
    def lost(self) -> bool:
        """Whether the slots are gone, because an interrupt came just after they were given to a program."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.arrays))

    def renew(self) -> None:
        """New slots in place of lost ones."""
        self.arrays = self._new()

    def close(self) -> None:
        """Frees the memory. Closing twice is fine, here and below."""
        delete_arrays(self.arrays)


class HostPool:
    """Slots in pinned host memory: one large array for each array of a record."""

    def __init__(self, layout: Weights, slots: int):
        pairs = jax.tree.map(lambda leaf: pinned_array(leaf.shape, np.dtype(leaf.dtype)), pool_shapes(layout, slots))
        self._arrays: Any = jax.tree.map(lambda pair: pair[0], pairs, is_leaf=_is_pair)
        self._views: Any = jax.tree.map(lambda pair: pair[1], pairs, is_leaf=_is_pair)

    def slot(self, number: int) -> Weights:
        """The memory of a slot, as numpy arrays."""
        views: Weights = jax.tree.map(lambda view: view[number], self._views)
        return views

    def close(self) -> None:
        """Frees the memory. No slot may be in use."""
        self._views = None
        delete_arrays(self._arrays)


def _is_pair(node: object) -> bool:
    return type(node) is tuple
