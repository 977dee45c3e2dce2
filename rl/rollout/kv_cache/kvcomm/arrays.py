"""Keys and values of a segment of tokens: read from pages, moved to other positions, corrected, and written to pages.

Rotations of RoPE add up: a key at position p is turned to position p + s by the angles of s (RoFormer, arXiv
2104.09864, 3.2.2). The rotated numbers of a head, or of a latent (the shared key of MLA), are its last ones: all of
plain attention's. Values and the latents themselves have no position.

Tokens are dicts of the pool's arrays, k and v or latent, each [l, t, k, h] in the pool's dtype: layers, tokens of a
fixed number, heads (1 for latents) and width. Tokens behind the segment's are zeros.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_like.layers.attention.rope import NoPositions, Rope
from axlearn_like.layers.contexts.latents import has_latents, page_size_of
from axlearn_like.layers.contexts.paged import NULL_PAGE

Tokens = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class CacheForm:
    """The pool's arrays, as far as segments need them."""

    layers: int
    pages: int  # pages of a layer
    freq: tuple[float, ...]  # angles of one position, for pairs of numbers in two halves


def frequencies(model: Any) -> tuple[float, ...] | None:
    """Return the angles by which a position rotates keys; None: they differ by layer, or by more than the position."""
    found: set[tuple[float, ...] | None] = set()
    for block, _ in model.kinds():
        rope = block.attention.rope
        known = isinstance(rope, Rope) and rope.growth is None
        found.add(rope.freq if known else () if isinstance(rope, NoPositions) else None)
    return found.pop() if len(found) == 1 else None


@partial(jax.jit, static_argnames=("form", "size"))
def read_segment(
    pool: Any, table: jax.Array, start: jax.Array, count: jax.Array, *, form: CacheForm, size: int
) -> Tokens:
    """Return `count` tokens, at most `size`, of the sequence with these pages, int32 [w], from its token `start` on."""
    rows, slots, live = _places(pool, table, start, count, form, size)
    if has_latents(pool):
        found = {"latent": pool["latent"][rows, slots][:, :, None]}
    else:
        found = {"k": pool["k"][rows, :, :, slots], "v": pool["v"][rows, :, slots]}
    return {name: jnp.where(live[:, None, None], x, 0) for name, x in found.items()}


@partial(jax.jit, static_argnames=("form",))
def offsets_of(found: Tokens, base: Tokens, shift: jax.Array, *, form: CacheForm) -> Tokens:
    """Return what a context adds to a segment, at `shift` in it, at the positions of `base`, float32."""
    back = _rotated({name: x.astype(jnp.float32) for name, x in found.items()}, -shift, form.freq)
    return {name: back[name] - x.astype(jnp.float32) for name, x in base.items()}


@partial(jax.jit, static_argnames=("form",), donate_argnums=0)
def write_segment(
    pool: Any,
    table: jax.Array,
    places: tuple[jax.Array, jax.Array, jax.Array],
    base: Tokens,
    offsets: Tokens | None,
    weights: Tokens | None,
    *,
    form: CacheForm,
) -> Any:
    """Return the pool with a segment at another position; in place, as the pool is donated.

    Args:
        table: pages of the sequence, int32 [w].
        places: position of the segment's first token, and its first and last one to write, plus one.
        base: the segment at position 0, without a context.
        offsets: what other contexts added to other texts in its place, [a, l, t, k, h]; None: nothing is added.
        weights: weight of each of these, [a, 1, t, 1, 1] or [a, l, 1, k, h]; None likewise.
    """
    start, first, end = places
    tokens = {name: x.astype(jnp.float32) for name, x in base.items()}
    if offsets is not None and weights is not None:
        tokens = _weighted(tokens, offsets, weights)
    tokens = _rotated(tokens, start, form.freq)
    size = next(iter(base.values())).shape[1]
    rows, slots, live = _places(pool, table, start, end, form, size)
    null = NULL_PAGE + jnp.arange(form.layers)[:, None] * form.pages
    rows = jnp.where(live & (jnp.arange(size) >= first), rows, null)
    tokens = {name: x.astype(pool[name].dtype) for name, x in tokens.items()}
    if has_latents(pool):
        return {"latent": pool["latent"].at[rows, slots].set(tokens["latent"][:, :, 0])}
    return {
        "k": pool["k"].at[rows, :, :, slots].set(tokens["k"]),
        "v": pool["v"].at[rows, :, slots].set(tokens["v"]),
    }


