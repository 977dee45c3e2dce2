"""Fingerprints of parameters, taken where the arrays live: the same for every sharding, mesh and number of devices.

Every element is hashed together with its index, in 32-bit integers, and the hashes are summed modulo 2^32. Such a sum
is the same in any order, hence on any mesh, to the bit. A single changed element always changes the first sum: at a
given index the hash is a bijection of the element's bits. Fingerprints find damage and mix-ups, not forgery.

Each device sums up its own shards, array by array (one small program for each shape and sharding, whatever the number
of layers). One more program adds the sums of all devices for all arrays, so there is one collective for a model.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_like.layers.base import Params
from axlearn_like.layers.parameter_names import path_name
from mesh.devices import platform
from rl.parameter_server.errors import WeightsError

LANES = 4  # 32-bit sums per array
_COLUMNS = 128  # least elements of a row, where an array has as many: of the hashes of rows there are few
# Vectors of 512 bits, where a processor has them: a third of the time for float32 on Intel's. Integer sums are exact.
_CPU_OPTIONS = {"xla_cpu_prefer_vector_width": 512}


def digest_of(data: Any) -> str:
    """Return the XXH3-128 digest of an array's bytes (in C order) or of a buffer: it finds accidents, not attacks."""
    if isinstance(data, np.ndarray):
        data = as_bytes(data)
    return xxhash.xxh3_128_hexdigest(data)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the array's bytes, uint8 [nbytes]; a view where the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def fingerprints(params: Params) -> dict[str, str]:
    """Return the fingerprint of every array: path ("a/b/c") -> 32 hexadecimal digits over path, dtype, shape and bits.

    For arrays sharded over several processes, all of these must call it, and all get the same result.

    Raises:
        WeightsError: an array whose elements have more than 32 bits.
    """
    return begin_fingerprints(params)()


def begin_fingerprints(params: Params, dtypes: Mapping[str, np.dtype] = {}) -> Callable[[], dict[str, str]]:
    """Start computing `fingerprints` on the devices; return a function that waits for them.

    The arrays may be donated before it is called. `dtypes`: by path, of arrays that are fingerprinted as rounded to
    another type; no rounded array is made.

    Raises:
        WeightsError: an array whose elements have more than 32 bits.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    by_mesh: dict[Any, list[tuple[str, jax.Array, PartitionSpec, np.dtype]]] = {}
    for path, leaf in leaves:
        name = path_name(path)
        if leaf.dtype.itemsize > 4 or not (jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == bool):
            raise WeightsError(f"tensor {name} is of {leaf.dtype}; only numbers of at most 32 bits have fingerprints")
        array, sharding = _on_a_mesh(leaf)
        by_mesh.setdefault(sharding.mesh, []).append(
            (name, array, sharding.spec, np.dtype(dtypes.get(name, leaf.dtype)))
        )
    begun = []
    for mesh, arrays in by_mesh.items():
        with jax.set_mesh(mesh):
            parts = [_device_sums(mesh, spec, dtype)(array) for _, array, spec, dtype in arrays]
            begun.append(([(name, dtype.name, array.shape) for name, array, _, dtype in arrays], _add_up(mesh)(parts)))

    def wait() -> dict[str, str]:
        return {
            name: _digest(name, dtype, shape, lanes)
            for arrays, sums in begun
            for (name, dtype, shape), lanes in zip(arrays, np.asarray(sums), strict=True)
        }

    return wait


def fingerprint_version(fingerprints: Mapping[str, str]) -> str:
    """Return the content checksum of a version: BLAKE2b over sorted paths and fingerprints, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, fingerprint in sorted(fingerprints.items()):
        digest.update(f"{name}\0{fingerprint}\n".encode())
    return digest.hexdigest()


def _digest(name: str, dtype: str, shape: tuple[int, ...], lanes: np.ndarray) -> str:
    digest = hashlib.blake2b(f"{name}\0{dtype}\0{shape}\0".encode(), digest_size=16)
    digest.update(lanes.astype("<u4").tobytes())
    return digest.hexdigest()


def _on_a_mesh(leaf: Any) -> tuple[jax.Array, NamedSharding]:
    """Return an array that lies on a mesh as it is, any other on a mesh of its one device (the same memory)."""
    if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
        return leaf, leaf.sharding
    array = jnp.asarray(leaf)
    (device,) = array.devices()
    alone = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    return jax.device_put(array, alone), alone


@lru_cache(maxsize=256)
def _device_sums(mesh: Mesh, spec: PartitionSpec, dtype: np.dtype) -> Any:
    """Return the program array -> uint32 [devices, LANES], each row on its device; zeros for replicas."""
    rows = PartitionSpec(mesh.axis_names)
    of_shard = partial(_shard_sums, axes=_axes(spec), sizes=dict(mesh.shape))
    sums = lambda shard: of_shard(shard.astype(dtype))  # noqa: E731
    mapped = jax.shard_map(sums, mesh=mesh, in_specs=spec, out_specs=rows, check_vma=False)
    return jax.jit(mapped, compiler_options=_CPU_OPTIONS if platform() == "cpu" else None)


