import gc
import threading
import time
import weakref
from collections.abc import Callable

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.index_ranges import IndexRange, slices, volume, whole
from rl.parameter_server.store.shard_store import ShardStore
from rl.parameter_server.transport.shared_memory import SegmentGone, SharedSegment

BFLOAT16 = np.dtype(jnp.bfloat16)


def _bytes(array: np.ndarray) -> bytes:
    return array.tobytes()


def _partition(draw: st.DrawFn, index_range: IndexRange, cuts: int) -> list[IndexRange]:
    """The index range, cut at random places."""
    axes = [axis for axis, (start, stop) in enumerate(index_range) if stop - start > 1]
    if not cuts or not axes:
        return [index_range]
    axis = draw(st.sampled_from(axes))
    cut = draw(st.integers(index_range[axis][0] + 1, index_range[axis][1] - 1))
    low, high = (
        (*index_range[:axis], part, *index_range[axis + 1 :])
        for part in ((index_range[axis][0], cut), (cut, index_range[axis][1]))
    )
    return _partition(draw, low, cuts - 1) + _partition(draw, high, cuts - 1)


@st.composite
def _partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[IndexRange]:
    return _partition(draw, whole(shape), draw(st.integers(0, 3)))


@st.composite
def _index_ranges(draw: st.DrawFn, shape: tuple[int, ...]) -> IndexRange:
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in ends)


SHAPES = {"scalar": (), "bias": (7,), "kernel": (5, 6), "experts": (3, 4, 5), "none": (0, 4)}
DTYPES = {"scalar": "float32", "bias": "bfloat16", "kernel": "float32", "experts": "bfloat16", "none": "float32"}


def _full(version: int) -> dict[str, np.ndarray]:
    """Random bits: NaN, infinities, denormals and all."""
    rng = np.random.default_rng(version)
    bits = {
        name: rng.integers(0, 256, (*shape, np.dtype(DTYPES[name]).itemsize), np.uint8)
        for name, shape in SHAPES.items()
    }
    return {name: array.reshape(-1).view(DTYPES[name]).reshape(SHAPES[name]) for name, array in bits.items()}


