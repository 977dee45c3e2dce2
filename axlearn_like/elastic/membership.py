"""The members of an elastic run at a moment: a decision of its coordinator, which all members obey."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from axlearn_like.elastic.channel import Address


class MemberTimeouts(NamedTuple):
    """Seconds that members of a run are waited for."""

    silence: float = 10.0  # seconds without a sign of life after which a member counts as lost
    patience: float = 60.0  # seconds for all members to come at the start, and for a member that others wait for


@dataclasses.dataclass(frozen=True)
class MemberEntry:
    """A member: its index, where it listens, and the updates that its state has; None: it has no state."""

    index: int
    address: Address
    step: int | None


@dataclasses.dataclass(frozen=True)
class Membership:
    """The members between two changes, those that came first in front; the first writes logs and checkpoints.

    Attributes:
        epoch: number of the change that it follows.
        members: the members.
        stop: the run ends.
        last: number of the update after which it does; None: it ends with the states that there are.
    """

    epoch: int
    members: tuple[MemberEntry, ...]
    stop: bool = False
    last: int | None = None

    @property
    def newest(self) -> int | None:
        """Updates of the newest state; None: no member has one."""
        return max((place.step for place in self.members if place.step is not None), default=None)

    @property
    def sources(self) -> tuple[MemberEntry, ...]:
        """The members that have the newest state."""
        return tuple(place for place in self.members if place.step is not None and place.step == self.newest)

    def position(self, index: int) -> int:
        """Return the place of a member in their order."""
        return [place.index for place in self.members].index(index)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Membership":
        """Return the view of a row."""
        places = (MemberEntry(place["index"], tuple(place["address"]), place["step"]) for place in row["members"])
        return cls(row["epoch"], tuple(places), row["stop"], row["last"])
