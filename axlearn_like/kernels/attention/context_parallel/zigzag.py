"""Zigzag order: rows sharded over devices so that causal attention costs each of them the same.

With n devices a row is cut into 2n chunks; device i has chunks i and 2n - 1 - i (Llama 3, arXiv 2407.21783, 3.3.2). In
straight order the last device has nearly twice the average work, and all others wait for it. Positions and segment ids
move with their tokens, so only attention, which compares indices in a row, has to know the order.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.interface import Layout
from mesh.errors import UserError
from mesh.rules import axis_sizes, constrain


def order(length: int, cp_size: int, layout: Layout = "zigzag") -> np.ndarray:
    """Return int32 [length]: for each token in the order on the devices, its index in the row.

    Raises:
        UserError: the length does not divide over the devices.
    """
    parts = 2 * cp_size if layout == "zigzag" else cp_size
    if length % parts:
        nearest = max(parts, round(length / parts) * parts)
        raise UserError(
            f"rows of {length} tokens do not divide over the mesh axis sequence {cp_size}: "
            f"expected a multiple of {parts}, such as {nearest}"
        )
    places = np.arange(length, dtype=np.int32)
    if layout == "straight":
        return places
    chunks = places.reshape(2 * cp_size, -1)
    return np.stack([chunks[:cp_size], chunks[::-1][:cp_size]], axis=1).reshape(-1)


def inverse(length: int, cp_size: int) -> np.ndarray:
    """Return int32 [length]: the indices that put a row in zigzag order back into straight order."""
    return np.argsort(order(length, cp_size)).astype(np.int32)


def restore(x: jax.Array, cp_size: int, layout: Layout) -> jax.Array:
    """Return rows gathered from the devices [b, s, ...] in straight order."""
    if layout == "straight" or cp_size == 1:
        return x
    chunks = x.reshape(x.shape[0], cp_size, 2, -1, *x.shape[2:])
    return jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(x.shape)


def reorder(batch: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], Layout]:
    """Return, inside a step, the batch in the order in which its rows are sharded, and the name of that order.

    Without a sequence axis in the mesh the batch is returned unchanged.
    """
    cp_size = axis_sizes("length").get("sequence", 1)
    if cp_size == 1:
        return dict(batch), "straight"

    def one(x: jax.Array) -> jax.Array:
        if x.ndim < 2:
            return x
        rest = [None] * (x.ndim - 2)
        gathered = constrain(x, "batch", None, *rest)  # integers and weights: small beside any activation
        return constrain(gathered[:, order(x.shape[1], cp_size)], "batch", "length", *rest)

    return {name: one(x) for name, x in batch.items()}, "zigzag"
