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

from collections.abc import Mapping
from typing import Any, NamedTuple, override

from axlearn_like.config import REQUIRED, ConfigBase
from rl.environments.environment import Environment, Row
from rl.environments.task import environments_of
from rl.protocol.players import BASE, OWN, Player, player_of
from rl.verification.rewards import describe, number


class NextRole(NamedTuple):
    """Answer of a role environment, at its start and to each action."""

    role: str = ""  # role that acts next
    observation: str = ""  # text that it is shown; nobody learns from it
    # Finite numbers by role, for what has happened; those of roles that are not named are 0
    rewards: Mapping[str, float] = {}
    done: bool = False  # the episode is over; nobody acts


class RoleEnvironment(Environment):
    """One episode of several roles: `reset` and `step` return a `NextRole`, whose action comes next."""

    class Config(Environment.Config):
        """Fields of a role environment; `max_turns` counts the actions of all roles."""

        # Player by role: "NAME", a policy that learns; "NAME@-4", its version of 4 updates before; "NAME@12", its
        # version 12 once that is made, until then the newest; "base", the model without adapter
        players: dict[str, str] = REQUIRED

        @override
        def check_fields(self) -> None:
            self.require("consults", not self.consults, "() in a game of roles: make what it would consult a player")
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
                player = player_of(text)
                expected = f"a policy as 'NAME', 'NAME@-4' or 'NAME@12', or {BASE!r}, for role {role!r}, got {text!r}"
                self.require("players", player is not None, expected)
                assert player is not None
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


def players_of(tasks: ConfigBase[Any], policy: str) -> dict[str, Player]:
    """Return the players of a policy's episodes by role: those of its environments, or those that it consults.

    {}: it plays alone. Where there are no roles its own is `OWN`, and the others' are their texts.

    Raises:
        ConfigError: some environments have other players than others, or none.
    """
    environments = environments_of(tasks)
    with_roles = [one for one in environments if isinstance(one, RoleEnvironment.Config)]
    if not with_roles:
        consulted = {text: player for one in environments for text, player in one.consulted().items()}
        return {OWN: Player(policy), **consulted} if consulted else {}
    first = with_roles[0]
    for one in with_roles:
        one.require("players", one.players == first.players, f"{first.players}, as the other tasks have")
    whole = len(with_roles) == len(getattr(tasks, "families", ()))
    first.require("players", whole, "role environments in all tasks of a mixture, or in none")
    return first.parsed()


def check_alone(tasks: ConfigBase[Any]) -> None:
    """Refuse environments that need other policies than the one that is there (ConfigError)."""
    alone = "where a policy answers alone: it takes its experiment's `policies` to play"
    for one in environments_of(tasks):
        one.require("consults", not one.consults, f"() {alone}")
        if isinstance(one, RoleEnvironment.Config):
            one.require("players", False, f"no roles {alone}")


def checked_next(value: Any, roles: Mapping[str, Any]) -> NextRole:
    """Return a role environment's answer (TypeError: no `NextRole`, no such role, or no finite pay)."""
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
