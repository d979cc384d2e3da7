"""Keys and values of all sequences in pages on the device, and how attention sees them.

Knows pages, tables and positions. Refuses to know requests: who holds which page is `pages`' to remember. Pages are
never cleared: a position is written before any query can see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from novalm_jax.config import AttentionConfig, LatentConfig, ModelConfig
from novalm_jax.kernels import attention as kernel
from novalm_jax.kernels import latent_attention
from novalm_jax.kernels.attention import Rule
from novalm_jax.kernels.latent_attention import Up
from novalm_jax.kernels.native import attention as native_attention
from novalm_jax.kernels.storage import storage_dtype, tree_bytes, view_as
from novalm_jax.kv.pages import PAGE, Reach

MOVED_TOGETHER = 8
"""Pages of each group that one program copies, saves or loads."""


class LayerPages(NamedTuple):
    """What one layer keeps of tokens, in storage form.

    `keys` and `values` are `[p, g, PAGE, c]`. With latent attention `keys` holds the latents,
    `[p, 1, PAGE, kv_rank + rope_dim]`, and there are no `values`.
    """

    keys: jax.Array
    values: jax.Array | None


def reach_of(config: AttentionConfig | LatentConfig, capacity: int) -> Reach:
    """How far back a layer sees, of at most `capacity` positions: a limit beyond them is none."""
    if isinstance(config, LatentConfig):
        return Reach()
    window, chunk = (None if limit is None or limit >= capacity else limit for limit in (config.window, config.chunk))
    return Reach(window, chunk)


def reaches_of(config: ModelConfig, capacity: int) -> tuple[Reach, ...]:
    """The groups of a model's layers, by how far back they see, in the order of their first layers."""
    return tuple(dict.fromkeys(reach_of(layer.attention, capacity) for layer in config.layers))


def groups_of(config: ModelConfig, capacity: int) -> list[int]:
    """Which of `reaches_of` each layer has."""
    reaches = reaches_of(config, capacity)
    return [reaches.index(reach_of(layer.attention, capacity)) for layer in config.layers]


def page_counts(reaches: Sequence[Reach], rows: int, capacity: int, pages: int, together: int) -> tuple[int, ...]:
    """Pages of each group where one that sees everything has `pages`: fewer for those that `rows` sequences cannot
    fill, of up to `capacity` positions, of which one grows by up to `together` at a time."""
    return tuple(
        min(pages, (rows - 1) * reach.most_blocks(capacity, 1) + reach.most_blocks(capacity, together))
        for reach in reaches
    )


def page_shape(config: AttentionConfig | LatentConfig, pages: int, dtype: np.dtype) -> LayerPages:
    """One layer's pages with `jax.ShapeDtypeStruct`s in place of arrays."""

    def array(heads: int, size: int) -> Any:
        return jax.ShapeDtypeStruct((pages, heads, PAGE, size), storage_dtype(dtype))

    if isinstance(config, LatentConfig):
        return LayerPages(array(1, config.kv_rank + config.rope_dim), None)
    return LayerPages(*[array(config.num_kv_heads, config.head_dim)] * 2)


def page_bytes(config: ModelConfig, capacity: int, pages: Sequence[int], dtype: np.dtype) -> list[int]:
    """Bytes of the pages of each layer, of which group i has `pages[i]`."""
    groups = groups_of(config, capacity)
    return [
        tree_bytes(page_shape(layer.attention, pages[group], dtype))
        for layer, group in zip(config.layers, groups, strict=True)
    ]