@jax.jit
def compare(base: Tokens, others: Tokens, usable: jax.Array, count: jax.Array, temperature: jax.Array) -> Any:
    """Compare a segment of `count` tokens with others, [a, l, t, k, h], of which those `usable`, bool [a], count.

    Returns:
        Distances [a], L2 over all values; then weights that add up to 1, from distances of tokens (mean of absolute
        differences, [a, 1, t, 1, 1]) and of channels (L2 over tokens, [a, l, 1, k, h]), of each array for itself.
    """
    live = (jnp.arange(next(iter(base.values())).shape[1]) < count)[:, None, None]

    def distances(other: Tokens) -> tuple[jax.Array, Tokens, Tokens]:
        gaps = {n: jnp.where(live, x.astype(jnp.float32) - base[n].astype(jnp.float32), 0) for n, x in other.items()}
        values = gaps["v"] if "v" in gaps else gaps["latent"]
        of_tokens = {name: jnp.mean(jnp.abs(x), axis=(0, 2, 3), keepdims=True) for name, x in gaps.items()}
        of_channels = {name: jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True)) for name, x in gaps.items()}
        return jnp.sqrt(jnp.sum(values * values)), of_tokens, of_channels

    def softmax(distance: jax.Array) -> jax.Array:
        shown = jnp.where(usable.reshape(-1, *[1] * (distance.ndim - 1)), -distance / temperature, -jnp.inf)
        return jax.nn.softmax(shown, axis=0)

    # One anchor after the other: XLA's CPU backend would compute all gaps again for each sum over them.
    values, *of_parts = jax.lax.map(distances, others)
    return values, *jax.tree.map(softmax, of_parts)


@partial(jax.jit, donate_argnums=0)
def put(stack: Tokens, index: jax.Array, tokens: Tokens) -> Tokens:
    """Return the stack [a, l, t, k, h] with tokens at one place; in place, as the stack is donated."""
    return {name: x.at[index].set(tokens[name].astype(x.dtype)) for name, x in stack.items()}


def empty_stack(tokens: Tokens, count: int) -> Tokens:
    """Return room for so many tokens of this form, float32."""
    return {name: jnp.zeros((count, *x.shape), jnp.float32) for name, x in tokens.items()}


def _weighted(tokens: Tokens, offsets: Tokens, weights: Tokens) -> Tokens:
    """Return tokens with the weighted offsets of all anchors, added one after the other."""

    def add(found: Tokens, anchor: tuple[Tokens, Tokens]) -> tuple[Tokens, None]:
        own, weight = anchor
        return {name: x + weight[name] * own[name] for name, x in found.items()}, None

    return jax.lax.scan(add, tokens, (offsets, weights))[0]


def _rotated(tokens: Tokens, shift: jax.Array, freq: tuple[float, ...]) -> Tokens:
    """Return float32 tokens with keys at positions that are higher by `shift`."""
    if not freq:
        return tokens
    name = "latent" if "latent" in tokens else "k"
    angle = shift.astype(jnp.float32) * jnp.asarray(freq, jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    width = tokens[name].shape[-1]
    plain, first, second = jnp.split(tokens[name], [width - 2 * len(freq), width - len(freq)], axis=-1)
    turned = [plain, first * cos - second * sin, second * cos + first * sin]
    return tokens | {name: jnp.concatenate(turned, axis=-1)}


def _places(
    pool: Any, table: jax.Array, start: jax.Array, count: jax.Array, form: CacheForm, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the rows of the pool [l, t] and slots [t] of tokens, and which there are, bool [t]."""
    page_size = page_size_of(pool)
    live = jnp.arange(size) < count
    positions = start + jnp.arange(size)
    pages = jnp.where(live, jnp.take(table, positions // page_size, mode="clip"), NULL_PAGE)
    return pages + jnp.arange(form.layers)[:, None] * form.pages, positions % page_size, live
