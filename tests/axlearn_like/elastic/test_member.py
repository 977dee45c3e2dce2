"""Members in threads of one process: the protocol of sums, losses, fetched states and ends."""

import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.elastic.channel import FAILURES, Channel, Listener, connect
from axlearn_like.elastic.coordinator import Coordinator
from axlearn_like.elastic.member import Changed, Member, OfferedState
from axlearn_like.elastic.membership import MemberTimeouts
from axlearn_like.elastic.parts import fold, nodes, share
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows

KEY = b"key"
PARTS, LENGTH, STEPS = 6, 23, 30


def gradient(state: np.ndarray, part: int, step: int) -> np.ndarray:
    scale = np.float32(10.0**part)
    return (np.sin(state * np.float32(1 + part) + np.float32(step)) * scale).astype(np.float32)


def updated(state: np.ndarray, total: np.ndarray) -> np.ndarray:
    return (state * np.float32(0.9) + total * np.float32(1e-6)).astype(np.float32)


def leaf_of(state: np.ndarray, step: int) -> Any:
    return lambda node: (gradient(state, node[0], step), []) if node[1] - node[0] == 1 else None


def add(one: Any, other: Any) -> Any:
    return one[0] + other[0], []


def undisturbed() -> np.ndarray:
    state = np.zeros(LENGTH, np.float32)
    for step in range(1, STEPS + 1):
        state = updated(state, fold((0, PARTS), leaf_of(state, step), add)[0])
    return state


class Run:
    """Members of a run, each a thread; one that is to fail leaves without a word."""

    def __init__(self, expected: int, folder: Path):
        self.log = EventLog(folder / "events.jsonl")
        self.coordinator = Coordinator(expected, KEY, self.log, MemberTimeouts(silence=60.0))
        self.states: dict[int, np.ndarray] = {}
        self.waiting = threading.Event()  # set: those that have come to step 15 go on
        self.threads: list[threading.Thread] = []

    def start(self, index: int, fail: tuple[str, int] | None = None) -> None:
        self.threads.append(threading.Thread(target=self.train, args=(index, fail), daemon=True))
        self.threads[-1].start()

    def train(self, index: int, fail: tuple[str, int] | None) -> None:
        member = Member(index, self.coordinator.address, KEY, patience=30.0)
        member.join()
        step, state = 0, np.zeros(LENGTH, np.float32)
        view = member.agree(None)
        if view.newest is not None:
            sent = member.fetch(view)
            step, state = sent.extras["step"], sent.arrays[0]
        while step < STEPS:
            if step == 15:
                self.waiting.wait(30.0)
            offer = lambda step=step, state=state: OfferedState([state], {"step": step})  # noqa: E731
            if fail == ("border", step):
                return member.close()
            view = member.agree(step, offer)
            try:
                if view.newest is not None and view.newest > step:
                    sent = member.fetch(view)
                    step, state = sent.extras["step"], sent.arrays[0]
                    continue
                mine = share(PARTS, view.position(index), len(view.members))
                have = {node: fold(node, leaf_of(state, step + 1), add) for node in nodes(PARTS, mine)}
                if fail == ("sum", step):  # the others have some of it
                    peer = next(place for place in view.members if place.index != index)
                    arrays = [vector[:1] for vector, _ in have.values()]
                    member._send(view, peer, {"kind": "parts", "step": step + 1, "nodes": list(have)}, arrays)
                    return member.close()
                state = updated(state, member.sum(view, step + 1, have, lambda one, other: one)[0])
                step += 1
                member.completed(step)
            except Changed:
                continue
        self.states[index] = state
        while not member.over:
            member.agree(step, lambda: OfferedState([state], {"step": step}))
            member.finish()
            member.wait(1.0)
        return None

    def end(self) -> list[dict[str, Any]]:
        for thread in self.threads:
            thread.join(60.0)
            assert not thread.is_alive()
        return read_rows(self.log.path)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["border", "sum"])
@pytest.mark.parametrize("index", [0, 2])
def test_what_remains_goes_on_and_who_comes_back_has_the_state_of_the_others(tmp_path: Path, point: str, index: int):
    run = Run(3, tmp_path)
    for each in range(3):
        run.start(each, (point, 7) if each == index else None)
    while len(read_rows(run.log.path)) < 2:
        run.threads[index].join(0.05)
    run.start(index)
    while index not in run.coordinator._members:  # else the others may end before it comes
        run.threads[-1].join(0.01)
    run.waiting.set()
    resized = run.end()
    for state in run.states.values():
        np.testing.assert_array_equal(state, undisturbed())
    assert sorted(run.states) == [0, 1, 2]
    assert [(row["members_before"], row["members"]) for row in resized] == [(0, 3), (3, 2), (2, 3)]
    assert [row["steps_lost"] for row in resized] == [0, 0, 0]
    # A survivor that lacks a sum which the other already had takes one state from it.
    assert resized[1]["bytes"] <= resized[2]["bytes"] and resized[2]["bytes"] >= 4 * LENGTH


