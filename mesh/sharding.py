"""A function of every token computed for one part of the tokens after another, so that less is live at a time.

What a language model's head makes of a token is as wide as the vocabulary: at 152,064 words in float32, 2.3 GiB for
4,096 tokens. In chunks, and computed again in the backward pass, only one chunk's share of that ever exists.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mesh.errors import UserError


def in_chunks(fn: Callable[..., Any], chunks: int, *arrays: jax.Array) -> Any:
    """`fn(*parts)` for every part, stacked: a pytree of arrays [chunks, ...].

    Args:
        fn: of parts [batch, length / chunks, ...]; computed again in the backward pass, not stored.
        chunks: divides the length.
        arrays: each [batch, length, ...]. Part i holds the tokens i, i + chunks, ...: so a length that is spread over
            devices stays where it is, each device computing its share of every part.

    Raises:
        UserError: the length is not a multiple of `chunks`.
    """
    if chunks == 1:
        return jax.tree.map(lambda x: x[None], fn(*arrays))
    parts = [split_length(x, chunks) for x in arrays]
    return jax.lax.scan(lambda _, part: (None, jax.checkpoint(fn)(*part)), None, parts)[1]


def split_length(x: jax.Array, chunks: int) -> jax.Array:
    """[batch, length, ...] -> [chunks, batch, length / chunks, ...], strided."""
    batch, length = x.shape[:2]
    if length % chunks:
        raise UserError(f"loss.chunks: {length} tokens a row do not divide into {chunks} chunks")
    shape = (batch, length // chunks, chunks, *x.shape[2:])
    spec = _spec(x)
    out = None if spec is None else PartitionSpec(spec[0], spec[1], None, *spec[2:])
    return jnp.moveaxis(jnp.reshape(x, shape, out_sharding=out), 2, 0)


def merge_length(x: jax.Array) -> jax.Array:
    """[chunks, batch, length / chunks, ...] -> [batch, length, ...]: the tokens in their places again."""
    chunks, batch, length = x.shape[:3]
    spec = _spec(x)
    out = None if spec is None else PartitionSpec(spec[1], spec[2], *spec[3:])
    return jnp.reshape(jnp.moveaxis(x, 0, 2), (batch, length * chunks, *x.shape[3:]), out_sharding=out)


def spread_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """X [batch, length], cut over devices as the first two axes of `other` are."""
    spec = _spec(other)
    return x if spec is None else jax.sharding.reshard(x, PartitionSpec(*spec[:2]))


def cut_axes(x: jax.Array) -> tuple[str, ...]:
    """The mesh axes that cut the first two axes of x."""
    entries = () if (spec := _spec(x)) is None else spec[:2]
    return tuple(name for entry in entries for name in entry_names(entry))


def without_axes(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """X gathered over these mesh axes; what others cut stays cut."""
    spec = _spec(x)
    assert spec is not None
    kept = [tuple(name for name in entry_names(entry) if name not in axes) for entry in spec]
    return jax.sharding.reshard(x, PartitionSpec(*(names or None for names in kept)))


def split_rows(x: jax.Array, count: int) -> jax.Array:
    """[batch, ...] -> [count, batch / count, ...]; part i has rows i, i + count, ...

    Strided, because contiguous parts of an axis that is spread over devices would each live on a few devices only.
    This way every device contributes equally to every part and nothing is communicated.
    """
    spec = _spec(x)
    out = None if spec is None else PartitionSpec(spec[0], None, *spec[1:])
    return jnp.swapaxes(jnp.reshape(x, (x.shape[0] // count, count, *x.shape[1:]), out_sharding=out), 0, 1)


def merge_rows(x: jax.Array) -> jax.Array:
    """[count, batch / count, ...] -> [batch, ...]: the rows in their places again."""
    spec = _spec(x)
    out = None if spec is None else PartitionSpec(spec[1], *spec[2:])
    x = jnp.swapaxes(x, 0, 1)
    return jnp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]), out_sharding=out)


def entry_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a partition."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _spec(x: jax.Array) -> PartitionSpec | None:
    """The partition of x with an entry for each axis, None where no mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return None
    spec = jax.typeof(x).sharding.spec
    return PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))