@lru_cache(maxsize=256)
def _add_up(mesh: Mesh) -> Any:
    """Return the program [uint32 [devices, LANES]] of all arrays -> uint32 [arrays, LANES], replicated."""
    total = lambda parts: jnp.sum(jnp.stack(parts), axis=1, dtype=jnp.uint32)  # noqa: E731
    return jax.jit(total, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _axes(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Return the mesh axes that shard each dimension, the outermost first."""
    return [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec]


def _shard_sums(shard: jax.Array, *, axes: list[tuple[str, ...]], sizes: dict[str, int]) -> jax.Array:
    """Return the sums over one device's shard, or zeros if the shard is a replica that counts on another device."""
    axes = [*axes, *[()] * (shard.ndim - len(axes))]
    shape, starts = [], []
    for size, names in zip(shard.shape, axes, strict=True):
        shape.append(size * math.prod(sizes[name] for name in names))
        starts.append(lax.axis_index(names) * size if names else 0)
    replicas = [name for name in sizes if not any(name in names for names in axes) and sizes[name] > 1]
    if not replicas:
        return element_sums(shard, shape, starts)[None]
    first = lax.axis_index(tuple(replicas)) == 0
    zeros = lambda _: jnp.zeros(LANES, jnp.uint32)  # noqa: E731
    return lax.cond(first, lambda x: element_sums(x, shape, starts), zeros, shard)[None]


def element_sums(part: jax.Array, shape: list[int], starts: list[Any]) -> jax.Array:
    """Trace the sums over a part of an array, uint32 [LANES]. The sums of disjoint parts add up to those of the whole.

    Args:
        part: the part held.
        shape: shape of the whole array.
        starts: first index of the part in each dimension.
    """
    bits = _bits(part)
    place, weight = _places(part.shape, shape, starts)
    first = _mix(bits ^ place, 0x7FEB352D, 0x846CA68B)
    second = (first ^ (first >> 15)) * np.uint32(0xC2B2AE3D)
    hashes = (first, first * weight, second, second * weight)  # the weights are odd: no bit is lost in a product
    # One reduction of four operands: XLA vectorises it for CPUs, but not four of one operand each (15 times slower).
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))  # noqa: E731
    return jnp.stack(lax.reduce(hashes, (np.uint32(0),) * LANES, add, tuple(range(bits.ndim))))


def _bits(array: jax.Array) -> jax.Array:
    """Return the bits of every element, uint32."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(jnp.int32).astype(jnp.uint32)  # of signed integers: sign-extended
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _places(part: tuple[int, ...], shape: list[int], starts: list[Any]) -> tuple[jax.Array, jax.Array]:
    """Return two words for each element that depend on its index in the whole array, the second of them odd.

    An index is that of a row and that of a column in it, modulo 2^32 each. Either is hashed by itself: the hashes are
    small arrays that are computed once, so an element costs two operations. Two elements of different rows and columns
    may share one of their words, but hardly both.
    """
    first_column = next((axis for axis in reversed(range(len(shape))) if math.prod(shape[axis:]) >= _COLUMNS), 0)
    rows = _mix(_index(part, shape, starts, range(first_column)), 0x9E3779B1, 0x85EBCA77)
    columns = _mix(_index(part, shape, starts, range(first_column, len(shape))), 0x85EBCA6B, 0xC2B2AE35)
    if max(rows.size, columns.size) * 16 <= math.prod(part):
        rows, columns = lax.optimization_barrier((rows, columns))  # XLA would hash them again for each element
    return jnp.broadcast_to(rows ^ columns, part), jnp.broadcast_to((rows + columns) | 1, part)


def _index(part: tuple[int, ...], shape: list[int], starts: list[Any], axes: range) -> jax.Array:
    """Return the index over some axes of the whole array, uint32; of size 1 along the others."""
    index = jnp.zeros((1,) * len(shape), jnp.uint32)
    for axis in axes:
        own = tuple(part[axis] if axis == other else 1 for other in range(len(shape)))
        stride = math.prod(shape[axis + 1 : axes.stop])
        index += (lax.broadcasted_iota(jnp.uint32, own, axis) + jnp.uint32(starts[axis])) * np.uint32(stride % 2**32)
    return index


def _mix(x: jax.Array, first: int, second: int) -> jax.Array:
    """Mix 32-bit words: a bijection in which every input bit affects every output bit.

    The form, and 0x85EBCA6B with 0xC2B2AE35, are of MurmurHash3's finalizer (A. Appleby); 0x7FEB352D with 0x846CA68B of
    C. Wellons' hash prospector ("lowbias32").
    """
    x = (x ^ (x >> 16)) * np.uint32(first)
    x = (x ^ (x >> 15)) * np.uint32(second)
    return x ^ (x >> 16)
