"""A version is published whole or not at all, whatever becomes of those who push it and of those who hold it."""

import dataclasses
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rl.parameter_server.broadcast import BroadcastScheduler
from rl.parameter_server.directory import Directory
from rl.parameter_server.errors import PublishAborted, WeightsError
from rl.parameter_server.fingerprint import digest_of
from rl.parameter_server.index_ranges import IndexRange
from rl.parameter_server.manifest import Commit, Shard, TensorSpec, commit_from_text, manifest_from_text, to_text
from rl.parameter_server.store.pending_deltas import PendingDeltas
from rl.parameter_server.store.shard_server import LocalShardServer
from rl.parameter_server.store.shard_store import ShardStore

LEFT: IndexRange = ((0, 2), (0, 4))
RIGHT: IndexRange = ((2, 6), (0, 4))
ARRAY = np.arange(24, dtype=np.float32).reshape(6, 4)


class Bed:
    """A directory over two shard servers, and two trainer processes that push a half each."""

    def __init__(self, keep: int = 2, sweep_delay: float = 0.0):
        self.servers = [LocalShardServer(ShardStore()) for _ in range(2)]
        self.directory = Directory(self.servers, keep=keep, broadcast=BroadcastScheduler(), sweep_delay=sweep_delay)

    def push(
        self, key: int, process: int, *, version: int = 0, index_range: IndexRange | None = None, mark: str = "f"
    ) -> Commit:
        index_range = index_range or (LEFT, RIGHT)[process]
        array = ARRAY[index_range[0][0] : index_range[0][1]]
        self.servers[process].write(key, [("w", index_range, array, digest_of(array))])
        return Commit(
            version=version,
            key=key,
            process=process,
            processes=2,
            tensors=(TensorSpec("w", (6, 4), "float32"),),
            shards=(Shard("w", index_range, process),),
            fingerprints={"w": mark},
            incarnations={process: self.servers[process].incarnation()},
        )

    def publish(self, version: int, mark: str = "f") -> None:
        key = self.directory.open(version, "trainer", 2)
        assert [self.directory.commit(self.push(key, p, version=version, mark=mark)) for p in range(2)] == [False, True]

    def keys(self) -> Sequence[int]:
        return self.servers[0].store.versions()


@pytest.fixture
def bed() -> Bed:
    return Bed()


def test_the_last_commit_publishes(bed: Bed):
    key = bed.directory.open(0, "trainer", 2)
    assert bed.directory.open(0, "trainer", 2) == key  # its processes shard_set it
    assert not bed.directory.commit(bed.push(key, 1))
    assert bed.directory.versions() == []
    assert bed.directory.outcome(key) == [0]
    assert bed.directory.commit(bed.push(key, 0))
    assert bed.directory.outcome(key) is True
    manifest = bed.directory.manifest(0)
    assert {(shard.index_range, shard.server) for shard in manifest.shards} == {(LEFT, 0), (RIGHT, 1)}
    assert manifest_from_text(to_text(manifest)) == manifest


def test_commits_survive_their_way_over_the_wire(bed: Bed):
    commit = bed.push(5, 1)
    assert commit_from_text(to_text(commit)) == commit


def test_manifests_offloaded_when_shards_had_digests_are_read(bed: Bed):
    bed.publish(0)
    manifest = bed.directory.manifest(0)
    raw = json.loads(to_text(manifest))
    for shard in raw["shards"]:
        shard["digest"] = "d" * 32
    assert manifest_from_text(json.dumps(raw)) == manifest


@pytest.mark.parametrize(
    "index_range, message",
    [
        (((0, 1), (0, 4)), "no shard holds"),
        (((0, 3), (0, 4)), "overlap"),
        (((0, 9), (0, 4)), "is outside its shape"),
    ],
)
def test_shards_that_do_not_make_up_the_tensors_are_refused(bed: Bed, index_range: IndexRange, message: str):
    key = bed.directory.open(0, "trainer", 2)
    commit = bed.push(key, 0)
    bed.directory.commit(
        dataclasses.replace(commit, shards=(dataclasses.replace(commit.shards[0], index_range=index_range),))
    )
    with pytest.raises(WeightsError, match=f"version 0, w.*{message}"):
        bed.directory.commit(bed.push(key, 1))
    assert bed.directory.latest() == -1


def test_processes_that_disagree_are_refused(bed: Bed):
    key = bed.directory.open(0, "trainer", 2)
    bed.directory.commit(bed.push(key, 0, mark="f"))
    with pytest.raises(WeightsError, match="trainer processes 0 and 1 committed different tensors or contents"):
        bed.directory.commit(bed.push(key, 1, mark="g"))


def test_another_trainer_ends_the_attempts_of_the_one_before(bed: Bed):
    old = bed.directory.open(0, "trainer", 2)
    bed.directory.commit(bed.push(old, 0))
    new = bed.directory.open(0, "its successor", 2)
    with pytest.raises(PublishAborted):
        bed.directory.commit(bed.push(old, 1))
    for process in range(2):
        bed.directory.commit(bed.push(new, process))
    assert bed.directory.manifest(0).key == new
    assert bed.keys() == [new]  # what the dead one left has been swept away


