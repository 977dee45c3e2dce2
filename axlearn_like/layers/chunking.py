"""A function of every token, computed for one chunk of the tokens after another, so that less is live at a time.

The logits of a language model are as wide as its vocabulary: 2.3 GiB for 4,096 tokens of 152,064 words in float32. In
chunks, computed again in the backward pass, only the logits of one chunk exist at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mesh.errors import UserError
from mesh.sharding import full_spec


def in_chunks(fn: Callable[..., Any], chunks: int, *arrays: jax.Array) -> Any:
    """Return `fn(*parts)` of every part, stacked: a pytree of arrays [chunks, ...].

    Args:
        fn: of parts [batch, length / chunks, ...]; computed again in the backward pass, not stored.
        chunks: divides the length.
        arrays: each [batch, length, ...]. Part i holds the tokens i, i + chunks, ...: so a length that is sharded
            stays where it is, and each device computes its share of every part.

    Raises:
        UserError: the length is not a multiple of `chunks`.
    """
    if chunks == 1:
        return jax.tree.map(lambda x: x[None], fn(*arrays))
    parts = [split_length(x, chunks) for x in arrays]
    return jax.lax.scan(lambda _, part: (None, jax.checkpoint(fn)(*part)), None, parts)[1]


def split_length(x: jax.Array, chunks: int) -> jax.Array:
    """Reshape [batch, length, ...] to [chunks, batch, length / chunks, ...], strided as in `in_chunks`."""
    batch, length = x.shape[:2]
    if length % chunks:
        raise UserError(f"loss.chunks: {length} tokens a row do not divide into {chunks} chunks")
    shape = (batch, length // chunks, chunks, *x.shape[2:])
    spec = full_spec(x)
    out = None if spec is None else PartitionSpec(spec[0], spec[1], None, *spec[2:])
    return jnp.moveaxis(jnp.reshape(x, shape, out_sharding=out), 2, 0)


def merge_length(x: jax.Array) -> jax.Array:
    """Reshape [chunks, batch, length / chunks, ...] to [batch, length, ...], the inverse of `split_length`."""
    chunks, batch, length = x.shape[:3]
    spec = full_spec(x)
    out = None if spec is None else PartitionSpec(spec[1], spec[2], *spec[3:])
    return jnp.reshape(jnp.moveaxis(x, 0, 2), (batch, length * chunks, *x.shape[3:]), out_sharding=out)
