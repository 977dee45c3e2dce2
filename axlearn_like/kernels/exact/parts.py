"""Sums over devices in a fixed order: partial sums are exchanged, and every device adds up the same ones alike.

An all-reduce leaves the order of its sum to compiler and runtime, which choose it by the size of the array. Here a sum
that a mesh may cut, over heads, hidden units or words, has a fixed number of parts, on however many devices, and these
are added in pairs of neighbours, then pairs of pairs: a binary tree. A device has neighbouring parts, as many as a
subtree has, so it adds up its own, and what is exchanged is one number of each device. One device, two, four and eight
have the same bits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axlearn_like.config import ConfigBase
from mesh.errors import UserError
from mesh.rules import axis_sizes

PARTS = 8  # limit of a sum's parts, and so of devices that share it
_COUNTS = ", ".join(str(1 << power) for power in range(PARTS.bit_length() - 1)) + f" or {PARTS}"


def parts_of(size: int) -> int:
    """Return the parts of a sum of so many numbers: a power of two that divides it, up to `PARTS`."""
    return min(PARTS, size & -size)


def sharing_axes(axis: str) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that shard a logical axis (UserError: see `check_devices`)."""
    sizes = {name: size for name, size in axis_sizes(axis).items() if size > 1}
    check_devices(axis, sizes)
    return tuple(sizes)


def check_devices(axis: str, sizes: Mapping[str, int]) -> int:
    """Return the number of devices of mesh axes that shard a sum over a logical axis.

    Raises:
        UserError: the parts cannot be shared among so many.
    """
    count = math.prod(sizes.values())
    if PARTS % count:
        over = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f'numerics="exact": {axis} are sharded over {count} devices ({over}); expected {_COUNTS}, '
            f"for sums over them have {PARTS} parts"
        )
    return count


def require_tensor(cfg: ConfigBase[Any], tensor: int) -> None:
    """Refuse a mesh of a config with an axis `tensor` of so many devices that cannot share the parts (ConfigError)."""
    cfg.require("mesh", PARTS % tensor == 0, f'tensor of {_COUNTS} with policy.numerics="exact"')


def tree_sum(part: Callable[[int], jax.Array], count: int, first: int = 0) -> jax.Array:
    """Return the sum of `part(first)` and the following ones, a power of two, by a tree; one of each level is held."""
    if count == 1:
        return part(first)
    return tree_sum(part, count // 2, first) + tree_sum(part, count // 2, first + count // 2)


def sum_over_devices(partial_ro: jax.Array, axes: Sequence[str], dtype: DTypeLike) -> jax.Array:
    """Return the sum of the devices' float32 partial sums [r, o], added by a tree; within a shard_map over these axes.

    Each device adds up a share of the columns, which the others send it, and sends them the rounded result.
    """
    axes = tuple(axes)
    count = math.prod(map(jax.lax.axis_size, axes))
    if count == 1:
        return partial_ro.astype(dtype)
    rows, columns = partial_ro.shape
    shares = jnp.pad(partial_ro, [(0, 0), (0, -columns % count)]).reshape(rows, count, -1)
    of_devices = jax.lax.all_to_all(shares, axes, split_axis=1, concat_axis=0, tiled=False)
    own = tree_sum(lambda device: of_devices[device], count).astype(dtype)
    return jax.lax.all_gather(own, axes, axis=1, tiled=True)[:, :columns]
