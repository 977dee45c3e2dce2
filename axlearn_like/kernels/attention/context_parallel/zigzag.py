"""Rows cut over devices so that causal attention costs each of them the same.

With n devices a row is cut into 2n chunks; device i has chunks i and 2n - 1 - i (Llama 3, arXiv 2407.21783, 3.3.2). Cut
straight, the last device has nearly twice the average work, and all wait for it. Positions and segment ids go where
their tokens go, so only attention, which compares places in a row, must know.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.interface import Layout
from mesh.errors import UserError
from mesh.rules import axis_sizes, constrain


def order(length: int, cp_size: int, layout: Layout = "zigzag") -> np.ndarray:
    """int32 [length], the places in the row of the tokens as they lie on the devices.

    Raises:
        UserError: the length cannot be cut so.
    """
    parts = 2 * cp_size if layout == "zigzag" else cp_size
    if length % parts:
        nearest = max(parts, round(length / parts) * parts)
        raise UserError(
            f"rows of {length} tokens cannot be cut over the mesh axis sequence {cp_size}: "
            f"expected a multiple of {parts}, such as {nearest}"
        )
    places = np.arange(length, dtype=np.int32)
    if layout == "straight":
        return places
    chunks = places.reshape(2 * cp_size, -1)
    return np.stack([chunks[:cp_size], chunks[::-1][:cp_size]], axis=1).reshape(-1)


def inverse(length: int, cp_size: int) -> np.ndarray:
    """int32 [length]: indexed with it, what lies in zigzag order is straight again."""
    return np.argsort(order(length, cp_size)).astype(np.int32)


def restore(x: jax.Array, cp_size: int, layout: Layout) -> jax.Array:
    """Rows gathered from the devices [b, s, ...], in order."""
    if layout == "straight" or cp_size == 1:
        return x
    chunks = x.reshape(x.shape[0], cp_size, 2, -1, *x.shape[2:])
    return jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(x.shape)


def permute(batch: Mapping[str, Any], cp_size: int) -> dict[str, Any]:
    """A host batch with its rows in zigzag order; whatever has no length stays."""
    return {name: x[:, order(x.shape[1], cp_size)] if x.ndim > 1 else x for name, x in batch.items()}


def reorder(batch: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], Layout]:
    """Inside a step: the batch in the order in which its rows are to be worked on, and which that is.

    Where the mesh has no sequence axis, that is the batch as it came.
    """
    cp_size = axis_sizes("length").get("sequence", 1)
    if cp_size == 1:
        return dict(batch), "straight"

    def one(x: jax.Array) -> jax.Array:
        if x.ndim < 2:
            return x
        rest = [None] * (x.ndim - 2)
        whole = constrain(x, "batch", None, *rest)  # integers and weights: small beside any activation
        return constrain(whole[:, order(x.shape[1], cp_size)], "batch", "length", *rest)

    return {name: one(x) for name, x in batch.items()}, "zigzag"
