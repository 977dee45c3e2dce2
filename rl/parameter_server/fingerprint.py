"""Fingerprints of parameters, taken where the arrays live: the same for every sharding, mesh and number of devices.

Every element is hashed together with its index, in 32-bit integers, and the hashes are summed modulo 2^32. Such a sum
is the same in any order, hence on any mesh, to the bit. A single changed element always changes the first sum: at a
given index the hash is a bijection of the element's bits. Fingerprints find damage and mix-ups, not forgery.

Each device sums up its own shards, array by array (one small program for each shape and sharding, whatever the number
of layers). One more program adds the sums of all devices for all arrays, so there is one collective for a model. Small
arrays of one CPU are summed up by the host.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_like.checkpoint.plain.plain_arrays import StackEntries
from axlearn_like.layers.base import Params
from axlearn_like.layers.parameter_names import path_name
from mesh.devices import platform
from rl.parameter_server.element_sums import LANES, element_sums
from rl.parameter_server.errors import WeightsError

_SMALL = 1 << 13  # elements up to which the host takes a CPU's arrays: a program costs 0.1 s for each shape
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

    For arrays sharded over several processes, all of these must call it, and all get the same result. The entries of a
    stack (`StackEntries`) have the fingerprint of the stack.

    Raises:
        WeightsError: an array whose elements have more than 32 bits.
    """
    return begin_fingerprints(params)[1]()


