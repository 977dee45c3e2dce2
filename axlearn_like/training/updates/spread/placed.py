"""The places of experts during a run: counts that they follow from, the map in force, and the experts that move."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from axlearn_like.elastic.channel import Address
from axlearn_like.elastic.experts import ExpertMap, Key, SpreadExperts, place_experts, transfers
from axlearn_like.elastic.member import Member, Message
from axlearn_like.elastic.membership import Membership
from axlearn_like.run.events import EventLog
from mesh.errors import UserError


@dataclasses.dataclass
class ExpertCounts:
    """Rows of experts, int64 [layers, experts]: those of the last period, and of the updates since."""

    before: np.ndarray
    since: np.ndarray
    updates: int = 0
    period: int = 0

    @property
    def loads(self) -> np.ndarray:
        """The counts that a plan is made from."""
        return self.before if self.updates == 0 else self.before + self.since

    def add(self, rows: np.ndarray, every: int) -> "ExpertCounts":
        """Return the counts after an update; a period has `every`."""
        since, updates = self.since + rows, self.updates + 1
        if updates < every:
            return ExpertCounts(self.before, since, updates, self.period)
        return ExpertCounts(since, np.zeros_like(since), 0, self.period + 1)


class ExpertPlaces:
    """The map in force, which is that of the newest update, and the experts of this member."""

    def __init__(self, cfg: SpreadExperts.Config, shape: tuple[int, int], member: Member | None, events: EventLog):
        """Begin with all experts on every member that has a state.

        Args:
            cfg: slots, and how many copies.
            shape: number of layers, and of experts of each.
            member: this process; None: it is alone.
            events: receives `experts_placed`, `experts_awaited` and `experts_lost`.
        """
        self._cfg, self._shape, self._member, self._events = cfg, shape, member, events
        self.map: ExpertMap | None = None
        self.counts = ExpertCounts(np.ones(shape, np.int64), np.zeros(shape, np.int64))
        self._told: dict[str, Any] | None = None  # fields of an event, which is logged with its update

    def have(self, view: Membership) -> dict[Key, list[int]]:
        """Return the places, in a view, of the members that have the newest state of each expert."""
        if self.map is not None and self.map.addresses == tuple(member.address for member in view.members):
            return self.map.holders()  # newcomers of this view included
        first = view.newest is None  # all have begun together
        stated = [place for place, member in enumerate(view.members) if first or member.step is not None]
        keys = np.ndindex(*self._shape)
        if self.map is None:
            return dict.fromkeys(keys, stated)
        here: dict[Address, int] = {view.members[place].address: place for place in stated}
        places = [here.get(address) for address in self.map.addresses]
        return {
            key: sorted(place for at in held if (place := places[at]) is not None)
            for key, held in self.map.holders().items()
        }

    def settled(
        self, view: Membership, step: int, experts: Mapping[Key, Any], place: Any
    ) -> tuple[ExpertMap, dict[Key, Any]]:
        """Return the map of an update, and the experts that this member has by it, from others' memory if need be.

        Args:
            view: the members.
            step: the update.
            experts: those that it has by the map in force.
            place: function from a tree or its arrays in host memory to the tree on this member's devices.

        Raises:
            Changed: a member is gone, or has come. UserError: no member has an expert any more.
        """
        addresses = tuple(member.address for member in view.members)
        if self.map is not None and (self.map.addresses, self.map.period) == (addresses, self.counts.period):
            return self.map, dict(experts)
        have, count = self.have(view), len(addresses)
        if lost := sorted(key for key, places in have.items() if not places):
            names = ", ".join(f"{expert} of layer {layer}" for layer, expert in lost[:3])
            self._events.append("trainer", "experts_lost", step=step - 1, experts=lost, members=count)
            raise UserError(f"all members that had expert {names} are lost; the run goes on from its checkpoint")
        copies = self._cfg.held_copies(self._shape[1], count)
        if copies == 0 and self._member is not None:
            self._events.append("trainer", "experts_awaited", members=count, slots=self._cfg.slots)
            self._member.await_change(view)
        slots, counts = max(self._cfg.slots, -(-self._shape[1] // count)), self.counts
        wanted = place_experts(counts.loads, addresses, slots, max(copies, 1), have, counts.period)
        moves = transfers(have, wanted.holders())
        arrived = self._moved(view, step, moves, experts) if moves else {}
        me = view.position(self._member.index) if self._member is not None else 0
        mine = [key for key, places in wanted.holders().items() if me in places]
        self._told = {
            "step": step,
            "members": count,
            "copies": max(copies, 1),
            "copies_wanted": self._cfg.copies,
            "moves": sum(map(len, moves.values())),
            "busiest_to_mean": round(wanted.plan.busiest_to_mean(counts.loads), 4),
            "most_copies": max(map(len, wanted.holders().values())),
        }
        return wanted, {key: place(arrived.get(key, experts.get(key))) for key in mine}

    def completed(self, used: ExpertMap, rows: np.ndarray) -> None:
        """Take over the map of an update that is made, and its counts."""
        self.map, self.counts = used, self.counts.add(rows, self._cfg.every)
        if self._told is not None:
            self._events.append("trainer", "experts_placed", **self._told)
            self._told = None

    def to_json(self) -> dict[str, Any]:
        """Return what `restore` takes."""
        counts = {"before": self.counts.before.tolist(), "since": self.counts.since.tolist()}
        counts |= {"updates": self.counts.updates, "period": self.counts.period}
        return {"map": None if self.map is None else self.map.to_json(), "counts": counts}

    def restore(self, row: Mapping[str, Any]) -> None:
        """Take over the map and the counts of another member."""
        counts = row["counts"]
        before, since = (np.asarray(counts[name], np.int64) for name in ("before", "since"))
        self.counts = ExpertCounts(before, since, counts["updates"], counts["period"])
        self.map = None if row["map"] is None else ExpertMap.from_json(row["map"])
        self._told = None

    def _moved(
        self, view: Membership, step: int, moves: Mapping[tuple[int, int], list[Key]], experts: Mapping[Key, Any]
    ) -> dict[Key, list[np.ndarray]]:
        """Return the experts that others have sent to this member, as their arrays."""
        member = self._member
        assert member is not None, "one that is alone has all experts"
        me = view.position(member.index)
        out: list[Message] = []
        for receiver in range(len(view.members)):
            keys = moves.get((me, receiver), [])
            arrays = [np.asarray(leaf) for key in keys for leaf in jax.tree.leaves(experts[key])]
            out.append(({"keys": keys}, arrays))
        found: dict[Key, list[np.ndarray]] = {}
        for header, arrays in member.exchange(view, step, "experts", out):
            each = len(arrays) // max(1, len(header["keys"]))
            for number, (layer, expert) in enumerate(header["keys"]):
                found[layer, expert] = arrays[number * each : (number + 1) * each]
        member.fetched([array for arrays in found.values() for array in arrays])
        return found
