"""The coordinator of an elastic run: it knows who is there, and says who takes part in the next update.

A change (a member comes, is lost, or all are to stop) has a number, its epoch. The coordinator tells it to all; each
answers at the border of its update with the step of its state; when all have, they get the view of the epoch. Another
change before that begins the same again.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from axlearn_like.elastic.channel import FAILURES, Address, Channel, Listener
from axlearn_like.elastic.membership import MemberEntry, Membership, MemberTimeouts
from axlearn_like.run.events import EventLog


class _Connected:
    """A member's connection, and what it has said."""

    def __init__(self, index: int, address: Address, channel: Channel):
        self.index, self.address, self.channel = index, address, channel
        self.step: int | None = None
        self.ready = self.done = False
        self.seen = time.monotonic()

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a few bytes; one that is gone will be noticed by its reader."""
        try:
            self.channel.send({"kind": kind, **fields})
        except FAILURES:
            self.channel.cut()


class Coordinator:
    """Membership of a run, in the process that starts its members, which holds no state of the run."""

    def __init__(
        self,
        expected: int,
        key: bytes,
        events: EventLog,
        timeouts: MemberTimeouts,
        *,
        dropped: Callable[[int], None] = lambda index: None,
    ):
        """Listen.

        Args:
            expected: members that a state is waited for with, when none has one: at the start.
            key: key of the run.
            events: receives `resized`.
            dropped: called with the index of a member that is excluded while its process may live.
        """
        self._expected, self._events, self._dropped = expected, events, dropped
        self._timeouts = timeouts
        self._members: dict[int, _Connected] = {}  # index -> member, the first that came in front
        self._lock = threading.RLock()
        self._epoch, self._stop = 0, False
        self._view, self._before = Membership(0, ()), 0
        self._began: float | None = None  # time of the first change that no update has followed yet
        self._bytes = 0  # bytes that members have fetched since then
        self._ended: dict[str, Any] | None = None  # a change that has ended, not logged yet
        self._awaited: set[int] = set()  # members that have made no update since
        self._last: int | None = None  # updates of the run as far as it is known
        self.over = threading.Event()  # set once all members have ended
        self._listener = Listener(key, self._serve)
        self.address = self._listener.address
        threading.Thread(target=self._watch, name="elastic-watch", daemon=True).start()

    def stop(self) -> None:
        """Let all members end after the next update, which is the same for all of them."""
        with self._lock:
            if not self._stop:
                self._stop = True
                self._change()

    @property
    def updates(self) -> int:
        """Updates that the members have told of."""
        with self._lock:
            return self._last or 0

    def close(self) -> None:
        """Accept no more members."""
        self.over.set()
        self._listener.close()

    def _serve(self, channel: Channel) -> None:
        hello, _ = channel.receive()
        member = _Connected(hello["index"], tuple(hello["address"]), channel)
        with self._lock:
            former = self._members.pop(member.index, None)
            if former is not None:
                former.channel.cut()
            self._members[member.index] = member
            self._change()
        try:
            while True:
                self._told(member, channel.receive()[0])
        except FAILURES:
            with self._lock:
                if self._members.get(member.index) is member:
                    del self._members[member.index]
                    self._change()

    def _told(self, member: _Connected, message: dict[str, Any]) -> None:
        with self._lock:
            member.seen, kind = time.monotonic(), message["kind"]
            if self._members.get(member.index) is not member:
                return
            if kind == "ready" and message["epoch"] == self._epoch:
                member.ready, member.step = True, message["step"]
                self._agree()
            elif kind == "step":
                self._completed(member.index, message["epoch"], message["step"])
            elif kind == "fetched":
                self._bytes += message["bytes"]
            elif kind == "suspect" and message["epoch"] == self._epoch:
                self._drop(message["index"])
            elif kind == "done":
                member.done = True
            self._end()

    def _drop(self, index: int) -> None:
        if (member := self._members.pop(index, None)) is not None:
            member.channel.cut()
            self._dropped(index)
            self._change()

    def _change(self) -> None:
        """Begin a new epoch."""
        self._log_change()
        self._epoch += 1
        self._began = self._began or time.monotonic()
        for member in list(self._members.values()):
            member.ready = member.done = False
            member.tell("changed", epoch=self._epoch)

    def _agree(self) -> None:
        """Send the view of this epoch once all are ready."""
        members = list(self._members.values())
        if not members or not all(member.ready for member in members):
            return
        waited = time.monotonic() - (self._began or 0.0)
        stateless = all(member.step is None for member in members)
        if stateless and len(members) < self._expected and waited < self._timeouts.patience and not self._stop:
            return
        places = tuple(MemberEntry(member.index, member.address, member.step) for member in members)
        view, before = Membership(self._epoch, places, self._stop), self._view
        if self._stop:
            # Some may have made an update that others lack: the last one has a number, which no later change moves.
            last = before.last if before.stop else None if view.newest is None else view.newest + 1
            view = dataclasses.replace(view, last=last)
        self._view = view
        for member in members:
            member.tell("view", view=self._view.to_json())

    def _completed(self, index: int, epoch: int, step: int) -> None:
        """Take note of an update; the first of a view ends the change, the last tells what members have fetched."""
        if epoch == self._view.epoch == self._epoch:
            if self._began is not None:
                lost = 0 if self._view.newest is not None or self._last is None else self._last - (step - 1)
                seconds, self._began = time.monotonic() - self._began, None
                sizes = {"members_before": self._before, "members": len(self._view.members)}
                self._ended = {"step": step, "seconds": round(seconds, 3), "steps_lost": lost, **sizes, "epoch": epoch}
                self._before, self._last = len(self._view.members), step
                self._awaited = {place.index for place in self._view.members}
            self._awaited.discard(index)
            if not self._awaited:
                self._log_change()
        self._last = max(self._last or 0, step)

    def _log_change(self) -> None:
        """Log the change that has ended, with the bytes that members have fetched for it."""
        if self._ended is not None:
            self._events.append("trainer", "resized", **self._ended, bytes=self._bytes)
            self._bytes, self._ended = 0, None

    def _end(self) -> None:
        if self._members and all(member.done for member in self._members.values()):
            self._log_change()
            self.over.set()
            for member in self._members.values():
                member.tell("over")

    def _watch(self) -> None:
        while not self.over.wait(0.5):
            with self._lock:
                now = time.monotonic()
                for index in [m.index for m in self._members.values() if now - m.seen > self._timeouts.silence]:
                    self._drop(index)
                if self._view.epoch < self._epoch:
                    self._agree()
