"""Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values go around the devices that share a row.

Each device attends to the block that it holds while the next one is in transit, and merges softmaxes by their
logarithmic sums; no device ever holds the keys of a whole row. The backward pass goes around once more, with the
gradients of keys and values. A device sees all of a half of another device's block or nothing of it, except for its own
block (zigzag.py), so that all devices work equally long.

Arrays have heads before the length here: queries [b, k, q, t, h], keys and values [b, k, s, h].
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase
from axlearn_like.kernels.attention.interface import (
    SEQUENCE,
    AttentionArrays,
    AttentionSignature,
    ContextParallelism,
    Kernel,
    KeyBlock,
)

DIAGONAL, WHOLE = "diagonal", "whole"  # a block that is causal within itself; or fully visible, but for segments

ALL = slice(None)


class BlockKernel(Protocol):
    """A kernel for one block of keys."""

    def forward(self, block: KeyBlock) -> tuple[jax.Array, jax.Array]:
        """Return float32 mixed values [b, k, q, t, h] and logarithms of the sums of exponentials [b, k, q, t]."""
        ...

    def backward(
        self, block: KeyBlock, out: jax.Array, lse: jax.Array, d_out: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return float32 gradients of queries, keys and values; `out` and `lse` are those over all blocks."""
        ...


class Ring(ContextParallelism):
    """Least memory, with transfers behind products; needs a kernel that returns logarithmic sums."""

    class Config(ConfigBase["Ring"]):
        pass

    ring = True


def on_one_device(kernel: Kernel, signature: AttentionSignature, arrays: AttentionArrays) -> jax.Array:
    """Return the attention of one device's queries to the keys of all devices in turn, [b, t, k, q, h]."""
    mixed = _attend(
        _Ring(signature, kernel.blocks(signature)),
        arrays.q_btkqh.transpose(0, 2, 3, 1, 4),
        (arrays.k_bskh.transpose(0, 2, 1, 3), arrays.v_bskh.transpose(0, 2, 1, 3)),
        (arrays.segments_bt, arrays.places),
        arrays.sinks_kq,
    )
    return mixed.transpose(0, 3, 1, 2, 4)


