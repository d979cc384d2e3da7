"""Pages on the device: what is written, copied, saved and loaded and what is not, and the check in front of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from novalm_jax.compat import compile_program
from novalm_jax.config import AttentionConfig, LatentConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig, RopeConfig
from novalm_jax.engine.executor import device_table
from novalm_jax.errors import PageError
from novalm_jax.kernels.attention import Rule
from novalm_jax.kernels.latent_attention import Up
from novalm_jax.kv.paged import (
    MOVED_TOGETHER,
    LayerPages,
    PagedView,
    copy_pages,
    load_pages,
    page_bytes,
    page_counts,
    page_shape,
    reaches_of,
    save_pages,
)
from novalm_jax.kv.pages import NONE, PAGE, Pages, Reach, blocks

HEADS = AttentionConfig(4, 2, 8, 0.3, None, 0)
LATENT = LatentConfig(2, None, 5, 6, 4, 7, 0.3, RopeConfig(50.0), norm_eps=0.1)
COUNT = 7
"""Pages of these tests."""


def random(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def ints(numbers: Any) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


def filled(config: AttentionConfig | LatentConfig, count: int, dtype: Any, seed: int = 9) -> LayerPages:
    """Pages of any bits, NaN among them."""
    draw = np.random.default_rng(seed)

    def bits(a: jax.ShapeDtypeStruct) -> jax.Array:
        drawn = draw.integers(0, 256, (*a.shape, a.dtype.itemsize), np.uint8)
        drawn[:, :, 3] = 255
        return jnp.asarray(drawn.view(a.dtype)[..., 0])

    pages: LayerPages = jax.tree.map(bits, page_shape(config, count, np.dtype(dtype)))
    return pages


def bits_of(tree: Any) -> list[np.ndarray]:
    """As unsigned integers, of which NaN equals itself."""
    return [np.asarray(a).view(f"uint{8 * a.dtype.itemsize}").copy() for a in jax.tree.leaves(tree)]


def assert_same(found: Any, expected: list[np.ndarray]) -> None:
    for one, other in zip(bits_of(found), expected, strict=True):
        np.testing.assert_array_equal(one, other)


# --- what is written -------------------------------------------------------------------------------------------------

WRITES = {
    "a chunk from inside a page on": (150, [[4, 0, 6, 2]], [50], [200]),
    "a padded chunk": (64, [[4, 0, 7, 7]], [100], [107]),
    "a chunk of padding, as its pages were taken away": (64, [[7, 7, 7, 7]], [100], [100]),
    "padding beyond the table": (64, [[4, 0, 6, 2]], [250], [256]),
    "a decode step with idle rows": (
        1,
        [[4, 0], [4, 0], [5, 2], [5, 2], [1, 7]],
        [63, -1, 64, -1, 5],
        [64, 0, 65, 0, 6],
    ),
    "a row without a page there": (1, [[4, 7], [5, 2]], [64, 64], [65, 65]),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", WRITES)
def test_new_tokens_get_into_their_pages_and_nothing_else_changes(case: str, dtype: Any) -> None:
    t, tables, starts, ends = WRITES[case]
    q, k, v = (random(len(tables), t, n, 8, seed=n, dtype=dtype) for n in (4, 2, 2))
    v = v * jnp.asarray(2, dtype)
    pages = filled(HEADS, COUNT, dtype)
    expected = bits_of(pages)
    for stored, new in zip(expected, bits_of((k, v)), strict=True):
        for row, (table, start, end) in enumerate(zip(tables, starts, ends, strict=True)):
            for at in range(start, end) if start >= 0 else ():
                if table[at // PAGE] < COUNT:
                    stored[table[at // PAGE], :, at % PAGE] = new[row, at - start]
    _, view = PagedView(pages, *map(ints, (tables, starts, ends))).attend(q, k, v, Rule(0.3), None)
    assert_same(view.pages, expected)


@pytest.mark.parametrize("t", [1, 64])
def test_latents_get_into_their_pages_and_nothing_else_changes(t: int) -> None:
    q, latents = random(1, t, 2, 10), random(1, t, 9)
    pages, up = filled(LATENT, COUNT, jnp.float32), Up(random(2, 6, 5), random(2, 7, 5))
    expected, end = bits_of(pages), 60 + min(t, 10)
    for at in range(60, end):
        expected[0][[4, 0][at // PAGE], 0, at % PAGE] = bits_of(latents)[0][0, at - 60]
    _, view = PagedView(pages, ints([[4, 0]]), ints([60]), ints([end])).attend_latent(q, latents, up, Rule(0.3))
    assert view.pages.values is None
    assert_same(view.pages, expected)


# --- what is moved ---------------------------------------------------------------------------------------------------

GROUPS = (1, 0, 1)
"""The group of each of three layers; the first group has 5 pages, the other one 7."""


def some_layers(dtype: Any) -> tuple[LayerPages, ...]:
    return filled(HEADS, 7, dtype, 1), filled(LATENT, 5, dtype, 2), filled(HEADS, 7, dtype, 3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pages_are_copied_in_every_layer_of_their_group_and_no_others_change(dtype: Any) -> None:
    """All are read before any is written: two pages of the second group change places."""
    layers = some_layers(dtype)
    sources, targets = (ints([4, 5]), ints([1, 2, 6, 7])), (ints([0, 5]), ints([2, 1, 3, 7]))
    expected = [bits_of(layer) for layer in layers]
    for group, layer in zip(GROUPS, expected, strict=True):
        for stored in layer:
            before = stored.copy()
            for source, target in ([(4, 0)], [(1, 2), (2, 1), (6, 3)])[group]:
                stored[target] = before[source]
    for layer, bits in zip(copy_pages(GROUPS, layers, sources, targets), expected, strict=True):
        assert_same(layer, bits)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_was_saved_is_loaded_into_other_pages_and_no_others_change(dtype: Any) -> None:
    layers = some_layers(dtype)
    others = jax.tree.map(jnp.zeros_like, layers)
    ids = (ints([3, 0, 5, 5]), ints([6, 2, 4, 7]))
    saved = save_pages(GROUPS, layers, ids)
    for group, layer, part in zip(GROUPS, layers, saved, strict=True):
        there = [3, 0] if group == 0 else [6, 2, 4]
        for found, bits in zip(bits_of(part), bits_of(layer), strict=True):
            np.testing.assert_array_equal(found[: len(there)], bits[there])
    into = (ints([1, 4, 5, 5]), ints([0, 1, 3, 7]))
    for group, before, part, after in zip(GROUPS, others, saved, load_pages(GROUPS, others, saved, into), strict=True):
        expected = bits_of(before)
        for stored, content in zip(expected, bits_of(part), strict=True):
            for i, page in enumerate([1, 4] if group == 0 else [0, 1, 3]):
                stored[page] = content[i]
        assert_same(after, expected)


def test_none_in_place_of_every_page_moves_nothing() -> None:
    layers = some_layers(jnp.float32)
    none = ints([5] * MOVED_TOGETHER), ints([7] * MOVED_TOGETHER)
    some = ints(np.arange(MOVED_TOGETHER) % 5), ints(np.arange(MOVED_TOGETHER) % 7)
    saved = save_pages(GROUPS, layers, some)
    for moved in (copy_pages(GROUPS, layers, some, none), load_pages(GROUPS, layers, saved, none)):
        for layer, before in zip(moved, layers, strict=True):
            assert_same(layer, bits_of(before))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pages_are_moved_in_place_and_take_the_memory_of_those_that_move(dtype: Any) -> None:
    layers = tuple(page_shape(HEADS, 256, np.dtype(dtype)) for _ in range(2))
    ids, bytes_of_page = jax.ShapeDtypeStruct((MOVED_TOGETHER,), jnp.int32), 2 * 2 * PAGE * 8 * np.dtype(dtype).itemsize
    saved = jax.eval_shape(lambda layers, ids: save_pages((0, 0), layers, (ids,)), layers, ids)

    def copy(layers: Any, sources: Any, targets: Any) -> Any:
        return copy_pages((0, 0), layers, (sources,), (targets,))

    def load(layers: Any, saved: Any, ids: Any) -> Any:
        return load_pages((0, 0), layers, saved, (ids,))

    for move, arguments, lots in ((copy, (ids, ids), 1), (load, (saved, ids), 0)):
        analysis: Any = compile_program(move, (layers, *arguments), donate=(0,)).memory_analysis()
        assert analysis.alias_size_in_bytes == 2 * 256 * bytes_of_page
        assert analysis.temp_size_in_bytes <= 2 * lots * MOVED_TOGETHER * bytes_of_page + 1024


# --- the check in front of it ----------------------------------------------------------------------------------------


def test_a_table_for_the_device_says_none_by_one_past_the_last_page() -> None:
    table = device_table([3, NONE, 0], 4, 5)
    assert table.dtype == np.int32
    assert table.tolist() == [3, 4, 0, 4, 4]
    assert device_table([], 4, 2).tolist() == [4, 4]


@pytest.mark.parametrize("page", [4, -2, 2**31, -(2**40)])
def test_a_page_that_is_not_there_is_refused(page: int) -> None:
    with pytest.raises(PageError, match=f"page {page} of 4"):
        device_table([3, page, NONE], 4, 5)


def test_a_table_that_is_too_long_is_refused() -> None:
    with pytest.raises(PageError, match="has 6 pages, and 5 at most"):
        device_table([0, 1, 2, 3, 0, 1], 4, 5)


@pytest.mark.parametrize(("page", "read"), [(COUNT, COUNT - 1), (COUNT + 40, COUNT - 1), (-2, COUNT - 2)])
def test_without_that_check_another_page_would_be_read_without_a_word(page: int, read: int) -> None:
    """XLA takes the last page for one that is not there, and counts negative ones from the end."""
    q, k, v = (random(1, 1, n, 8, seed=n) for n in (4, 2, 2))
    pages = LayerPages(*(random(COUNT, 2, PAGE, 8, seed=seed) for seed in (1, 2)))

    def attended(first: int) -> np.ndarray:
        view = PagedView(pages, ints([[first, 3]]), ints([70]), ints([71]))
        return np.asarray(view.attend(q, k, v, Rule(0.3), None)[0])

    np.testing.assert_array_equal(attended(page), attended(read))
    assert np.abs(attended(page) - attended(2)).max() > 0.01, "it makes no difference here"
    with pytest.raises(PageError):
        device_table([page, 3], COUNT, 2)


def test_without_that_check_a_negative_page_would_be_written() -> None:
    q, new, pages = random(1, 1, 4, 8), random(1, 1, 2, 8), filled(HEADS, COUNT, jnp.float32)

    def written(table: Any) -> LayerPages:
        view = PagedView(pages, ints(table)[None], ints([5]), ints([6]))
        return view.attend(q, new, new, Rule(0.3), None)[1].pages

    np.testing.assert_array_equal(written([NONE]).keys[COUNT - 1, :, 5], new[0, 0])
    assert_same(written(device_table([NONE], COUNT, 1)), bits_of(pages))


# --- how many --------------------------------------------------------------------------------------------------------


def model_of(*attentions: AttentionConfig | LatentConfig) -> ModelConfig:
    norm, mlp = NormConfig(1e-6), MLPConfig(16, "silu")
    layers = tuple(LayerConfig(8, norm, attention, mlp) for attention in attentions)
    return ModelConfig("llama", 32, 8, 4096, norm, False, layers)


def limited(window: int | None = None, chunk: int | None = None) -> AttentionConfig:
    return AttentionConfig(4, 2, 8, 0.3, None, 0, window=window, chunk=chunk)


def test_layers_that_see_as_far_are_a_group_and_limits_beyond_the_capacity_are_none() -> None:
    config = model_of(limited(window=128), limited(), limited(window=1024), LATENT, limited(chunk=256), limited(128))
    assert reaches_of(config, 1024) == (Reach(128), Reach(), Reach(None, 256))
    assert reaches_of(config, 1088) == (Reach(128), Reach(), Reach(1024), Reach(None, 256))
    assert reaches_of(config, 128) == (Reach(),)


def test_each_layer_takes_the_pages_of_its_group() -> None:
    config = model_of(limited(window=128), limited(), LATENT)
    assert page_bytes(config, 1024, (3, 10), np.dtype(jnp.bfloat16)) == [
        3 * 2 * 2 * PAGE * 8 * 2,
        10 * 2 * 2 * PAGE * 8 * 2,
        10 * PAGE * 9 * 2,
    ]


@pytest.mark.parametrize("reach", [Reach(), Reach(1), Reach(100), Reach(128), Reach(None, 192), Reach(70, 192)])
def test_every_row_has_pages_to_its_end_while_one_prompt_after_another_goes_on(reach: Reach) -> None:
    """Where a group that sees everything has as many pages as all rows can fill; another one has fewer of them."""
    rows, capacity, together = 3, 1024, 256
    most = rows * blocks(capacity)
    counts = page_counts([Reach(), reach], rows, capacity, most, together)
    assert counts[0] == most and (reach == Reach() or counts[1] < most)
    assert page_counts([Reach(), reach], rows, capacity, 5, together) == (5, min(5, counts[1]))
    book = Pages([Reach(), reach], counts, blocks(capacity))
    sequences, lengths = [book.new() for _ in range(rows)], [0] * rows

    def grow(row: int, tokens: int) -> None:
        end = min(lengths[row] + tokens, capacity)
        if end > lengths[row]:
            assert book.grow(sequences[row], lengths[row], end) == []
        lengths[row] = end

    for row in range(rows):
        while lengths[row] < 500 + row:
            grow(row, together - 7)
            # A prompt lets go of what the rest of it does not see.
            book.trim(sequences[row], lengths[row])
            for earlier in range(row):
                grow(earlier, 1)
    while min(lengths) < capacity:
        for row in range(rows):
            grow(row, 1)
