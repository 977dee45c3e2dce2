"""Fingerprints against numpy, over meshes and processes, and what they notice."""

import hashlib
import itertools
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_like.checkpoint.plain.plain_arrays import StackEntries
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import Params, build_abstract, split
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.norm import RMSNorm
from mesh import make_mesh, to_named_sharding
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.fingerprint import fingerprint_version, fingerprints
from tests.elsewhere import elsewhere

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
MESHES = (
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 8},
    {"expert": 4, "fsdp": 2},
    {"fsdp": 2, "tensor": 4},
    {"tensor": 2},
)
SPREAD = PartitionSpec("tensor", ("expert", "fsdp"))
SHAPES = ((), (7,), (0, 3), (3, 4, 5), (3, 4, 50), (9, 4, 300))  # the last one is not small
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "uint32", "bool")
POLICY = Decoder.Config(
    vocab_size=64,
    dim=16,
    num_layers=1,
    block=Block.Config(
        attention=Attention.Config(num_heads=4, num_kv_heads=4, head_dim=4, qk_norm=RMSNorm.Config()),
        feed_forward=SwiGLU.Config(hidden=24),
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_finds_the_same(dtype: str) -> None:
    params = {f"s{i}": {"w": random_bits(shape, dtype, seed=i)} for i, shape in enumerate(SHAPES)}
    found = fingerprints(params)
    assert found == {f"s{i}/w": by_numpy(f"s{i}/w", params[f"s{i}"]["w"]) for i in range(len(SHAPES))}
    assert all(len(digits) == 32 for digits in found.values())
    assert len(set(found.values())) == len(SHAPES)


@pytest.mark.parametrize(
    ("shape", "elements"), [((4, 6), range(24)), ((2, 130), (0, 1, 129, 130, 131, 259))], ids=["columns", "rows"]
)
def test_every_flipped_bit_and_every_swap_is_seen(shape: tuple[int, ...], elements: Sequence[int]) -> None:
    array = random_bits(shape, "bfloat16", seed=1)
    words = array.view(np.uint16).reshape(-1)
    seen = {fingerprints({"w": array})["w"]}
    changes = 0
    for element, bit in itertools.product(elements, range(16)):
        changed = words.copy()
        changed[element] ^= np.uint16(1 << bit)
        seen.add(fingerprints({"w": changed.view(array.dtype).reshape(shape)})["w"])
        changes += 1
    for a, b in itertools.combinations(elements, 2):
        changed = words.copy()
        changed[[a, b]] = changed[[b, a]]
        changes += int(words[a] != words[b])
        seen.add(fingerprints({"w": changed.view(array.dtype).reshape(shape)})["w"])
    assert len(seen) == 1 + changes


def test_what_else_tells_arrays_apart() -> None:
    zeros = np.zeros((4, 4), np.float32)
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    nan = np.full((4, 4), 0x7FC00000, np.uint32)
    arrays = [
        *(zeros, -zeros, zeros.reshape(2, 8), zeros.reshape(16), zeros.astype(jnp.bfloat16), zeros.astype(np.int32)),
        *(zeros.astype(bool), zeros[:0], zeros[:, :0]),
        *(square, square.T, square[::-1], square[:, ::-1], square.reshape(16), square + np.float32(1e-6)),
        *(nan.view(np.float32), (nan + 1).view(np.float32), (nan | 0x80000000).view(np.float32)),
    ]
    assert len({fingerprints({"w": array})["w"] for array in arrays}) == len(arrays)
    assert fingerprints({"w": square}) != fingerprints({"v": square})
    assert fingerprints({"w": square})["w"] != fingerprints({"v": square})["v"]
    assert fingerprints({"w": np.asfortranarray(square)}) == fingerprints({"w": jnp.asarray(square)})


def test_the_version_is_the_content_of_all() -> None:
    found = fingerprints({"a": np.ones(3, np.float32), "b": {"c": np.zeros(3, np.float32)}})
    assert list(found) == ["a", "b/c"]
    version = fingerprint_version(found)
    text = "".join(f"{name}\0{digits}\n" for name, digits in sorted(found.items()))
    assert version == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    assert version == fingerprint_version(dict(reversed(found.items())))
    assert version != fingerprint_version({"a": found["b/c"], "b/c": found["a"]})
    assert version != fingerprint_version({"a": found["a"]})


def test_wider_elements_are_refused() -> None:
    with pytest.raises(WeightsError, match="tensor a/b is of float64; only numbers of at most 32 bits"):
        fingerprints({"a": {"b": np.zeros(3)}})
    with pytest.raises(WeightsError, match=r"tensor k is of key<fry>"):
        fingerprints({"k": jax.random.key(0)})


@pytest.mark.parametrize("shape", [(3, 4, 50), (2, 130, 70), (4, 5), (1, 3)])
def test_entries_of_a_stack_have_its_fingerprint(shape: tuple[int, ...]) -> None:
    stack = random_bits(shape, "bfloat16", seed=3)
    entries = StackEntries([jnp.asarray(entry) for entry in stack])
    assert fingerprints({"w": entries}) == {"w": by_numpy("w", stack)}


def test_programs_are_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    with jax.log_compiles():
        fingerprints({name: np.ones((3, 3333), np.float32) for name in "abc"})
        assert "ompil" in caplog.text
        caplog.clear()
        fingerprints({name: np.zeros((3, 3333), np.float32) for name in "abc"})
        assert "ompil" not in caplog.text


def test_every_mesh_finds_the_same() -> None:
    found = elsewhere(on_every_mesh, environ=EIGHT)
    assert found == [{"w": by_numpy("w", spread())}] * (2 * len(MESHES) + 1)


def test_a_policy_sharded_as_by_the_trainer_is_the_same_on_one_device() -> None:
    whole, parts = elsewhere(policy_on_meshes, environ=EIGHT)
    assert whole == parts
    leaves, _ = jax.tree_util.tree_flatten_with_path(policy_params(abstract_policy()))
    named = {"/".join(key.key for key in path): leaf for path, leaf in leaves}
    assert whole == {name: by_numpy(name, leaf) for name, leaf in named.items()}


def test_two_processes_find_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(elsewhere, one_of_two, address, process, environ=FOUR) for process in (0, 1)]
        found = [call.result() for call in calls]
    array = spread()
    assert found == [[{"a/w": by_numpy("a/w", array), "b": by_numpy("b", array[0])}] * 3] * 2


def on_every_mesh() -> list[dict[str, str]]:
    """Fingerprints of one array on every mesh, in and outside of `jax.set_mesh`, and on a mesh in automatic mode."""
    found = []
    for shape in MESHES:
        mesh = make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values())))])
        array = jax.device_put(spread(), NamedSharding(mesh, SPREAD))
        with jax.set_mesh(mesh):
            found.append(fingerprints({"w": array}))
        found.append(fingerprints({"w": array}))
    automatic = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found.append(fingerprints({"w": jax.device_put(spread(), NamedSharding(automatic, PartitionSpec(None, "x")))}))
    return found