class PagedView(NamedTuple):
    """The pages of some sequences in one layer, as attention sees them; implements `models.attention.KV`.

    Attributes:
      pages: all of the layer.
      tables: int32 `[b, n]`, the page of each block of positions of each sequence. What has none is never read; what
        is one past the last page is never written.
      starts: int32 `[b]`, position of each sequence's first new token; negative for none.
      ends: int32 `[b]`, position after its last new token that is not padding: what follows sees nothing and is not
        kept.
      native: whether native code attends where each row has one new token; not an array, so that a view is made where
        it is used, and no argument of a program.
    """

    pages: LayerPages
    tables: jax.Array
    starts: jax.Array
    ends: jax.Array
    native: bool = False

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, rule: Rule, sinks: jax.Array | None
    ) -> tuple[jax.Array, PagedView]:
        """Writes the new keys and values `[b, t, g, c]`, then attends q `[b, t, h, c]` to everything before."""
        assert self.pages.values is not None
        keys, values = self._written(self.pages.keys, k), self._written(self.pages.values, v)
        where = self.tables, self.starts, self.ends
        if self.native and q.shape[1] == 1:
            out = native_attention.paged(q, keys, values, v.shape[-1], *where, rule, sinks)
        else:
            out = kernel.paged(q, keys, values, *where, rule, sinks)
        return out, self._replace(pages=LayerPages(keys, values))

    def attend_latent(self, q: jax.Array, latents: jax.Array, up: Up, rule: Rule) -> tuple[jax.Array, PagedView]:
        """Writes the new latents `[b, t, l + r]`, then attends q `[b, t, h, n + r]` to everything before.

        One new token a row is a decode step, where the absorbed form costs less.
        """
        stored = self._written(self.pages.keys, latents[:, :, None])
        where = self.tables, self.starts, self.ends
        if q.shape[1] == 1:
            out = latent_attention.absorbed(q, stored, up, *where, rule, self.native)
        else:
            out = latent_attention.expanded(q, stored, up, *where, rule)
        return out, self._replace(pages=LayerPages(stored, None))

    def _written(self, stored: jax.Array, new: jax.Array) -> jax.Array:
        positions = self.starts[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)[None]
        block = jnp.clip(positions // PAGE, 0, self.tables.shape[1] - 1)
        kept = (positions >= 0) & (positions < self.ends[:, None])
        pages = jnp.where(kept, jnp.take_along_axis(self.tables, block, axis=1), jnp.int32(len(stored)))
        return stored.at[pages, :, positions % PAGE].set(view_as(new, stored.dtype), mode="drop")


def resized(pages: LayerPages, count: int) -> LayerPages:
    """So many pages of a layer: those there are, and empty ones behind them; or the first ones alone."""
    kept = min(count, len(pages.keys))
    return jax.tree.map(lambda a: jnp.zeros((count, *a.shape[1:]), a.dtype).at[:kept].set(a[:kept]), pages)


def copy_pages(
    groups: Sequence[int], pages: tuple[LayerPages, ...], sources: tuple[jax.Array, ...], targets: tuple[jax.Array, ...]
) -> tuple[LayerPages, ...]:
    """Copies pages of every layer, whose group is `groups[i]`: int32 `[n]` of each group; one past the last is none."""
    return load_pages(groups, pages, save_pages(groups, pages, sources), targets)


def save_pages(
    groups: Sequence[int], pages: tuple[LayerPages, ...], ids: tuple[jax.Array, ...]
) -> tuple[LayerPages, ...]:
    """Some pages of every layer: `[n, g, PAGE, c]`."""
    return tuple(
        jax.tree.map(lambda a, group=group: jnp.take(a, ids[group], axis=0, mode="clip"), layer)
        for layer, group in zip(pages, groups, strict=True)
    )


def load_pages(
    groups: Sequence[int], pages: tuple[LayerPages, ...], saved: tuple[LayerPages, ...], ids: tuple[jax.Array, ...]
) -> tuple[LayerPages, ...]:
    """Puts what `save_pages` gave into other pages."""
    return tuple(
        jax.tree.map(lambda a, b, group=group: a.at[ids[group]].set(b, mode="drop"), layer, content)
        for layer, content, group in zip(pages, saved, groups, strict=True)
    )