class _Ring:
    """The walk around the ring; `mine` and `theirs` are (segments [b, t], places [t])."""

    def __init__(self, signature: AttentionSignature, blocks: BlockKernel):
        self.signature, self.blocks = signature, blocks

    def next[T](self, tree: T) -> T:
        cp_size = self.signature.cp_size
        return jax.lax.ppermute(tree, SEQUENCE, [(i, (i + 1) % cp_size) for i in range(cp_size)])

    def forward(self, q: jax.Array, kv: Any, mine: Any) -> tuple[jax.Array, jax.Array]:
        def block(queries: slice, keys: slice, kv: Any, theirs: Any, case: str) -> tuple[jax.Array, jax.Array]:
            return self.blocks.forward(self._cut((q, kv, mine, theirs), queries, keys, case))

        def more(found: Any, queries: slice, keys: slice, kv: Any, theirs: Any) -> Any:
            """`found` with what these queries see of these keys."""
            out, lse = found
            merged = _merged((out[..., queries, :], lse[..., queries]), block(queries, keys, kv, theirs, WHOLE))
            return _put(out, merged[0], (..., queries, slice(None))), _put(lse, merged[1], (..., queries))

        def hop(state: Any, number: jax.Array) -> tuple[Any, None]:
            kv, theirs, found = state
            coming = self.next((kv, theirs))
            return (*coming, self._one_of(number, more, found, kv, theirs)), None

        coming = self.next((kv, mine))
        state = (*coming, block(ALL, ALL, kv, mine, DIAGONAL))
        (_, _, found), _ = jax.lax.scan(hop, state, jnp.arange(1, self.signature.cp_size))
        return found

    def backward(self, q: jax.Array, kv: Any, mine: Any, out: Any, lse: Any, d_out: Any) -> tuple[jax.Array, Any]:
        def block(queries: slice, keys: slice, kv: Any, theirs: Any, case: str) -> Any:
            cut = self._cut((q, kv, mine, theirs), queries, keys, case)
            return self.blocks.backward(cut, out[..., queries, :], lse[..., queries], d_out[..., queries, :])

        def more(found: Any, queries: slice, keys: slice, kv: Any, theirs: Any) -> Any:
            """`found` with what goes through these queries and keys."""
            parts = zip(found, block(queries, keys, kv, theirs, WHOLE), (queries, keys, keys), strict=True)
            return tuple(_put(x, x[..., at, :] + part, (..., at, slice(None))) for x, part, at in parts)

        def hop(state: Any, number: jax.Array) -> tuple[Any, None]:
            kv, theirs, (dq, *d_kv) = state
            coming, d_kv = self.next((kv, theirs)), self.next(d_kv)
            return (*coming, self._one_of(number, more, (dq, *d_kv), kv, theirs)), None

        coming = self.next((kv, mine))
        state = (*coming, tuple(block(ALL, ALL, kv, mine, DIAGONAL)))
        (_, _, (dq, *d_kv)), _ = jax.lax.scan(hop, state, jnp.arange(1, self.signature.cp_size))
        return dq, tuple(self.next(d_kv))  # home

    def _one_of(self, number: jax.Array, more: Any, found: Any, kv: Any, theirs: Any) -> Any:
        """Return `found` with what is visible of the block that has come so many hops.

        In zigzag order: of a device before this one, all queries see the first half of the block and nothing of the
        second; of a device after it, the second half of the queries sees the whole block. In straight order: all of it
        or nothing.
        """
        half = self.signature.length // self.signature.cp_size // 2
        straight = self.signature.layout == "straight"

        def earlier() -> Any:
            return more(found, ALL, ALL if straight else slice(half), kv, theirs)

        def later() -> Any:
            return found if straight else more(found, slice(half, None), ALL, kv, theirs)

        return jax.lax.cond(number <= jax.lax.axis_index(SEQUENCE), earlier, later)

    @staticmethod
    def _cut(whole: tuple[jax.Array, Any, Any, Any], queries: slice, keys: slice, case: str) -> KeyBlock:
        q, kv, mine, theirs = whole
        k, v = (x[..., keys, :] for x in kv)
        segments = (mine[0][:, queries], theirs[0][:, keys])
        return KeyBlock(q[..., queries, :], k, v, segments, (mine[1][queries], theirs[1][keys]), case)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, q: jax.Array, kv: Any, mine: Any, sinks_kq: jax.Array | None) -> jax.Array:
    return _forward(ring, q, kv, mine, sinks_kq)[0]


def _forward(ring: _Ring, q: jax.Array, kv: Any, mine: Any, sinks_kq: jax.Array | None) -> tuple[jax.Array, Any]:
    out, lse = ring.forward(q, kv, mine)
    if sinks_kq is not None:  # one more key, whose value is zero
        total = jnp.logaddexp(lse, sinks_kq[None, :, :, None].astype(jnp.float32))
        out, lse = out * jnp.exp(lse - total)[..., None], total
    out = out.astype(q.dtype)
    return out, (q, kv, mine, sinks_kq, out, lse)


def _backward(ring: _Ring, saved: Any, d_out: jax.Array) -> Any:
    q, kv, mine, sinks_kq, out, lse = saved
    out, d_out = out.astype(jnp.float32), d_out.astype(jnp.float32)
    dq, d_kv = ring.backward(q, kv, mine, out, lse, d_out)
    d_sinks = None
    if sinks_kq is not None:
        weight = jnp.exp(sinks_kq[None, :, :, None].astype(jnp.float32) - lse)
        d_sinks = -jnp.sum(weight * jnp.sum(out * d_out, axis=-1), axis=(0, 3)).astype(sinks_kq.dtype)
    return dq.astype(q.dtype), jax.tree.map(lambda d, x: d.astype(x.dtype), d_kv, kv), None, d_sinks


_attend.defvjp(_forward, _backward)


def _merged(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the mixed values and logarithmic sums over the keys of both."""
    total = jnp.logaddexp(a[1], b[1])
    weights = (jnp.exp(x[1] - total)[..., None] for x in (a, b))
    return sum(x[0] * weight for x, weight in zip((a, b), weights, strict=True)), total  # pyright: ignore


def _put(x: jax.Array, part: jax.Array, where: Any) -> jax.Array:
    """Return x with a part of it replaced; the part itself if it is all of x."""
    return part if part.shape == x.shape else x.at[where].set(part)