def policy_on_meshes() -> list[dict[str, str]]:
    """Fingerprints of a policy on one device, and cut as the trainer cuts it."""
    found = []
    for shape in ({}, {"fsdp": 4, "tensor": 2}):
        mesh = make_mesh(shape)
        with jax.set_mesh(mesh):
            like = to_named_sharding(abstract_policy(), mesh)
            placed = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), policy_params(like), like)
            found.append(fingerprints(placed))
        assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(placed)) == (not shape)
    return found


def abstract_policy() -> Params:
    return split(build_abstract(POLICY))[1]


def policy_params(abstract: Params) -> Params:
    """Random values by numpy, the same everywhere."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), abstract)


def one_of_two(address: str, process: int) -> list[dict[str, str]]:
    """Compute fingerprints of global arrays in one of two processes, on three meshes of their eight devices."""
    jax.distributed.initialize(address, 2, process)
    value, found = spread(), []
    for shape in MESHES[:3]:
        mesh = make_mesh(shape)
        array = jax.make_array_from_callback(value.shape, NamedSharding(mesh, SPREAD), lambda i: value[i])
        row = jax.make_array_from_callback((16,), NamedSharding(mesh, PartitionSpec()), lambda i: value[0][i])
        found.append(fingerprints({"a": {"w": array}, "b": row}))
    return found


def spread() -> np.ndarray:
    return random_bits((8, 16), "float32", seed=5)


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Any bits at all, so NaN with payloads, infinities and denormals too."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    width = jnp.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape, width), np.uint8).view(jnp.dtype(dtype)).reshape(shape)


def by_numpy(name: str, array: np.ndarray) -> str:
    """The same fingerprint, written down once more for the host."""
    if array.dtype.kind in "iub":
        bits = array.astype(np.int64).astype(np.uint32)
    else:
        bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").astype(np.uint32)
    long = next((axis for axis in reversed(range(array.ndim)) if np.prod(array.shape[axis:]) >= 128), 0)
    columns = np.uint32(np.prod(array.shape[long:], dtype=np.int64) or 1)
    index = np.arange(array.size, dtype=np.uint32)
    lanes = lanes_by_numpy(bits.reshape(-1), index // columns, index % columns)
    about = f"{name}\0{array.dtype.name}\0{array.shape}\0".encode()
    return hashlib.blake2b(about + lanes.tobytes(), digest_size=16).hexdigest()


def lanes_by_numpy(bits: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    def mix(x: np.ndarray, first: int, second: int) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(first)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(second)
        return x ^ (x >> np.uint32(16))

    rows, columns = mix(row, 0x9E3779B1, 0x85EBCA77), mix(column, 0x85EBCA6B, 0xC2B2AE35)
    first = mix(bits ^ rows ^ columns, 0x7FEB352D, 0x846CA68B)
    second = (first ^ (first >> np.uint32(15))) * np.uint32(0xC2B2AE3D)
    weight = (rows + columns) | np.uint32(1)
    return np.array([x.sum(dtype=np.uint32) for x in (first, first * weight, second, second * weight)], "<u4")
