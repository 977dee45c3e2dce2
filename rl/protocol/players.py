"""Players of episodes: policies that learn from them, frozen versions of policies, and the base."""

import dataclasses
import re
from collections.abc import Mapping

from rl.protocol.messages import Lease, Seat

BASE = "base"  # player that is the base model without an adapter
OWN = ""  # role of a policy in an episode without roles, where frozen players are consulted
_PLAYER = re.compile(r"([^@]+)(?:@(-?)(\d+))?")


@dataclasses.dataclass(frozen=True, slots=True)
class Player:
    """A player: a policy that learns, a version of one that is frozen, or the base."""

    policy: str  # name of the policy; "": the base
    back: int | None = None  # versions before that of the policies that learn; None: not given
    version: int | None = None  # number of a version, which plays from then on; None: not given

    @property
    def learns(self) -> bool:
        """True if its tokens are trained on."""
        return bool(self.policy) and self.back is None and self.version is None

    def version_at(self, version: int) -> int:
        """Return the version that plays where the policies that learn have this one."""
        if self.version is not None:
            return min(self.version, version)
        return max(0, version - (self.back or 0))


def player_of(text: str) -> Player | None:
    """Return the player that a text names; None: it is no such text.

    >>> from rl.protocol.players import player_of
    >>> player_of("ann@-4"), player_of("base@3")
    (Player(policy='ann', back=4, version=None), None)
    """
    match = _PLAYER.fullmatch(text)
    if match is None or (match[1] == BASE and match[3]):
        return None
    name, before, digits = match.groups()
    if name == BASE:
        return Player("")
    if digits is None:
        return Player(name)
    return Player(name, back=int(digits)) if before else Player(name, version=int(digits))


def played_together(players: Mapping[str, Mapping[str, Player]]) -> dict[str, frozenset[str]]:
    """Return, for each policy, the others that play in its episodes or in episodes of those.

    >>> from rl.protocol.players import Player, played_together
    >>> found = played_together({"a": {"x": Player("a"), "y": Player("b", back=4)}, "c": {"x": Player("c")}})
    >>> found["b"], found["c"]
    (frozenset({'a'}), frozenset())
    """
    groups: list[set[str]] = []
    for name, roles in players.items():
        linked = {name, *(one.policy for one in roles.values() if one.policy)}
        for group in [group for group in groups if group & linked]:
            groups.remove(group)
            linked |= group
        groups.append(linked)
    return {name: frozenset(group - {name}) for group in groups for name in group}


def seats_of(players: Mapping[str, Player], lease: Lease, incarnations: Mapping[str, int]) -> tuple[Seat, ...]:
    """Return who draws each role of the episodes of a lease; `incarnations`: of the trainers, by policy."""
    version = lease.version
    return tuple(
        Seat(role, one.policy, one.version_at(version), incarnations[one.policy], one.learns)
        if one.policy
        else Seat(role, "", 0, 0, learns=False)
        for role, one in players.items()
    )
