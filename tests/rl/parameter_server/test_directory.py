"""A version is published whole or not at all, whatever becomes of those who push it and of those who hold it."""

import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rl.parameter_server.broadcast import Relays
from rl.parameter_server.digest import digest_of
from rl.parameter_server.directory import Directory
from rl.parameter_server.errors import AttemptOver, WeightsError
from rl.parameter_server.index_ranges import Box
from rl.parameter_server.manifest import Piece, Seal, TensorSpec, manifest_from_text, seal_from_text, to_text
from rl.parameter_server.store.shard_server import Holder
from rl.parameter_server.store.shard_store import PieceStore

LEFT: Box = ((0, 2), (0, 4))
RIGHT: Box = ((2, 6), (0, 4))
ARRAY = np.arange(24, dtype=np.float32).reshape(6, 4)


class Bed:
    """A directory over two shards, and two trainer processes that push a half each."""

    def __init__(self, keep: int = 2):
        self.shards = [Holder(PieceStore()) for _ in range(2)]
        self.directory = Directory(self.shards, keep=keep, relays=Relays())

    def push(self, key: int, process: int, *, version: int = 0, box: Box | None = None, mark: str = "f") -> Seal:
        box = box or (LEFT, RIGHT)[process]
        array = ARRAY[box[0][0] : box[0][1]]
        self.shards[process].write(key, [("w", box, array, digest_of(array))])
        return Seal(
            version=version,
            key=key,
            process=process,
            processes=2,
            tensors=(TensorSpec("w", (6, 4), "float32"),),
            pieces=(Piece("w", box, digest_of(array), process),),
            fingerprints={"w": mark},
            incarnations={process: self.shards[process].incarnation()},
        )

    def publish(self, version: int, mark: str = "f") -> None:
        key = self.directory.open(version, "trainer", 2)
        assert [self.directory.seal(self.push(key, p, version=version, mark=mark)) for p in range(2)] == [False, True]

    def keys(self) -> Sequence[int]:
        return self.shards[0].store.versions()


@pytest.fixture
def bed() -> Bed:
    return Bed()


def test_the_last_seal_publishes(bed: Bed):
    key = bed.directory.open(0, "trainer", 2)
    assert bed.directory.open(0, "trainer", 2) == key  # its processes share it
    assert not bed.directory.seal(bed.push(key, 1))
    assert bed.directory.versions() == []
    assert bed.directory.outcome(key) == [0]
    assert bed.directory.seal(bed.push(key, 0))
    assert bed.directory.outcome(key) is True
    manifest = bed.directory.manifest(0)
    assert {(piece.box, piece.shard) for piece in manifest.pieces} == {(LEFT, 0), (RIGHT, 1)}
    assert manifest_from_text(to_text(manifest)) == manifest


def test_seals_survive_their_way_over_the_wire(bed: Bed):
    seal = bed.push(5, 1)
    assert seal_from_text(to_text(seal)) == seal


@pytest.mark.parametrize(
    "box, message",
    [
        (((0, 1), (0, 4)), "no piece holds"),
        (((0, 3), (0, 4)), "overlap"),
        (((0, 9), (0, 4)), "not a part of its shape"),
    ],
)
def test_pieces_that_do_not_make_up_the_tensors_are_refused(bed: Bed, box: Box, message: str):
    key = bed.directory.open(0, "trainer", 2)
    seal = bed.push(key, 0)
    bed.directory.seal(dataclasses.replace(seal, pieces=(dataclasses.replace(seal.pieces[0], box=box),)))
    with pytest.raises(WeightsError, match=f"version 0, w.*{message}"):
        bed.directory.seal(bed.push(key, 1))
    assert bed.directory.latest() == -1


def test_processes_that_disagree_are_refused(bed: Bed):
    key = bed.directory.open(0, "trainer", 2)
    bed.directory.seal(bed.push(key, 0, mark="f"))
    with pytest.raises(WeightsError, match="trainer processes 0 and 1 have other tensors or contents"):
        bed.directory.seal(bed.push(key, 1, mark="g"))


def test_another_trainer_ends_the_attempts_of_the_one_before(bed: Bed):
    old = bed.directory.open(0, "trainer", 2)
    bed.directory.seal(bed.push(old, 0))
    new = bed.directory.open(0, "its successor", 2)
    with pytest.raises(AttemptOver):
        bed.directory.seal(bed.push(old, 1))
    for process in range(2):
        bed.directory.seal(bed.push(new, process))
    assert bed.directory.manifest(0).key == new
    assert bed.keys() == [new]  # what the dead one left has been swept away


def test_a_shard_that_was_restarted_during_a_push_ends_the_attempt(bed: Bed):
    key = bed.directory.open(0, "trainer", 2)
    bed.directory.seal(bed.push(key, 0))
    bed.directory._shards[0] = bed.shards[0] = Holder(PieceStore())
    assert bed.directory.outcome(key) == [1]
    with pytest.raises(AttemptOver, match="data shard 0"):
        bed.directory.seal(bed.push(key, 1))
    assert bed.directory.outcome(key) is False  # as process 0 finds, which has sealed
    assert bed.directory.versions() == []
    again = bed.directory.open(0, "trainer", 2)
    for process in range(2):
        bed.directory.seal(bed.push(again, process))
    assert bed.directory.versions() == [0]


class Slow(Holder):
    """A shard that takes its time to say who it is, once it is told to."""

    def __init__(self) -> None:
        super().__init__(PieceStore())
        self.asked, self.answer = threading.Event(), threading.Event()
        self.answer.set()

    def incarnation(self) -> str:
        self.asked.set()
        assert self.answer.wait(60)
        return super().incarnation()


def test_while_the_last_seal_is_looked_at_nobody_is_told_that_it_came_to_nothing(bed: Bed):
    bed.directory._shards[0] = bed.shards[0] = slow = Slow()
    key = bed.directory.open(0, "trainer", 2)
    bed.directory.seal(bed.push(key, 0))
    seal = bed.push(key, 1)
    slow.asked.clear()
    slow.answer.clear()
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(bed.directory.seal, seal)
        assert slow.asked.wait(60)
        assert bed.directory.outcome(key, 0.01) == []  # process 0 waits on, instead of making another attempt
        slow.answer.set()
        assert last.result()
    assert bed.directory.outcome(key) is True


def test_versions_with_pieces_on_a_shard_that_was_restarted_are_lost_and_may_come_again(bed: Bed):
    bed.publish(0)
    bed.publish(1)
    bed.directory._shards[1] = bed.shards[1] = Holder(PieceStore())
    assert bed.directory.versions() == []
    bed.publish(0)
    bed.publish(1)
    assert bed.directory.versions() == [0, 1]
    with pytest.raises(WeightsError, match="version 1 was published before"):
        bed.publish(1, mark="other")  # lost or not, a number stands for one content


def test_what_is_published_twice_is_held_once(bed: Bed):
    bed.publish(0)
    first = bed.directory.manifest(0).key
    bed.publish(0)
    assert bed.directory.manifest(0).key == first
    assert bed.keys() == [first]


def test_newer_returns_as_soon_as_there_is_one_and_else_what_there_is(bed: Bed):
    bed.publish(0)
    assert bed.directory.newer(-1, timeout=60) == 0
    assert bed.directory.newer(0, timeout=0.01) == 0
