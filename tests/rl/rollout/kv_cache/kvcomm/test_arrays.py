"""Segments of keys and values at other positions, against float64 in numpy; other pages stay as they are."""

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.contexts.latents import make_latent_pool
from axlearn_like.layers.contexts.paged import make_pool
from rl.rollout.kv_cache.kvcomm.arrays import CacheForm, compare, offsets_of, read_segment, write_segment

pytestmark = pytest.mark.numerics

LAYERS, PAGES, PAGE, HEADS, WIDTH, SIZE = 2, 7, 8, 2, 12, 16
RNG = np.random.default_rng(0)


def freq_of(rotated: int) -> np.ndarray:
    return 10_000.0 ** (-np.arange(0, rotated, 2) / rotated)


def at(x: np.ndarray, positions: np.ndarray, rotated: int) -> np.ndarray:
    """Return float64 heads [l, t, k, h] whose last numbers are rotated as complex numbers, one for each position."""
    half = rotated // 2
    plain, pairs = x[..., : x.shape[-1] - rotated], x[..., x.shape[-1] - rotated :]
    turned = (pairs[..., :half] + 1j * pairs[..., half:]) * np.exp(1j * positions[:, None] * freq_of(rotated))[:, None]
    return np.concatenate([plain, turned.real, turned.imag], axis=-1)


def stored(pool: dict[str, jnp.ndarray], table: list[int], count: int) -> dict[str, np.ndarray]:
    """Return the first tokens of a sequence [l, t, k, h], by loops over pages."""
    found: dict[str, list[list[np.ndarray]]] = {name: [[] for _ in range(LAYERS)] for name in pool}
    for layer in range(LAYERS):
        for token in range(count):
            row, slot = layer * PAGES + table[token // PAGE], token % PAGE
            for name, x in pool.items():
                cell = (
                    x[row, slot][None] if name == "latent" else x[row, :, :, slot] if name == "k" else x[row, :, slot]
                )
                found[name][layer].append(np.asarray(cell))
    return {name: np.array(x) for name, x in found.items()}


@pytest.mark.parametrize(("kind", "rotated"), [("plain", WIDTH), ("latent", 4), ("plain", 0)])
@pytest.mark.parametrize(("start", "first", "count"), [(0, 0, 16), (5, 0, 11), (13, 3, 9), (40, 0, 1)])
def test_a_segment_stands_at_its_new_position_and_nothing_else_changes(
    kind: str, rotated: int, start: int, first: int, count: int
) -> None:
    form = CacheForm(LAYERS, PAGES, tuple(freq_of(rotated).tolist()) if rotated else ())
    if kind == "latent":
        pool = make_latent_pool(layers=LAYERS, pages=PAGES, page_size=PAGE, width=WIDTH, dtype=jnp.float32)
        shapes = {"latent": 1}
    else:
        sizes = {"layers": LAYERS, "pages": PAGES, "page_size": PAGE}
        pool = make_pool(**sizes, kv_heads=HEADS, head_dim=WIDTH, dtype=jnp.float32)
        shapes = {"k": HEADS, "v": HEADS}
    pool = {name: jnp.asarray(RNG.normal(size=x.shape), jnp.float32) for name, x in pool.items()}
    table = [3, 1, 6, 2, 5, 4]
    before = stored(pool, table, len(table) * PAGE)
    raw = {name: RNG.normal(size=(LAYERS, SIZE, heads, WIDTH)) for name, heads in shapes.items()}
    live = (np.arange(SIZE) < count)[:, None, None]
    turned = {name: at(x, np.arange(SIZE), rotated) if name != "v" else x for name, x in raw.items()}
    base = {name: jnp.asarray(x * live, jnp.float32) for name, x in turned.items()}
    places = np.int32(start), np.int32(first), np.int32(count)
    pool = write_segment(pool, np.array(table, np.int32), places, base, None, None, form=form)
    after = stored(pool, table, len(table) * PAGE)
    for name, x in raw.items():
        moved = at(x, start + np.arange(SIZE), rotated) if name != "v" else x
        expected = before[name].astype(np.float64)
        expected[:, start + first : start + count] = moved[:, first:count]
        np.testing.assert_allclose(after[name], expected, atol=2e-6, rtol=0)
    found = read_segment(pool, np.array(table, np.int32), np.int32(start), np.int32(count), form=form, size=SIZE)
    for name, x in found.items():
        np.testing.assert_array_equal(np.asarray(x)[:, :count], after[name][:, start : start + count])
        assert not np.asarray(x)[:, count:].any()


def test_offsets_of_one_anchor_that_is_the_text_itself_give_back_the_context() -> None:
    form = CacheForm(LAYERS, PAGES, tuple(freq_of(WIDTH).tolist()))
    shape, start, table = (LAYERS, SIZE, HEADS, WIDTH), 9, np.array([3, 1, 6, 2], np.int32)
    base = {name: jnp.asarray(RNG.normal(size=shape), jnp.float32) for name in ("k", "v")}
    context = {name: jnp.asarray(RNG.normal(size=shape), jnp.float32) for name in ("k", "v")}
    offsets = offsets_of(context, base, np.int32(start), form=form)
    stacks = ({name: jnp.stack([x, x + 9]) for name, x in tokens.items()} for tokens in (base, offsets))
    bases, stack = stacks
    _, weights, _ = compare(base, bases, np.array([True, False]), np.int32(SIZE), np.float32(1))
    empty = make_pool(layers=LAYERS, pages=PAGES, page_size=PAGE, kv_heads=HEADS, head_dim=WIDTH, dtype=jnp.float32)
    places = np.int32(start), np.int32(0), np.int32(SIZE)
    pool = write_segment(empty, table, places, base, stack, weights, form=form)
    found = stored(pool, table.tolist(), start + SIZE)
    for name, x in context.items():
        np.testing.assert_allclose(found[name][:, start:], np.asarray(x), atol=4e-6, rtol=0)


def test_distances_and_weights_are_those_of_numpy() -> None:
    count, anchors = 5, 4
    base = {name: RNG.normal(size=(LAYERS, SIZE, HEADS, WIDTH)).astype(np.float32) for name in ("k", "v")}
    others = {name: RNG.normal(size=(anchors, *x.shape)).astype(np.float32) for name, x in base.items()}
    usable = np.array([True, False, True, True])
    found, of_tokens, of_channels = compare(base, others, usable, np.int32(count), np.float32(0.5))
    gaps = {n: (others[n].astype(np.float64) - base[n])[:, :, :count] for n in base}
    np.testing.assert_allclose(np.asarray(found), np.sqrt((gaps["v"] ** 2).sum((1, 2, 3, 4))), rtol=1e-5)
    for name, gap in gaps.items():
        for axes, weights in ((lambda g: np.abs(g).mean((1, 3, 4), keepdims=True), of_tokens), (None, of_channels)):
            distance = np.sqrt((gap**2).sum(2, keepdims=True)) if axes is None else axes(gap)
            powers = np.exp(-distance / 0.5) * usable[:, None, None, None, None]
            shown = np.asarray(weights[name])
            shown = shown if axes is None else shown[:, :, :count]
            np.testing.assert_allclose(shown, powers / powers.sum(0), atol=1e-6)
