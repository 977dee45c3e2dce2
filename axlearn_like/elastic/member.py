"""A member's side of an elastic run: its view of who is there, sums with the others, and states that they send."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from axlearn_like.elastic.channel import FAILURES, Address, Channel, Listener, connect
from axlearn_like.elastic.membership import MemberEntry, Membership
from axlearn_like.elastic.parts import Node, fold
from mesh.errors import UserError

_CONNECT = 10.0  # seconds for another process of the run to take a connection
_BEAT = 1.0  # seconds between signs of life


class Changed(Exception):
    """Signal of a change of the members: what is under way is to be begun again."""


Message = tuple[dict[str, Any], list[np.ndarray]]  # header and arrays


class OfferedState(NamedTuple):
    """A state as members send it: arrays, in the order of the leaves, and what JSON holds."""

    arrays: list[np.ndarray]
    extras: dict[str, Any]


class Member:
    """One process of an elastic run, as the others see it.

    Attributes:
        view: the view in force, which may be about to change.
        over: True once all members have ended.
    """

    def __init__(self, index: int, coordinator: Address, key: bytes, *, patience: float = 60.0):
        """Connect to the coordinator, but do not take part yet.

        Args:
            index: index of this process.
            coordinator: address of the coordinator.
            key: key of the run.
            patience: seconds for another member to do what it is waited for, before it is reported.
        """
        self.index, self._key, self._patience = index, key, patience
        self._condition = threading.Condition()
        self._epoch, self.view = 0, Membership(-1, ())  # apart: there is a change to agree on
        self._mail: dict[tuple[Any, ...], Message] = {}
        self._offer: tuple[int, OfferedState] | None = None
        self.over = self._cut_off = False
        self._peers: dict[Address, Channel] = {}
        self._listener = Listener(key, self._serve)
        self._control = connect(coordinator, key, timeout=_CONNECT)

    def join(self) -> None:
        """Come to the others, as one without a state; all programs should be compiled by now."""
        self._tell("join", index=self.index, address=self._listener.address)
        for target in (self._listen, self._beat):
            threading.Thread(target=target, name=f"elastic{target.__name__}", daemon=True).start()

    def is_leader(self) -> bool:
        """True in the member that writes logs and checkpoints."""
        return bool(self.view.members) and self.view.members[0].index == self.index

    def ends_after(self, step: int) -> bool:
        """Return True if the run is to end with the state after so many updates."""
        return self.view.stop and (self.view.last is None or step >= self.view.last)

    @property
    def changed(self) -> bool:
        """True if the view in force is to be agreed on again."""
        return self._epoch != self.view.epoch

    def agree(self, step: int | None, offer: Callable[[], OfferedState] | None = None) -> Membership:
        """Return the view in force; after a change the new one, which all have agreed on.

        Args:
            step: updates that this member's state has; None: it has none.
            offer: returns that state; called if others need it.
        """
        while self.changed:
            with self._condition:
                epoch = self._epoch
            self._tell("ready", epoch=epoch, step=step)
            with self._condition:
                self._wait(lambda epoch=epoch: self.view.epoch == epoch or self._epoch != epoch, None)
                self._mail = {key: message for key, message in self._mail.items() if key[0] >= self.view.epoch}
            view = self.view
            behind = view.epoch == epoch and len(view.sources) < len(view.members)
            if offer is not None and behind and step == view.newest:
                sent = offer()
                with self._condition:
                    self._offer = (epoch, sent)
                    self._condition.notify_all()
        return self.view

    def sum(
        self, view: Membership, step: int, have: dict[Node, tuple[np.ndarray, Any]], add: Callable[[Any, Any], Any]
    ) -> tuple[np.ndarray, Any]:
        """Return the sum over all parts of a batch, of a vector and of metrics.

        Each member adds up one piece of the vector for all, in the order of the tree.

        Args:
            view: the view that the parts were shared by.
            step: the update.
            have: this member's sums, node -> (float32 vector, list of arrays).
            add: adds two lists of arrays.

        Raises:
            Changed: a member is gone, or has come.
        """
        count, mine = len(view.members), view.position(self.index)
        length = len(next(iter(have.values()))[0])
        bounds = [length * n // count for n in range(count + 1)]
        pieces = [slice(*bounds[n : n + 2]) for n in range(count)]
        others = [(n, place) for n, place in enumerate(view.members) if n != mine]
        for n, place in others:
            arrays = [array for vector, metrics in have.values() for array in (vector[pieces[n]], *metrics)]
            self._send(view, place, {"kind": "parts", "step": step, "nodes": list(have)}, arrays)
        vectors = {node: vector[pieces[mine]] for node, (vector, _) in have.items()}
        scalars = {node: metrics for node, (_, metrics) in have.items()}
        for _, place in others:
            header, arrays = self.take(view, step, "parts", place)
            each = len(arrays) // len(header["nodes"])
            for number, node in enumerate(map(tuple, header["nodes"])):
                vectors[node], *scalars[node] = arrays[number * each : (number + 1) * each]
        total = np.empty(length, np.float32)
        root = (0, max(last for _, last in scalars))
        total[pieces[mine]] = fold(root, vectors, np.add)
        for _, place in others:
            self._send(view, place, {"kind": "sum", "step": step}, [total[pieces[mine]]])
        for n, place in others:
            total[pieces[n]] = self.take(view, step, "sum", place)[1][0]
        return total, fold(root, scalars, add)

    def completed(self, step: int) -> None:
        """Tell that an update is made: nobody needs the state before it any more."""
        self._offer = None
        self._tell("step", epoch=self.view.epoch, step=step)

    def fetch(self, view: Membership) -> OfferedState:
        """Return the newest state, from all members that have it, each a part of its arrays.

        Raises:
            Changed: a member is gone, or has come.
        """
        sources = view.sources
        shares: list[list[np.ndarray]] = []
        extras: dict[str, Any] = {}
        try:
            channels = [self._peer(place) for place in sources]
            for number, channel in enumerate(channels):
                channel.send({"kind": "fetch", "epoch": view.epoch, "first": number, "of": len(sources)})
            for channel in channels:
                header, share = channel.receive()
                shares.append(share)
                extras = header["extras"] or extras
        except FAILURES:
            self._peers.clear()
            self.await_change(view)
        arrays: list[Any] = [None] * sum(map(len, shares))
        for number, share in enumerate(shares):
            arrays[number :: len(sources)] = share
        self.fetched(arrays)
        return OfferedState(arrays, extras)

    def fetched(self, arrays: Sequence[np.ndarray]) -> None:
        """Tell of arrays that have come from the memory of others."""
        self._tell("fetched", bytes=sum(array.nbytes for array in arrays))

    def exchange(self, view: Membership, step: int, kind: str, out: Sequence[Message]) -> list[Message]:
        """Return the messages of this kind from all members, for one to each, in the order of the view.

        Raises:
            Changed: a member is gone, or has come.
        """
        mine = view.position(self.index)
        for n, place in enumerate(view.members):
            if n != mine:
                self.push(view, step, kind, place, out[n])
        return [out[n] if n == mine else self.take(view, step, kind, place) for n, place in enumerate(view.members)]

    def push(self, view: Membership, step: int, kind: str, place: MemberEntry, message: Message) -> None:
        """Send a message to one member, which may take it (Changed: see `exchange`)."""
        self._send(view, place, {**message[0], "kind": kind, "step": step}, message[1])

    def finish(self) -> None:
        """Tell that this member has ended, if it has not since the last change."""
        self._tell("done")

    def wait(self, seconds: float) -> None:
        """Wait until something changes, or for so many seconds."""
        with self._condition:
            self._wait(lambda: self.changed or self.over, seconds)

    def close(self) -> None:
        """Leave; the others go on."""
        self._listener.close()
        for channel in (self._control, *self._peers.values()):
            channel.cut()

    def _tell(self, kind: str, **fields: Any) -> None:
        try:
            self._control.send({"kind": kind, **fields})
        except FAILURES:
            self._cut_off = True

    def _listen(self) -> None:
        try:
            while True:
                message, _ = self._control.receive()
                with self._condition:
                    if message["kind"] == "changed":
                        self._epoch = max(self._epoch, message["epoch"])
                    elif message["kind"] == "view":
                        self.view = Membership.from_json(message["view"])
                    else:
                        self.over = True
                    self._condition.notify_all()
        except FAILURES:
            with self._condition:
                self._cut_off = True
                self._condition.notify_all()

    def _beat(self) -> None:
        while not self._cut_off:
            self._tell("alive")
            time.sleep(_BEAT)

    def _serve(self, channel: Channel) -> None:
        while True:
            header, arrays = channel.receive()
            if header["kind"] == "fetch":
                self._send_state(channel, header)
                continue
            with self._condition:
                if header["epoch"] >= self.view.epoch:
                    key = (header["epoch"], header["step"], header["kind"], header["index"])
                    self._mail[key] = (header, arrays)
                    self._condition.notify_all()

    def _send_state(self, channel: Channel, header: dict[str, Any]) -> None:
        epoch = header["epoch"]
        with self._condition:
            self._condition.wait_for(
                lambda: self._epoch != epoch or (self._offer is not None and self._offer[0] == epoch)
            )
            offer = self._offer
        if offer is None or offer[0] != epoch:
            channel.cut()  # a refusal: the other one asks again after the change
            return
        first, sent = header["first"], offer[1]
        channel.send({"kind": "state", "extras": None if first else sent.extras}, sent.arrays[first :: header["of"]])

    def _peer(self, place: MemberEntry) -> Channel:
        if place.address not in self._peers:
            self._peers[place.address] = connect(place.address, self._key, timeout=_CONNECT)
        return self._peers[place.address]

    def _send(self, view: Membership, place: MemberEntry, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        if self.changed:
            raise Changed
        try:
            self._peer(place).send({**header, "epoch": view.epoch, "index": self.index}, arrays)
        except FAILURES:
            self._peers.pop(place.address, None)
            self.await_change(view, place)

    def take(self, view: Membership, step: int, kind: str, place: MemberEntry) -> Message:
        """Return such a message from a member (Changed: see `exchange`)."""
        key = (view.epoch, step, kind, place.index)
        with self._condition:
            there = self._wait(lambda: key in self._mail or self.changed, self._patience)
            if key in self._mail:
                return self._mail.pop(key)
        self.await_change(view, None if there else place)
        raise Changed

    def await_change(self, view: Membership, suspect: MemberEntry | None = None) -> NoReturn:
        """Wait for the change that a failure belongs to, and raise Changed; without one the suspect is excluded."""
        with self._condition:
            changed = self._wait(lambda: self._epoch != view.epoch, 1.0)
        if not changed and suspect is not None:
            self._tell("suspect", epoch=view.epoch, index=suspect.index)
        with self._condition:
            self._wait(lambda: self._epoch != view.epoch, None)
        raise Changed

    def _wait(self, there: Callable[[], bool], seconds: float | None) -> bool:
        """Wait, with the condition held, until something is there."""
        found = self._condition.wait_for(lambda: there() or self._cut_off, seconds)
        if self._cut_off:
            raise UserError("the process that started this member of an elastic run is gone; the same command resumes")
        return found
