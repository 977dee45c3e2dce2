"""The waits of workers and of the trainer: what they are told, and how they end."""

import threading
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from mesh import UserError
from rl.protocol.timeouts import Timeouts
from tests.rl.controller.scripted import (
    Clock,
    drain,
    ids,
    make,
    scored,
)


def test_all_waits_end_at_stop():
    controller = make(clock=None)
    controller.begin(0, 0)
    drain(controller)
    results: list[Any] = []
    waits = [
        threading.Thread(target=lambda: results.append(controller.lease("a", timeout=1e6))),
        threading.Thread(target=lambda: results.append(controller.next_batch(0, timeout=1e6))),
    ]
    for thread in waits:
        thread.start()
    controller.stop()
    for thread in waits:
        thread.join(20)
    assert results == [None, None]
    assert controller.status()["stopped"]
    controller.release("w", "gone")
    assert controller.lease("a") is None  # free, but the run is over


def test_a_waiting_trainer_gets_the_batch_when_the_last_group_arrives():
    controller = make()
    controller.begin(0, 0)
    first, second = drain(controller)
    controller.submit(second.id, scored(second))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(controller.next_batch(0, timeout=1e6)))
    thread.start()
    assert controller.missing(0) == "work item 0 (leased by w, 0 s since the lease)"
    controller.submit(first.id, scored(first))
    thread.join(20)
    assert [group.prompt.id for group in found[0]] == ids(first) + ids(second)


def test_a_waiting_worker_gets_a_lease_when_the_version_it_needs_is_published():
    controller = make()
    controller.begin(0, 0)
    for lease in drain(controller):
        controller.submit(lease.id, scored(lease))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(controller.lease("w", timeout=1e6)))
    thread.start()
    assert controller.next_batch(0) is not None
    controller.consumed(0)
    controller.published(1)
    thread.join(20)
    assert (found[0].step, found[0].version) == (1, 1)


def test_a_long_wait_is_logged_with_what_is_missing_and_again_when_it_has_doubled(tmp_path: Path):
    clock, events = Clock(), EventLog(tmp_path / "events.jsonl")
    controller = make(clock, events, timeouts=Timeouts.Config(warn_after=10.0, batch=100.0), lease_seconds=1000.0)
    controller.begin(0, 0)
    leases = drain(controller, "anna")
    for _ in range(50):
        assert controller.next_batch(0) is None and controller.lease("bert") is None
        clock.now += 1.0
    rows = [row for row in read_rows(events.path) if row["event"] == "waiting"]
    assert [(row["who"], row["seconds"]) for row in rows] == [
        (who, seconds) for seconds in (10.0, 20.0, 40.0) for who in ("trainer", "bert")
    ]
    wait = "work item {} (leased by anna, 20 s since the lease)"
    assert rows[2]["what"] == f"batch 0: {wait.format(0)}, {wait.format(1)}"
    assert rows[3]["what"] == "a lease: all of version 0 are granted, the next come with version 1"
    assert controller.submit(leases[0].id, scored(leases[0]))
    clock.now += 51.0
    with pytest.raises(
        UserError, match=r"trainer has waited 101 s .timeouts.batch=100. for batch 0: work item 1 .leased"
    ):
        controller.next_batch(0)
    assert controller.submit(leases[1].id, scored(leases[1]))
    assert controller.next_batch(0) is not None
    controller.consumed(0)
    controller.published(1)
    assert controller.next_batch(1) is None  # another wait, with a timeouts of its own