class StoreMachine(RuleBasedStateMachine):
    """Against whole arrays in a dict, with a mask of what was added."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ShardStore()
        self.full = {version: _full(version) for version in range(3)}
        self.masks: dict[int, dict[str, np.ndarray]] = {}
        self.index_ranges: dict[int, dict[tuple[str, IndexRange], np.ndarray]] = {}

    @rule(data=st.data(), version=st.integers(0, 2), name=st.sampled_from(list(SHAPES)), in_segment=st.booleans())
    def add(self, data: st.DataObject, version: int, name: str, in_segment: bool) -> None:
        partition = data.draw(_partitions(SHAPES[name]))
        chosen = [index_range for index_range in partition if data.draw(st.booleans())]
        arrays = [
            self.full[version][name][(*slices(index_range, whole(SHAPES[name])), ...)].copy() for index_range in chosen
        ]
        segment = SharedSegment.create(4096) if in_segment else None
        if segment is not None:
            arrays = _placed(segment, arrays)
        self.store.add(
            version,
            [(name, index_range, array) for index_range, array in zip(chosen, arrays, strict=True)],
            keep_alive=segment,
        )
        for index_range, array in zip(chosen, arrays, strict=True):
            masks = self.masks.setdefault(version, {n: np.zeros(shape, bool) for n, shape in SHAPES.items()})
            masks[name][(*slices(index_range, whole(SHAPES[name])), ...)] = True
            self.index_ranges.setdefault(version, {}).setdefault((name, index_range), array)

    @precondition(lambda self: self.index_ranges)
    @rule(data=st.data())
    def add_other_bytes(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.index_ranges)))
        name, index_range = data.draw(st.sampled_from(sorted(self.index_ranges[version])))
        if volume(index_range):
            other = self.index_ranges[version][name, index_range].copy()
            other.reshape(-1).view(np.uint8)[-1] ^= 1
            with pytest.raises(WeightsError, match="was sent again with other bytes"):
                self.store.add(version, [("new", ((0, 1),), np.ones(1)), (name, index_range, other)])

    @rule(data=st.data(), version=st.integers(0, 2), name=st.sampled_from(list(SHAPES)))
    def read(self, data: st.DataObject, version: int, name: str) -> None:
        index_range = data.draw(_index_ranges(SHAPES[name]))
        if version not in self.masks:
            with pytest.raises(VersionGone, match=f"version {version} "):
                self.store.read(version, name, index_range)
            return
        part = (*slices(index_range, whole(SHAPES[name])), ...)
        known = any(held == name for held, _ in self.index_ranges[version])
        if not known or not self.masks[version][name][part].all():
            with pytest.raises(WeightsError, match=f"version {version} .*{name}"):
                self.store.read(version, name, index_range)
            return
        expected = self.full[version][name][part]
        array = self.store.read(version, name, index_range)
        assert (array.shape, array.dtype, _bytes(array)) == (expected.shape, expected.dtype, _bytes(expected))
        assert array.flags.c_contiguous and not array.flags.writeable
        assert self.store.digest(version, name, index_range) == xxhash.xxh3_128_hexdigest(_bytes(expected))
        where = self.store.where(version, name, index_range)
        if where is not None:
            memory = SharedSegment.attach(where.segment).buffer[where.offset :][: expected.nbytes]
            assert _bytes(memory) == _bytes(expected)

    @rule(version=st.integers(0, 2))
    def drop(self, version: int) -> None:
        self.store.drop(version)
        self.masks.pop(version, None)
        self.index_ranges.pop(version, None)

    @rule(versions=st.sets(st.integers(0, 2)))
    def drop_several(self, versions: set[int]) -> None:
        self.store.drop(*versions)
        for version in set(self.masks) & versions:
            del self.masks[version], self.index_ranges[version]

    @invariant()
    def same(self) -> None:
        assert self.store.versions() == sorted(self.index_ranges)
        for version, index_ranges in self.index_ranges.items():
            held = self.store.shards(version)
            assert {(name, index_range): _bytes(array) for name, index_range, array in held} == {
                k: _bytes(a) for k, a in index_ranges.items()
            }
            assert self.store.nbytes(version) >= sum(array.nbytes for array in index_ranges.values())

    def teardown(self) -> None:
        self.store.drop(*self.store.versions())


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestStoreMachine = StoreMachine.TestCase


def _placed(segment: SharedSegment, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Place the arrays one after the other in the segment's memory, at multiples of 64."""
    placed, offset = [], 0
    for array in arrays:
        room = segment.buffer[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        room[...] = array
        placed.append(room)
        offset += -(-array.nbytes // 64) * 64
    return placed


def _exists(name: str) -> bool:
    try:
        SharedSegment.attach(name)
    except SegmentGone:
        return False
    return True


def _until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:.0f} s still not: {what}"
        gc.collect()
        time.sleep(0.01)


def test_reads_without_a_copy_where_it_can() -> None:
    store, array = ShardStore(), np.arange(24, dtype=np.float32).reshape(6, 4)
    store.add(1, [("w", ((2, 8), (0, 4)), array)])
    assert np.shares_memory(store.read(1, "w", ((2, 8), (0, 4))), array)
    assert np.shares_memory(store.read(1, "w", ((3, 5), (0, 4))), array[1:3])
    columns = store.read(1, "w", ((2, 8), (1, 3)))
    assert not np.shares_memory(columns, array) and columns.tolist() == array[:, 1:3].tolist()
    with pytest.raises(ValueError, match="read-only"):
        store.read(1, "w", ((2, 8), (0, 4)))[0] = 1


def test_messages_name_what_is_asked_for_and_what_is_held() -> None:
    store = ShardStore()
    with pytest.raises(VersionGone, match="version 3 .* versions held: none"):
        store.read(3, "w", ())
    store.add(4, [("layers/w", ((0, 2), (0, 4)), np.zeros((2, 4)))])
    with pytest.raises(VersionGone, match="version 3 .* versions held: 4"):
        store.read(3, "w", ())
    with pytest.raises(WeightsError, match=r"version 4 .*'layers/v'.*did you mean 'layers/w'"):
        store.read(4, "layers/v", ((0, 2), (0, 4)))
    with pytest.raises(WeightsError, match=r"version 4 .*'layers/w'.*\[1:3, 0:4\].*held: \[0:2, 0:4\]"):
        store.read(4, "layers/w", ((1, 3), (0, 4)))
    with pytest.raises(WeightsError, match="1 dimensions requested of a tensor with 2"):
        store.where(4, "layers/w", ((1, 3),))


def test_refuses_shards_that_do_not_fit() -> None:
    store = ShardStore()
    with pytest.raises(WeightsError, match=r"\[0:3\].*shape \(2,\)"):
        store.add(1, [("a", ((0, 2),), np.zeros(2)), ("b", ((0, 3),), np.zeros(2))])
    with pytest.raises(WeightsError, match="other bytes"):
        store.add(1, [("a", ((0, 2),), np.zeros(2)), ("a", ((0, 2),), np.ones(2))])
    assert store.versions() == []
    store.add(1, [("a", ((0, 2),), np.zeros(2))])
    with pytest.raises(WeightsError, match=r"got 1-d float32, but the shard \[0:2\] is 1-d float64"):
        store.add(1, [("b", (), np.zeros(())), ("a", ((2, 4),), np.zeros(2, np.float32))])
    with pytest.raises(WeightsError, match="held as float64, and was sent again as float32"):
        store.add(1, [("a", ((0, 2),), np.zeros(2, np.float32))])
    assert [name for name, *_ in store.shards(1)] == ["a"]


class _Owner:
    """Memory must not be reused while a reader holds it."""


def test_memory_goes_when_the_last_reader_is_done() -> None:
    store, array, owner = ShardStore(), np.arange(64, dtype=np.float32).astype(BFLOAT16), _Owner()
    memory, kept = weakref.ref(array), weakref.ref(owner)
    store.add(1, [("w", ((0, 64),), array)], keep_alive=owner)
    view = store.read(1, "w", ((8, 16),))
    expected = array[8:16].tolist()
    del array, owner
    store.drop(1)
    gc.collect()
    assert memory() is not None and kept() is not None
    assert view.tolist() == expected
    del view
    _until(lambda: memory() is None and kept() is None, "memory and its owner let go")


def test_a_segment_is_unlinked_with_the_last_version_that_lies_in_it() -> None:
    store, segment = ShardStore(), SharedSegment.create(4096)
    name = segment.name
    first, second = _placed(segment, [np.arange(100, dtype=np.float32), np.arange(50, dtype=np.int32)])
    store.add(1, [("a", ((0, 100),), first)], keep_alive=segment)
    store.add(2, [("b", ((0, 50),), second)], keep_alive=segment)
    where = store.where(2, "b", ((10, 50),))
    assert where == (segment.name, 448 + 40)
    assert where is not None
    attached = SharedSegment.attach(where.segment).buffer[where.offset :][:160].view(np.int32)
    view = store.read(1, "a", ((0, 100),))
    del first, second, segment
    store.drop(1)
    assert _exists(name)
    store.drop(2)
    assert not _exists(name)
    gc.collect()
    assert attached.tolist() == list(range(10, 50)) and view.tolist() == list(range(100))


def test_what_does_not_lie_in_the_segment_is_not_said_to() -> None:
    store, segment = ShardStore(), SharedSegment.create(4096)
    (array,) = _placed(segment, [np.arange(100, dtype=np.float32).reshape(10, 10)])
    transposed, elsewhere = array.T, np.ones(3, np.float32)
    store.add(1, [("t", ((0, 10), (0, 10)), transposed), ("e", ((0, 3),), elsewhere)], keep_alive=segment)
    assert store.where(1, "t", ((0, 10), (0, 10))) is None and store.where(1, "e", ((0, 3),)) is None
    assert store.read(1, "t", ((0, 10), (0, 10))).tolist() == array.T.tolist()
    assert not _exists(segment.name)


def test_a_segment_that_brings_nothing_new_is_unlinked_at_once() -> None:
    store, segment = ShardStore(), SharedSegment.create(4096)
    (array,) = _placed(segment, [np.arange(100, dtype=np.float32)])
    store.add(1, [("a", ((0, 100),), array.copy())])
    store.add(1, [("a", ((0, 100),), array)], keep_alive=segment)
    assert not _exists(segment.name)
    assert store.where(1, "a", ((0, 100),)) is None


def test_a_segment_of_another_process_goes_when_the_store_lets_it_go() -> None:
    store, made = ShardStore(), SharedSegment.create(4096)
    (array,) = _placed(made, [np.arange(100, dtype=np.float32)])
    attached = SharedSegment.attach(made.name)
    name = attached.name
    view = attached.buffer[:400].view(np.float32)
    store.add(1, [("a", ((0, 100),), view)], keep_alive=attached)
    del made, array, view, attached
    gc.collect()
    assert store.where(1, "a", ((0, 100),)) == (name, 0) and _exists(name)
    reading = store.read(1, "a", ((0, 50),))
    store.drop(1)
    assert reading.tolist() == list(range(50))
    del reading
    _until(lambda: not _exists(name), "segment released")


def test_readers_beside_versions_that_come_and_go() -> None:
    store, stop, failures, reads = ShardStore(), threading.Event(), [], [0] * 4
    shape = (64, 96)

    def array_of(version: int) -> np.ndarray:
        return np.arange(version, version + 64 * 96, dtype=np.float32).reshape(shape)

    def read(worker: int) -> None:
        rng = np.random.default_rng(worker)
        while not stop.is_set():
            version = int(rng.choice(store.versions() or [0]))
            rows, columns = (sorted(rng.integers(0, size + 1, 2).tolist()) for size in shape)
            index_range = ((rows[0], rows[1]), (columns[0], columns[1]))
            try:
                array = store.read(version, "w", index_range)
                digest = store.digest(version, "w", index_range)
            except VersionGone:
                continue
            except BaseException as error:
                failures.append(error)
                return
            expected = array_of(version)[(*slices(index_range, whole(shape)), ...)]
            if _bytes(array) != _bytes(expected) or digest != xxhash.xxh3_128_hexdigest(_bytes(expected)):
                failures.append((version, index_range))
            reads[worker] += 1

    workers = [threading.Thread(target=read, args=(worker,)) for worker in range(len(reads))]
    for worker in workers:
        worker.start()
    version = 0
    deadline = time.monotonic() + 60
    while not failures and (version < 30 or min(reads) < 20) and time.monotonic() < deadline:
        version += 1
        full, segment = array_of(version), SharedSegment.create(64 * 96 * 4 + 256)
        halves: list[IndexRange] = [((0, 40), (0, 96)), ((40, 64), (0, 96))]
        arrays = _placed(segment, [full[0:40], full[40:64]])
        store.add(
            version,
            [("w", index_range, array) for index_range, array in zip(halves, arrays, strict=True)],
            keep_alive=segment,
        )
        del full, arrays, segment
        store.drop(*range(version - 1))
    stop.set()
    for worker in workers:
        worker.join()
    assert not failures and min(reads) >= 20
    store.drop(*store.versions())
    assert store.nbytes() == 0
