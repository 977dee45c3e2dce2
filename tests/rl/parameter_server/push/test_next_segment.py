"""A segment is reserved ahead, and handed out once."""

import threading
import time

import pytest

from rl.parameter_server import server
from rl.parameter_server.push import next_segment
from rl.parameter_server.push.next_segment import NextSegment
from rl.parameter_server.transport.shared_memory import SharedSegment

SIZE = 1 << 16


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[SharedSegment]:
    """Segments in the order in which they were reserved."""
    made: list[SharedSegment] = []

    def create(nbytes: int) -> SharedSegment:
        made.append(SharedSegment.create(nbytes))
        return made[-1]

    monkeypatch.setattr(next_segment, "_segment", create)
    return made


def wait_for(created: list[SharedSegment], count: int) -> None:
    end = time.monotonic() + 20
    while len(created) < count and time.monotonic() < end:
        time.sleep(0.01)
    assert len(created) == count


def test_the_next_version_gets_what_was_reserved_ahead(created: list[SharedSegment]):
    source = NextSegment(delay=0.0)
    first = source.take(SIZE)
    for count in (2, 3):
        source.prepare()
        wait_for(created, count)
        assert source.take(SIZE) is created[-1]
        assert len(created) == count
    assert created[0] is first
    assert len({segment.name for segment in created}) == 3


def test_another_size_is_not_served_by_it(created: list[SharedSegment]):
    source = NextSegment(delay=0.0)
    source.take(SIZE)
    source.prepare()
    wait_for(created, 2)
    taken = source.take(2 * SIZE)
    assert taken is created[2]
    assert created[2].nbytes == 2 * SIZE
    source.prepare()
    wait_for(created, 4)
    assert created[3].nbytes == 2 * SIZE


def test_nothing_is_reserved_before_it_is_known_how_much(created: list[SharedSegment]):
    NextSegment(delay=0.0).prepare()
    time.sleep(0.05)
    assert created == []


def test_a_version_that_comes_at_once_reserves_its_own(created: list[SharedSegment]):
    source = NextSegment(delay=30.0)
    source.take(SIZE)
    source.prepare()
    assert source.take(SIZE) is created[1]
    timer = source._timer
    assert timer is not None
    timer.join(20)
    assert not timer.is_alive()  # cancelled
    assert len(created) == 2


def test_by_then_shard_servers_have_dropped_what_the_publication_has_evicted():
    # So that its memory counts as free when `_reserve` asks whether two versions fit.
    assert next_segment._DELAY >= 2 * server._SWEEP_DELAY


def test_where_memory_is_short_there_is_no_segment():
    assert NextSegment().take(1 << 60) is None


def test_none_is_reserved_ahead_unless_memory_for_two_is_free(
    created: list[SharedSegment], monkeypatch: pytest.MonkeyPatch
):
    source, free, asked = NextSegment(delay=0.0), 2 * SIZE - 1, threading.Event()

    def free_memory() -> int:
        asked.set()
        return free

    monkeypatch.setattr(next_segment, "free_memory", free_memory)
    source.take(SIZE)
    source.prepare()
    assert asked.wait(20)
    larger = source.take(2 * SIZE)  # waits for what is being reserved, which it could not use
    assert len(created) == 2 and larger is created[1]
    free = 4 * SIZE
    source.prepare()
    wait_for(created, 3)
    assert source.take(2 * SIZE) is created[2] and len(created) == 3