def begin_fingerprints(
    params: Params, dtypes: Mapping[str, np.dtype] = {}, spare: Mapping[str, jax.Array] = {}
) -> tuple[dict[str, jax.Array], Callable[[], dict[str, str]]]:
    """Start computing `fingerprints` on the devices, and round in the same pass.

    Args:
        params: the arrays; they may be donated as soon as what is returned is ready.
        dtypes: by path, of arrays that are rounded to another type first.
        spare: by path, arrays of an earlier call that are no longer needed: their memory is used again, if nothing
            else refers to it.

    Returns:
        The rounded arrays by path, sharded as the others, and a function that waits for the fingerprints.

    Raises:
        WeightsError: an array whose elements have more than 32 bits.
    """
    rounded: dict[str, jax.Array] = {}
    by_mesh: dict[Any, tuple[list[_Described], list[list[jax.Array]]]] = {}
    begun: list[tuple[list[_Described], Any]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = path_name(path)
        if leaf.dtype.itemsize > 4 or not (jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == bool):
            raise WeightsError(f"tensor {name} is of {leaf.dtype}; only numbers of at most 32 bits have fingerprints")
        dtype = np.dtype(dtypes.get(name, leaf.dtype))
        described = _Described(name, dtype.name, tuple(leaf.shape))
        if dtype == leaf.dtype and _is_small(leaf):
            begun.append(([described], _host_sums(leaf)[None]))
            continue
        if dtype == leaf.dtype:
            mesh, parts = _sums(leaf)
        else:
            mesh, rounded[name], parts = _round(leaf, dtype, spare.get(name))
        tensors, sums = by_mesh.setdefault(mesh, ([], []))
        tensors.append(described)
        sums.append(parts)
    for mesh, (tensors, sums) in by_mesh.items():
        with jax.set_mesh(mesh):
            begun.append((tensors, _add_up(mesh)(sums)))

    def wait() -> dict[str, str]:
        return {
            tensor.name: _digest(tensor, lanes)
            for tensors, sums in begun
            for tensor, lanes in zip(tensors, np.asarray(sums), strict=True)
        }

    return rounded, wait


def fingerprint_version(fingerprints: Mapping[str, str]) -> str:
    """Return the content checksum of a version: BLAKE2b over sorted paths and fingerprints, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, fingerprint in sorted(fingerprints.items()):
        digest.update(f"{name}\0{fingerprint}\n".encode())
    return digest.hexdigest()


class _Described(NamedTuple):
    """Path, type and shape of a tensor, which its fingerprint is of, too."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def _is_small(leaf: Any) -> bool:
    """Return True for an array, or a stack, that lies on one CPU, or in no device, and is small."""
    first = leaf[0] if isinstance(leaf, StackEntries) else leaf
    devices = first.devices() if isinstance(first, jax.Array) else set()
    return math.prod(leaf.shape) <= _SMALL and len(devices) <= 1 and all(one.platform == "cpu" for one in devices)


def _host_sums(leaf: Any) -> np.ndarray:
    """Return the sums over an array, or over the entries of a stack, uint32 [LANES]."""
    whole = np.stack([np.asarray(entry) for entry in leaf]) if isinstance(leaf, StackEntries) else np.asarray(leaf)
    whole = whole.reshape(whole.shape or (1,))
    return element_sums(whole, list(whole.shape), [0] * whole.ndim)


def _sums(leaf: Any) -> tuple[Mesh, list[jax.Array]]:
    """Return the mesh of an array, or of the entries of a stack, and their sums by device."""
    entries = [_on_a_mesh(part) for part in (leaf if isinstance(leaf, StackEntries) else (leaf,))]
    _, mesh, spec = entries[0]
    program = _device_sums(mesh, spec, leaf.shape[0] if isinstance(leaf, StackEntries) else None)
    with jax.set_mesh(mesh):
        return mesh, [program(array, np.uint32(index)) for index, (array, _, _) in enumerate(entries)]


def _round(leaf: Any, dtype: np.dtype, spare: jax.Array | None) -> tuple[Mesh, jax.Array, list[jax.Array]]:
    """Return the mesh of an array, the array rounded, and the sums of that by device."""
    array, mesh, spec = _on_a_mesh(leaf)
    program = _device_rounding(mesh, spec, dtype, spare is not None)
    with jax.set_mesh(mesh):
        rounded, sums = program(array) if spare is None else program(array, spare)
    return mesh, rounded, [sums]


def _digest(tensor: _Described, lanes: np.ndarray) -> str:
    digest = hashlib.blake2b(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0".encode(), digest_size=16)
    digest.update(lanes.astype("<u4").tobytes())
    return digest.hexdigest()


def _on_a_mesh(leaf: Any) -> tuple[jax.Array, Mesh, PartitionSpec]:
    """Return an array that lies on a mesh as it is, any other on a mesh of its one device (the same memory)."""
    if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
        assert isinstance(leaf.sharding.mesh, Mesh), "arrays lie on devices"
        return leaf, leaf.sharding.mesh, leaf.sharding.spec
    array = jnp.asarray(leaf)
    (device,) = array.devices()
    mesh, spec = Mesh(np.array([device]), ("device",)), PartitionSpec()
    return jax.device_put(array, NamedSharding(mesh, spec)), mesh, spec


@lru_cache(maxsize=256)
def _device_sums(mesh: Mesh, spec: PartitionSpec, count: int | None) -> Any:
    """Return the program array, index -> uint32 [devices, LANES], each row on its device; zeros for replicas.

    `count`: the array is the entry at the index of a stack of so many; None: it is an array of its own.
    """
    of_shard = partial(_shard_sums, axes=_axes(spec), sizes=dict(mesh.shape), count=count)
    rows = PartitionSpec(mesh.axis_names)
    return _compiled(
        jax.shard_map(of_shard, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=rows, check_vma=False)
    )


@lru_cache(maxsize=256)
def _device_rounding(mesh: Mesh, spec: PartitionSpec, dtype: np.dtype, reuse: bool) -> Any:
    """Return the program array -> array rounded to `dtype`, and its sums; `reuse`: into its second argument."""

    def rounded(shard: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = shard.astype(dtype)
        return result, _shard_sums(result, np.uint32(0), axes=_axes(spec), sizes=dict(mesh.shape), count=None)

    rows = PartitionSpec(mesh.axis_names)
    specs = (spec, spec) if reuse else (spec,)
    mapped = jax.shard_map(rounded, mesh=mesh, in_specs=specs, out_specs=(spec, rows), check_vma=False)
    return _compiled(mapped, donate_argnums=(1,) if reuse else (), keep_unused=True)


def _compiled(mapped: Any, **options: Any) -> Any:
    return jax.jit(mapped, compiler_options=_CPU_OPTIONS if platform() == "cpu" else None, **options)


@lru_cache(maxsize=256)
def _add_up(mesh: Mesh) -> Any:
    """Return the program [[uint32 [devices, LANES]] of an array's parts] -> uint32 [arrays, LANES], replicated."""

    def total(groups: list[list[jax.Array]]) -> jax.Array:
        return jnp.sum(jnp.stack([sum(parts[1:], parts[0]) for parts in groups]), axis=1, dtype=jnp.uint32)

    return jax.jit(total, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _axes(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Return the mesh axes that shard each dimension, the outermost first."""
    return [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec]


def _shard_sums(
    shard: jax.Array, index: Any, *, axes: list[tuple[str, ...]], sizes: dict[str, int], count: int | None
) -> jax.Array:
    """Return the sums over one device's shard, or zeros if the shard is a replica that counts on another device."""
    axes = [*axes, *[()] * (shard.ndim - len(axes))]
    shape, starts = [], []
    for size, names in zip(shard.shape, axes, strict=True):
        shape.append(size * math.prod(sizes[name] for name in names))
        starts.append(lax.axis_index(names) * size if names else 0)
    if count is not None:
        shard, shape, starts = shard[None], [count, *shape], [index, *starts]
    replicas = [name for name in sizes if not any(name in names for names in axes) and sizes[name] > 1]
    if not replicas:
        return element_sums(shard, shape, starts)[None]
    first = lax.axis_index(tuple(replicas)) == 0
    zeros = lambda _: jnp.zeros(LANES, jnp.uint32)  # noqa: E731
    return lax.cond(first, lambda x: element_sums(x, shape, starts), zeros, shard)[None]