def test_a_silent_member_is_excluded_and_a_stopped_run_ends_at_one_update(tmp_path: Path):
    log = EventLog(tmp_path / "events.jsonl")
    gone: list[int] = []
    coordinator = Coordinator(2, KEY, log, MemberTimeouts(silence=1.5, patience=2.0), dropped=gone.append)
    member, silent = (Member(index, coordinator.address, KEY) for index in (0, 1))
    member.join()
    silent._tell("join", index=1, address=silent._listener.address)  # and no sign of life
    view = member.agree(None)
    assert [place.index for place in view.members] == [0] and gone == [1]
    coordinator.stop()
    member.wait(5.0)
    assert member.agree(3).stop and [member.ends_after(step) for step in (3, 4)] == [False, True]
    member.finish()
    member.wait(5.0)
    assert member.over and coordinator.over.is_set()


def test_a_stop_that_finds_members_at_different_updates_ends_all_after_the_same_one(tmp_path: Path):
    coordinator = Coordinator(2, KEY, EventLog(tmp_path / "events.jsonl"), MemberTimeouts(silence=60.0))
    members = [Member(index, coordinator.address, KEY) for index in (0, 1)]
    for member in members:
        member.join()

    def agree(*steps: int | None) -> None:
        def one(member: Member, step: int | None) -> None:
            while not member.changed:
                member.wait(1.0)
            member.agree(step)

        threads = [threading.Thread(target=one, args=each) for each in zip(members, steps, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
            assert not thread.is_alive()

    agree(None, None)
    coordinator.stop()
    agree(8, 7)  # the second has not made the update that the first has, whose state it fetches
    assert [member.ends_after(8) for member in members] == [False, False]
    assert [member.ends_after(9) for member in members] == [True, True]
    coordinator._change()  # such as a loss while the last update is made: some have made it
    agree(9, 8)
    assert [member.ends_after(step) for member in members for step in (8, 9)] == [False, True] * 2


def test_a_stop_before_there_is_a_state_ends_all_with_the_checkpoint(tmp_path: Path):
    coordinator = Coordinator(1, KEY, EventLog(tmp_path / "events.jsonl"), MemberTimeouts(silence=60.0))
    member = Member(0, coordinator.address, KEY)
    member.join()
    coordinator.stop()
    assert member.agree(None).stop and member.ends_after(0)
    coordinator._change()
    while not member.changed:
        member.wait(1.0)
    assert member.agree(7).stop and member.ends_after(7)


def test_a_stranger_is_heard_by_nobody():
    heard: list[Any] = []
    listener = Listener(KEY, lambda channel: heard.append(channel.receive()))
    with pytest.raises((*FAILURES, Exception), match="digest"):
        connect(listener.address, b"guess", timeout=5.0)
    honest = connect(listener.address, KEY, timeout=5.0)
    values = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 4), np.int8)]
    there = threading.Event()

    def answer(channel: Channel) -> None:
        channel.send(*channel.receive())
        there.wait(5.0)

    echo = Listener(KEY, answer)
    channel: Channel = connect(echo.address, KEY, timeout=5.0)
    channel.send({"kind": "x"}, values)
    header, arrays = channel.receive()
    there.set()
    assert header == {"kind": "x"}
    for array, value in zip(arrays, values, strict=True):
        np.testing.assert_array_equal(array, value)
    assert heard == []
    honest.cut()


def test_a_stranger_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("axlearn_like.elastic.channel._PROOF", 1)
    listener = Listener(KEY, lambda channel: None)
    with socket.create_connection(listener.address, timeout=20.0) as silent:
        while silent.recv(1 << 10):  # the challenge, and then the end
            pass
    slow = threading.Event()
    served = Listener(KEY, lambda channel: channel.send(channel.receive()[0]) or slow.set())
    channel = connect(served.address, KEY, timeout=5.0)
    assert not slow.wait(2.0)  # one that has proved the key may be silent for longer
    channel.send({"kind": "late"})
    assert channel.receive()[0] == {"kind": "late"}
