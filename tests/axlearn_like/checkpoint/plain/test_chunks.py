"""Checkpoints written chunk by chunk: read by the same reader, with the same checksums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash

from axlearn_like.checkpoint.arrays import SavedParams
from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.manifest import checksum, make_manifest, part_checksum
from axlearn_like.checkpoint.plain import chunks
from axlearn_like.checkpoint.plain.direct_file import DirectFile
from axlearn_like.checkpoint.plain.plain_arrays import (
    EntriesStruct,
    FileBuffer,
    PlainArray,
    StackEntries,
    aligned_empty,
    as_stacks,
)
from axlearn_like.checkpoint.reader import restore_params, verify_latest
from axlearn_like.checkpoint.versions import CheckpointError


def random(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(), (5000,), (3, 4100), (3, 4, 5, 6)])
def test_the_checksum_of_parts_is_that_of_the_array(shape, dtype):
    array = random(shape, dtype)
    wanted = int(checksum(jnp.asarray(array)))
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    assert part_checksum(array, strides, 0) == wanted
    if shape:
        order = tuple(reversed(range(len(shape))))
        turned = [np.ascontiguousarray(part.transpose(order)) for part in (array[:1], array[1:])]
        sums = [part_checksum(part, strides[::-1], first) for part, first in zip(turned, (0, strides[0]), strict=True)]
        assert sum(sums) % 2**32 == wanted


def write(folder, params, orders, limit, *, digests=False):
    """A checkpoint of nested arrays, each with the axes of its entries in another order."""
    named = {f"layers/{name}": array for name, array in params["layers"].items()}
    layouts = {
        name: chunks.Layout.of(array.shape, str(array.dtype), 1, orders[name.partition("/")[2]], limit)
        for name, array in named.items()
    }
    directory = chunks.create(folder, layouts)
    sums = dict.fromkeys(layouts, 0)
    for name, layout in layouts.items():
        files: dict[str, list[tuple[int, np.ndarray]]] = {}
        for index, entry in enumerate(named[name]):
            stored = np.ascontiguousarray(entry.transpose(layout.order))
            for row in range(0, len(stored), layout.rows):
                block = stored[row : row + layout.rows]
                chunk, place = layout.position((index,), row)
                files.setdefault(chunk, []).append((place, block))
                sums[name] += layout.checksum(block, (index,), row)
        for chunk, blocks in files.items():
            with DirectFile(directory / chunks.directory_name(name) / chunk) as file:
                for place, block in blocks:
                    assert file.size == place
                    file.append(block)
                file.append(bytes(chunks.chunk_bytes(layout) - file.size))
    written = {
        name: {
            file.name: xxhash.xxh3_64_hexdigest(file.read_bytes())
            for file in (directory / chunks.directory_name(name)).glob("c.*")
        }
        for name in layouts
    }
    chunks.finish(folder, layouts, sums, written if digests else None)
    return layouts


PARAMS = {"layers": {"q_dkh": random((4, 6, 3, 2), jnp.bfloat16), "down_fd": random((4, 7, 5), np.float32, 1)}}
ORDERS = {"q_dkh": (1, 2, 0), "down_fd": (1, 0)}


@pytest.mark.parametrize(("limit", "chunk"), [(10**6, (4, 7, 5)), (2 * 140, (2, 7, 5)), (60, (1, 7, 2))])
def test_orbax_reads_chunks_with_their_axes_in_another_order(tmp_path, limit, chunk):
    """Stacks of layers in one chunk, and rows of one layer in several, the last of them shorter."""
    layouts = write(tmp_path / "checkpoints", PARAMS, ORDERS, limit)
    assert layouts["layers/down_fd"].chunk == chunk
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), PARAMS)
    for found in (restore_params(tmp_path, abstract), restore_params(tmp_path)):
        for name, array in PARAMS["layers"].items():
            np.testing.assert_array_equal(np.asarray(found["layers"][name]), array)
    verify_latest(tmp_path / "checkpoints")


def test_a_flipped_bit_is_damage(tmp_path):
    write(tmp_path / "checkpoints", PARAMS, ORDERS, 60)
    (path, *_) = sorted((tmp_path / "checkpoints/0/params/layers.down_fd").glob("c.*"))
    content = bytearray(path.read_bytes())
    content[5] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"layers/down_fd' does not match its checksum"):
        restore_params(tmp_path)
    saved = SavedParams(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers/down_fd' does not match its checksum"):
        for index in range(4):
            saved.entry("layers/down_fd", (index,), (1, 0))


def entries_of(params):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: EntriesStruct(x.shape, x.dtype, sharding=device), params)


@pytest.mark.parametrize("limit", [10**6, 2 * 140, 60])
def test_a_stack_is_read_as_its_entries(tmp_path, limit):
    """Whole stacks in a chunk, some entries, and part of one."""
    write(tmp_path / "checkpoints", PARAMS, ORDERS, limit, digests=True)
    for wanted, kind in ((entries_of(PARAMS), StackEntries), (as_stacks(entries_of(PARAMS)), jax.Array)):
        found = restore_params(tmp_path, wanted)["layers"]
        for name, array in PARAMS["layers"].items():
            assert isinstance(found[name], kind) and found[name].shape == array.shape
            for index, entry in enumerate(found[name]):
                np.testing.assert_array_equal(np.asarray(entry), array[index])


@pytest.mark.parametrize("offset", [0, 4])
def test_entries_outlive_the_buffer_of_their_file(tmp_path, offset):
    """The next file is read into the same memory, which CPU devices take without a copy if it is aligned."""
    params = {"layers": {"scale": random((4, 64), np.float32, 2), "down_fd": random((4, 7, 64), np.float32, 1)}}
    write(tmp_path / "checkpoints", params, {"scale": (0,), "down_fd": (0, 1)}, 10**6, digests=True)
    buffer = FileBuffer()
    buffer._memory = aligned_empty((1 << 16,), np.dtype(np.uint8))[offset:]
    folder, device = tmp_path / "checkpoints/0/params", jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = [PlainArray.open(folder, f"layers/{name}") for name in params["layers"]]
    found = [array.entries(device, buffer) for array in arrays if array is not None]
    for entries, array in zip(found, params["layers"].values(), strict=True):
        np.testing.assert_array_equal(np.stack([np.asarray(entry) for entry in entries]), array)


def test_without_digests_it_is_a_stack(tmp_path):
    write(tmp_path / "checkpoints", PARAMS, ORDERS, 60)
    assert isinstance(restore_params(tmp_path, entries_of(PARAMS))["layers"]["q_dkh"], jax.Array)


@pytest.mark.parametrize("cut", [True, False])
def test_a_file_that_is_not_what_was_written_is_damage(tmp_path, cut):
    """Two numbers that changed places are found too, which a sum over the array would not see."""
    write(tmp_path / "checkpoints", PARAMS, ORDERS, 10**6, digests=True)
    (path,) = (tmp_path / "checkpoints/0/params/layers.down_fd").glob("c.*")
    content = path.read_bytes()
    path.write_bytes(content[:-4] if cut else content[4:8] + content[:4] + content[8:])
    for wanted in (entries_of(PARAMS), as_stacks(entries_of(PARAMS)), None):
        said = "has 556 bytes in c.0.0.0, expected 560" if cut else "does not match its checksum"
        with pytest.raises(CheckpointError, match=f"layers/down_fd' {said}"):
            restore_params(tmp_path, wanted)


@pytest.mark.parametrize("by_orbax", [True, False])
def test_entries_are_read_one_by_one_in_any_order_of_axes(tmp_path, by_orbax):
    if by_orbax:
        saver = Checkpointer.Config(asynchronous=False).build(directory=tmp_path / "checkpoints")
        saver.save(0, {"params": jax.tree.map(jnp.asarray, PARAMS), "step": np.int32(0)}, {})
        saver.close()
    else:
        write(tmp_path / "checkpoints", PARAMS, ORDERS, 2 * 140)
    saved = SavedParams(tmp_path)
    for name, array in PARAMS["layers"].items():
        for index in range(4):
            entry = saved.entry(f"layers/{name}", (index,), ORDERS[name])
            assert entry.flags.c_contiguous
            np.testing.assert_array_equal(entry, array[index].transpose(ORDERS[name]))


def test_the_manifest_is_the_one_that_a_save_makes(tmp_path):
    write(tmp_path / "checkpoints", PARAMS, ORDERS, 60)
    assert SavedParams(tmp_path).manifest == make_manifest(PARAMS)


@pytest.mark.parametrize("size", [0, 5, 4096, 5 * 2**20 + 3])
def test_a_direct_file_has_every_byte(tmp_path, size):
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    with DirectFile(tmp_path / "file") as file:
        for start in range(0, size, 999_999):
            file.append(content[start : start + 999_999])
        assert file.size == size
    assert (tmp_path / "file").read_bytes() == content.tobytes()
