"""Environments of several roles, each played by a policy: who acts next, what that one is shown, and who is paid.

    class Nim(RoleEnvironment):
        def reset(self, row):
            self._left, self._turn = 5 + row["seed"] % 8, 0
            return NextRole("first", f"{self._left} left. ")

        def step(self, action):
            taken = int(action)
            ...
            return NextRole("second", f"{self._left} left. ")

    Nim.Config(players={"first": "a", "second": "a@-4"})

A role sees the problem, what it is shown, and its own actions. Its part of the episode is a rollout of its policy, of
which nothing but its own tokens is learned.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, override

from axlearn_like.config import REQUIRED, ConfigBase
from rl.environments.environment import Environment, Row
from rl.environments.task import environments_of
from rl.protocol.messages import Lease, Seat
from rl.verification.rewards import describe, number

BASE = "base"  # player that is the base model without an adapter
_PLAYER = re.compile(r"([^@]+)(?:@(-?)(\d+))?")


class NextRole(NamedTuple):
    """Answer of a role environment, at its start and to each action."""

    role: str = ""  # role that acts next
    observation: str = ""  # text that it is shown; nobody learns from it
    # Finite numbers by role, for what has happened; those of roles that are not named are 0
    rewards: Mapping[str, float] = {}
    done: bool = False  # the episode is over; nobody acts


@dataclasses.dataclass(frozen=True, slots=True)
class Player:
    """A player of a role: a policy that learns, a version of one that is frozen, or the base."""

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


class RoleEnvironment(Environment):
    """One episode of several roles: `reset` and `step` return a `NextRole`, whose action comes next."""

    class Config(Environment.Config):
        """Fields of a role environment; `max_turns` counts the actions of all roles."""

        # Player by role: "NAME", a policy that learns; "NAME@-4", its version of 4 updates before; "NAME@12", its
        # version 12 once that is made, until then the newest; "base", the model without adapter
        players: dict[str, str] = REQUIRED

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("verify", not self.verify, "False: a role environment pays all rewards itself")
            self.require("players", bool(self.players), "a player for each role")
            learning = [text for text, player in self._parsed() if player.learns]
            self.require("players", bool(learning), "a policy that learns, such as 'NAME', for one role at least")
            once = len(set(learning)) == len(learning)
            self.require("players", once, "each policy to learn in one role; name another, or 'NAME@-0' beside it")

        def parsed(self) -> dict[str, Player]:
            """Return the players by role, in the order of the roles' names."""
            return {role: player for role, (_, player) in zip(sorted(self.players), self._parsed(), strict=True)}

        def _parsed(self) -> list[tuple[str, Player]]:
            found = []
            for role in sorted(self.players):
                text = self.players[role]
                match = _PLAYER.fullmatch(text)
                expected = f"a policy as 'NAME', 'NAME@-4' or 'NAME@12', or {BASE!r}, for role {role!r}, got {text!r}"
                self.require("players", match is not None and not (match[1] == BASE and match[3]), expected)
                assert match is not None
                name, before, digits = match.groups()
                if name == BASE:
                    player = Player("")
                elif digits is None:
                    player = Player(name)
                else:
                    player = Player(name, back=int(digits)) if before else Player(name, version=int(digits))
                found.append((text, player))
            return found

    @override
    def reset(self, row: Row) -> Any:
        """Begin; returns a `NextRole`: who acts first, and what that one is shown after the question."""
        raise NotImplementedError

    @override
    def step(self, action: str) -> Any:
        """Carry out an action; returns a `NextRole`, or an awaitable of one."""
        raise NotImplementedError


def players_of(tasks: ConfigBase[Any]) -> dict[str, Player]:
    """Return the players of the environments of tasks by role; {}: they have no roles.

    Raises:
        ConfigError: some environments have other players than others, or none.
    """
    environments = environments_of(tasks)
    with_roles = [one for one in environments if isinstance(one, RoleEnvironment.Config)]
    if not with_roles:
        return {}
    first = with_roles[0]
    for one in with_roles:
        one.require("players", one.players == first.players, f"{first.players}, as the other tasks have")
    whole = len(with_roles) == len(getattr(tasks, "families", ()))
    first.require("players", whole, "role environments in all tasks of a mixture, or in none")
    return first.parsed()


def played_together(players: Mapping[str, Mapping[str, Player]]) -> dict[str, frozenset[str]]:
    """Return, for each policy, the others that play in its episodes or in episodes of those.

    >>> from rl.environments.roles import Player, played_together
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


def checked_next(value: Any, roles: Mapping[str, Any]) -> NextRole:
    """Return what a role environment has answered.

    Raises:
        TypeError: it is no `NextRole`, names a role that there is not, or pays what is no finite number.
    """
    if not isinstance(value, NextRole):
        raise TypeError(
            f"the environment returned {describe(value)}; expected NextRole(role, observation, rewards, done)"
        )
    for role in {*value.rewards, *([] if value.done else [value.role])}:
        if role not in roles:
            raise TypeError(f"the environment named role {role!r}; expected one of {', '.join(roles)}")
    if not isinstance(value.observation, str):
        raise TypeError(f"observation {describe(value.observation)}; expected text")
    rewards = {role: number(reward, f"role {role!r}") for role, reward in value.rewards.items()}
    return value._replace(rewards=rewards, done=bool(value.done))
