"""Manifest of a checkpoint: shape, dtype and checksum of every array.

The checksum is computed on the devices as a sum modulo 2**32 over the whole array, so it does not
depend on how the array is sharded and survives a restore onto another mesh. Orbax 0.12 itself loads a
flipped bit without an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.checkpoint.versions import CheckpointError
from mesh.errors import did_you_mean

_ROW = 2048  # numbers
Manifest = Mapping[str, Mapping[str, Any]]  # path of the array -> {"shape", "dtype", "checksum"}


def check_structure(what: str, abstract: Any, manifest: Manifest) -> None:
    """Refuse another structure (CheckpointError), naming the first array in which `what` differs."""
    wanted = {name: (list(leaf.shape), str(leaf.dtype)) for name, leaf in _named(abstract)}
    saved = {name: (entry["shape"], entry["dtype"]) for name, entry in manifest.items()}
    for name in wanted:
        if name not in saved:
            raise CheckpointError(
                f"{what} is of another model or learner: it has no {name!r}" + did_you_mean(name, saved)
            )
        if wanted[name] != saved[name]:
            raise CheckpointError(
                f"{what} is of another model or learner: {name!r} has shape and dtype "
                f"{saved[name]}, expected {wanted[name]}"
            )
    for name in saved:
        if name not in wanted:
            raise CheckpointError(f"{what} is of another model or learner: it has {name!r}, which this run does not")


def make_manifest(tree: Any) -> dict[str, dict[str, Any]]:
    """Return path -> shape, dtype and checksum of every array."""
    names = [name for name, _ in _named(tree)]
    leaves = jax.tree.leaves(tree)
    devices = {device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()}
    if all(device.platform == "cpu" and device.process_index == jax.process_index() for device in devices):
        checksums = [part_checksum(np.asarray(leaf).reshape(-1), [1], 0) for leaf in leaves]
    else:
        checksums = device_checksums(leaves)
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "checksum": int(checksum)}
        for name, leaf, checksum in zip(names, leaves, checksums, strict=True)
    }


def checksum(x: jax.Array) -> jax.Array:
    """Return the uint32 sum of bits * (2 * index + 1) over an array; odd factors show any single flipped bit."""
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        x = jax.device_put(x, jax.memory.Space.Device)
    if x.dtype == jnp.bool_:
        bits = x.astype(jnp.uint32)
    else:
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    index, stride = jnp.zeros((1,) * x.ndim, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        along = jnp.arange(x.shape[axis], dtype=jnp.uint32) * np.uint32(stride % 2**32)
        index = index + along.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
        stride *= x.shape[axis]
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)


def device_checksums(leaves: Sequence[Any]) -> list[int]:
    """Return the checksum of each array, by one program for those on the same devices."""
    groups: dict[frozenset[Any], list[int]] = {}
    for number, leaf in enumerate(leaves):
        fixed = isinstance(leaf, jax.Array) and leaf.committed
        groups.setdefault(frozenset(leaf.sharding.device_set if fixed else ()), []).append(number)
    found = {}
    for numbers in groups.values():
        found |= zip(numbers, jax.device_get(_checksums([leaves[number] for number in numbers])), strict=True)
    return [int(found[number]) for number in range(len(leaves))]


_checksums: Any = jax.jit(lambda leaves: [checksum(leaf) for leaf in leaves])


def part_checksum(block: np.ndarray, strides: Sequence[int], first: int) -> int:
    """Return the part of an array's checksum (`checksum`) that a block of it adds, modulo 2**32.

    Args:
        block: contiguous.
        strides: for each axis of the block, how far apart in the array its neighbours are, in numbers.
        first: place of the first number in the array.
    """
    bits = block.view(np.dtype(f"uint{8 * block.dtype.itemsize}"))
    shape, steps = _merged(block.shape, strides)
    if len(shape) == 1 and shape[0] > _ROW:  # whole rows, and the rest
        cut, step = shape[0] // _ROW * _ROW, steps[0]
        bits = bits.reshape(-1)
        left = _sum_of_places(bits[cut:], [step], first + cut * step)
        return (_sum_of_places(bits[:cut].reshape(-1, _ROW), [_ROW * step, step], first) + left) % 2**32
    return _sum_of_places(bits.reshape(shape), steps, first) % 2**32


def _sum_of_places(bits: np.ndarray, strides: Sequence[int], first: int) -> int:
    """Return the sum of bits * (2 * place + 1), by the sums of each axis's slices alone: a place is a sum over axes."""
    if not bits.ndim:
        return (2 * first + 1) * int(bits)
    total, axes = 0, range(bits.ndim)
    for axis, step in enumerate(strides):
        others = tuple(other for other in axes if other != axis)
        sums = (bits.sum(axis=others, dtype=np.uint32) if others else bits).astype(np.uint64)
        places = np.arange(len(sums), dtype=np.uint64) * np.uint64(2 * step % 2**32) & np.uint64(0xFFFFFFFF)
        total += int(np.sum(sums * places, dtype=np.uint64))
        if axis == 0:
            total += (2 * first + 1) * int(np.sum(sums, dtype=np.uint64))
    return total


def _merged(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return shape and strides with neighbouring axes merged that are neighbours in the array, too."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(shape, strides, strict=True):
        if sizes and steps[-1] == stride * size:
            sizes[-1], steps[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            steps.append(stride)
    return sizes, steps


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def abstract_from(manifest: Manifest) -> dict[str, Any]:
    """Return a nested dict of empty numpy arrays, with which Orbax restores to host memory."""
    tree: dict[str, Any] = {}
    for name, entry in manifest.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = np.empty(entry["shape"], jnp.dtype(entry["dtype"]))
    return tree
