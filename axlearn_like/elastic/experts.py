"""Experts over the members of an elastic run: who holds which, who computes which rows, who sends what to whom.

Everything is a function of counts and of a view that all members have, so all make the same plan without talking.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.elastic.channel import Address
from axlearn_like.layers.moe.placement import (
    Array,
    ExpertPlan,
    allocate_groups,
    largest_remainder,
    overlapped,
    share_rows,
    slot_shares,
)

Key = tuple[int, int]  # layer, expert
LEAST_ROWS = 8  # rows of the smallest call of an expert


class SpreadExperts(Configurable):
    """Experts, with their optimizer state, that members hold a part of each; popular ones are held by several."""

    class Config(ConfigBase["SpreadExperts"]):
        slots: int = REQUIRED  # experts of a layer that a member holds
        copies: int = 2  # members that hold an expert, at least: so many less one may be lost at once
        every: int = 200  # updates after which experts are placed again, by the counts of those updates

        @override
        def check_fields(self) -> None:
            self.require_least(1, "slots", "copies", "every")

        def check_members(self, num_experts: int, members: int) -> str | None:
            """Return a warning if there is no room for all copies; ConfigError if some expert has no place."""
            least = -(-num_experts // members)
            expected = f"{least} or more: {members} members hold the {num_experts} experts of a layer"
            self.require("slots", self.slots >= least, expected)
            if (held := self.held_copies(num_experts, members)) == self.copies:
                return None
            most = min(self.copies, members)
            more = "" if held == most else f"; slots={-(-num_experts * most // members)} holds {most}"
            copies = f"{held} of {self.copies} copies of each expert"
            return (
                f"elastic.experts: {members} members with {self.slots} slots hold {copies}: a run that loses {held} at "
                f"once goes back to its checkpoint{more}"
            )

        def held_copies(self, num_experts: int, members: int) -> int:
            """Return `copies`, or as many as there are slots for; 0: not even one of each expert has a place."""
            return min(self.copies, members, members * self.slots // num_experts)


@dataclasses.dataclass(frozen=True)
class ExpertMap:
    """The members that hold and compute experts, in the order of a view.

    Attributes:
        addresses: addresses of the members: a process that has come back has another one.
        plan: slots of members in place of those of devices, -1 where one is empty.
        period: number of the counts that it was made from.
    """

    addresses: tuple[Address, ...]
    plan: ExpertPlan
    period: int

    def holders(self) -> dict[Key, list[int]]:
        """Return the places of the members that hold each expert."""
        layers, members = len(self.plan.experts), len(self.addresses)
        found: dict[Key, list[int]] = {}
        for layer, table in enumerate(self.plan.experts.reshape(layers, members, -1)):
            for expert in range(int(table.max()) + 1):
                found[layer, expert] = np.nonzero(np.any(table == expert, axis=1))[0].tolist()
        return found

    def calls(self, parts: int) -> Array:
        """Return int [layers, experts, parts], the place of the member that computes a part's rows of an expert.

        A member computes consecutive parts, as many as its share of the expert says.
        """
        layers, slots = self.plan.experts.shape
        each, experts = slots // len(self.addresses), int(self.plan.experts.max()) + 1
        shares = slot_shares(self.plan.experts, self.plan.ends)
        found = np.zeros((layers, experts, parts), np.int64)
        for layer in range(layers):
            for expert in range(experts):
                on = np.nonzero(self.plan.experts[layer] == expert)[0]
                found[layer, expert] = np.repeat(on // each, largest_remainder(shares[layer, on], parts))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        plan = {"experts": self.plan.experts.tolist(), "ends": self.plan.ends.tolist()}
        return {"addresses": self.addresses, **plan, "period": self.period}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "ExpertMap":
        """Return the map of a row."""
        experts, ends = (np.asarray(row[name], np.int32) for name in ("experts", "ends"))
        addresses = tuple((host, port) for host, port in row["addresses"])
        return cls(addresses, ExpertPlan(experts, ends, len(addresses)), row["period"])


def place_experts(
    loads: Array, addresses: Sequence[Address], slots: int, copies: int, have: Mapping[Key, list[int]], period: int
) -> ExpertMap:
    """Return the map for loads [layers, experts], which moves few experts.

    Args:
        loads: rows of each expert, or any multiple of them.
        addresses: addresses of the members, in the order of the view.
        slots: slots of each for the experts of a layer.
        copies: members that hold an expert, at least; there is room for them.
        have: places of the members that hold each expert now.
        period: number of the counts.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    (layers, num_experts), members = loads.shape, len(addresses)
    experts, ends = np.zeros((2, layers, members, slots), np.int32)
    for layer, load in enumerate(np.asarray(loads, np.float64)):
        replicas = allocate_groups(load, members, slots, copies)
        roles = overlapped(load, replicas, members, slots)
        holds = np.zeros((members, num_experts))
        for expert in range(num_experts):
            holds[have[layer, expert], expert] = 1
        wanted = np.stack([np.any(roles == expert, axis=1) for expert in range(num_experts)], axis=1)
        of_member = linear_sum_assignment(-(holds @ wanted.T))[1]  # the row of `roles` for each member
        experts[layer] = roles[of_member]
        ends[layer] = share_rows(experts[layer], load)
    plan = ExpertPlan(experts.reshape(layers, -1), ends.reshape(layers, -1), members)
    return ExpertMap(tuple(addresses), plan, period)


def transfers(have: Mapping[Key, list[int]], wanted: Mapping[Key, list[int]]) -> dict[tuple[int, int], list[Key]]:
    """Return (sender, receiver) -> experts, by the places of members that have each and of those that are to hold it.

    Each goes out from the member that sends the fewest so far.
    """
    found: dict[tuple[int, int], list[Key]] = {}
    sent: dict[int, int] = {}
    for key in sorted(wanted):
        for receiver in wanted[key]:
            if receiver not in have[key]:
                sender = min(have[key], key=lambda place: (sent.get(place, 0), place))
                sent[sender] = sent.get(sender, 0) + 1
                found.setdefault((sender, receiver), []).append(key)
    return found