def test_a_shard_that_was_restarted_during_a_push_ends_the_attempt(bed: Bed):
    key = bed.directory.open(0, "trainer", 2)
    bed.directory.commit(bed.push(key, 0))
    bed.directory._servers[0] = bed.servers[0] = LocalShardServer(ShardStore())
    assert bed.directory.outcome(key) == [1]
    with pytest.raises(PublishAborted, match="shard server 0"):
        bed.directory.commit(bed.push(key, 1))
    assert bed.directory.outcome(key) is False  # as process 0 finds, which has committed
    assert bed.directory.versions() == []
    again = bed.directory.open(0, "trainer", 2)
    for process in range(2):
        bed.directory.commit(bed.push(again, process))
    assert bed.directory.versions() == [0]


class Slow(LocalShardServer):
    """A shard server that is slow to say its incarnation, once `slow` is set."""

    def __init__(self) -> None:
        super().__init__(ShardStore())
        self.asked, self.answer = threading.Event(), threading.Event()
        self.answer.set()

    def incarnation(self) -> str:
        self.asked.set()
        assert self.answer.wait(60)
        return super().incarnation()


def test_while_the_last_commit_is_looked_at_nobody_is_told_that_it_came_to_nothing(bed: Bed):
    bed.directory._servers[0] = bed.servers[0] = slow = Slow()
    key = bed.directory.open(0, "trainer", 2)
    bed.directory.commit(bed.push(key, 0))
    commit = bed.push(key, 1)
    slow.asked.clear()
    slow.answer.clear()
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(bed.directory.commit, commit)
        assert slow.asked.wait(60)
        assert bed.directory.outcome(key, 0.01) == []  # process 0 waits on, instead of making another attempt
        slow.answer.set()
        assert last.result()
    assert bed.directory.outcome(key) is True


def test_versions_with_shards_on_a_restarted_server_are_lost_and_may_be_published_again(bed: Bed):
    bed.publish(0)
    bed.publish(1)
    bed.directory._servers[1] = bed.servers[1] = LocalShardServer(ShardStore())
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


def test_a_commit_that_is_repeated_since_its_answer_was_late_stays_published(bed: Bed):
    key = bed.directory.open(0, "trainer", 2)
    commits = [bed.push(key, process) for process in range(2)]
    assert [bed.directory.commit(commit) for commit in (*commits, *commits)] == [False, True, True, True]
    assert bed.directory.versions() == [0]
    assert bed.directory.manifest(0).key == key


def test_readers_come_before_what_a_version_has_evicted():
    bed = Bed(keep=1, sweep_delay=30.0)
    bed.publish(0)
    bed.publish(1)
    assert len(bed.keys()) == 2
    assert bed.directory.versions() == [1]


@pytest.mark.parametrize("keep", [1, 2])
def test_no_more_than_one_version_is_held_beside_those_to_keep_however_fast_they_come(keep: int):
    bed = Bed(keep=keep, sweep_delay=30.0)
    for version in range(5):
        key = bed.directory.open(version, "trainer", 2)
        assert len(bed.keys()) == min(version, keep)  # there is room for what is about to be pushed
        commits = [bed.push(key, process, version=version) for process in range(2)]
        assert len(bed.keys()) == min(version, keep) + 1
        assert [bed.directory.commit(commit) for commit in commits] == [False, True]
        assert len(bed.keys()) == min(version, keep) + 1  # readers come first


def test_pushes_that_overlap_hold_no_evicted_versions_beside_them():
    bed = Bed(keep=1, sweep_delay=30.0)
    keys = [bed.directory.open(version, "trainer", 2) for version in range(3)]
    commits = [[bed.push(key, process, version=version) for process in range(2)] for version, key in enumerate(keys)]
    held = []
    for both in commits:
        assert [bed.directory.commit(commit) for commit in both] == [False, True]
        held.append(len(bed.keys()))
    assert held == [3, 2, 2]
    assert bed.keys()[-1] == keys[-1]


def test_what_was_evicted_goes_without_another_version():
    bed = Bed(keep=1, sweep_delay=0.02)
    bed.publish(0)
    bed.publish(1)
    end = time.monotonic() + 20
    while len(bed.keys()) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(bed.keys()) == 1


def test_what_is_pushed_while_a_server_drops_older_versions_is_held(bed: Bed, monkeypatch: pytest.MonkeyPatch):
    for version in range(2):
        bed.publish(version)
    pushed: dict[int, Commit] = {}
    drop = PendingDeltas.drop  # decodes, and may take seconds

    def drop_late(self: PendingDeltas, keys: Sequence[int]) -> None:
        if not pushed:
            key = bed.directory.open(3, "trainer", 2)
            pushed.update({process: bed.push(key, process, version=3) for process in range(2)})
        drop(self, keys)

    monkeypatch.setattr(PendingDeltas, "drop", drop_late)
    bed.publish(2)
    assert [bed.directory.commit(pushed[process]) for process in range(2)] == [False, True]
    for server in bed.servers:
        assert pushed[0].key in server.store.versions()


def test_newer_returns_as_soon_as_there_is_one_and_else_what_there_is(bed: Bed):
    bed.publish(0)
    assert bed.directory.newer(-1, timeout=60) == 0
    assert bed.directory.newer(0, timeout=0.01) == 0


def test_a_pinned_version_is_held_until_another_one_is_pinned(bed: Bed):
    for version in range(1, 6):
        bed.publish(version)
        if version == 1:
            bed.directory.pin(1)
    assert bed.directory.versions() == [1, 4, 5] and len(bed.keys()) == 3
    bed.directory.pin(5)
    bed.publish(6)
    assert bed.directory.versions() == [5, 6] and len(bed.keys()) == 2
    for version in (7, 8):
        bed.publish(version)
    assert bed.directory.versions() == [5, 7, 8]
