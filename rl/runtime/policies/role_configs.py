"""Policies that play in one another's episodes: what their configs must have in common, and the versions they need."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from axlearn_like.checkpoint.versions import list_steps
from axlearn_like.config import ConfigError, text_lines
from mesh import UserError, did_you_mean
from rl.environments.roles import RoleEnvironment, players_of
from rl.environments.task import environments_of
from rl.experiment import RLExperiment
from rl.protocol.players import OWN, Player, played_together
from rl.runtime.policies.adapters import are_adapters
from rl.training.spec import Opponents

# Fields that decide which episodes a step has: each is played once, for all roles that learn.
_EQUAL = ("tasks", "seed", "num_steps", "prompts_per_step", "samples_per_prompt", "groups_per_lease", "staleness")


def players_by_policy(configs: Mapping[str, RLExperiment.Config]) -> dict[str, dict[str, Player]]:
    """Return the players of each policy's episodes, of the policies that do not play alone."""
    found = {name: players_of(cfg.tasks, name) for name, cfg in configs.items()}
    return {name: players for name, players in found.items() if players}


def opponents_of(policy: str, players: Mapping[str, Mapping[str, Player]], staleness: int) -> Opponents:
    """Return the versions of a policy that episodes ask for, by how far policies that play together can be apart.

    One that is first by `staleness + 1` updates keeps what the last one's oldest leases ask for.
    """
    named = [one for roles in players.values() for one in roles.values() if one.policy == policy]
    if not named:
        return Opponents()
    fixed = sorted({one.version for one in named if one.version is not None})
    return Opponents(2 * staleness + 1 + max(one.back or 0 for one in named), tuple(fixed))


def frozen_players(players: Mapping[str, Mapping[str, Player]]) -> dict[str, int]:
    """Return how many frozen players each policy is: each has adapters of its own."""
    distinct = {one for roles in players.values() for one in roles.values() if one.policy and not one.learns}
    return {name: sum(one.policy == name for one in distinct) for name in {one.policy for one in distinct}}


def check_roles(cfg: RLExperiment.Config, found: Mapping[str, RLExperiment.Config]) -> None:
    """Refuse roles without policies, and policies, `found` by name, that cannot play together (ConfigError)."""
    if not found:
        for environment in environments_of(cfg.tasks):
            expected = "`policies` of the experiment, which play the roles"
            if isinstance(environment, RoleEnvironment.Config):
                environment.require("players", False, expected)
            environment.require("consults", not environment.consults, "() without `policies` of the experiment")
        return
    players = players_by_policy(found)
    for name, roles in players.items():
        where = f"policies[{name!r}].tasks"
        if OWN in roles and not are_adapters(cfg.policy):
            said = "expected no `consults`, which whole models have none of: one engine draws an episode"
            raise ConfigError(f"{where}: {said} (--apply low_rank)", where)
        for role, player in roles.items():
            if not player.policy and not are_adapters(cfg.policy):
                said = f"whole models have no base; expected a version of one, such as '{name}@0', or --apply low_rank"
                raise ConfigError(f"{where}: role {role!r}: {said}", where)
            if player.policy and player.policy not in found:
                near = did_you_mean(player.policy, found)
                raise ConfigError(f"{where}: role {role!r}: there is no policy {player.policy!r}{near}", where)
        if not any(player.learns and player.policy == name for player in roles.values()):
            said = ", ".join(f"{role}: {player.policy or 'base'}" for role, player in roles.items())
            raise ConfigError(f"{where}: policy {name!r} learns in no role of its episodes ({said})", where)
    for name, others in sorted(played_together(players).items()):
        own = found[name]
        for other in sorted(others):
            _check_equal(name, own, other, found[other])
        _check_kept(name, own, opponents_of(name, players, own.staleness))


def _check_equal(name: str, own: RLExperiment.Config, other: str, its: RLExperiment.Config) -> None:
    for field in _EQUAL:
        values = [getattr(one, field) for one in (own, its)]
        lines = [text_lines(value) if field == "tasks" else value for value in values]
        if lines[0] != lines[1]:
            where = f"policies[{name!r}].{field}"
            said = "the tasks" if field == "tasks" else f"{values[1]!r}"
            raise ConfigError(f"{where}: expected {said} of policy {other!r}, with which it plays", where)


def _check_kept(name: str, own: RLExperiment.Config, opponents: Opponents) -> None:
    with_roles = "with roles, whose policies keep step"
    own.controller.require("weights", own.controller.weights == "pinned", f"'pinned' {with_roles}")
    own.controller.require("audit", not own.controller.audit, f"0 {with_roles}")
    own.require("evaluate_every", own.evaluate_every is None, f"None {with_roles}")
    own.trainer.require("early_stopping", own.trainer.early_stopping is None, f"None {with_roles}")
    least = own.staleness + 3
    own.trainer.checkpoint.require("keep", own.trainer.checkpoint.keep >= least, f"{least} or more {with_roles}")
    least = opponents.back + 2
    asked = f"{least} or more: episodes ask for {opponents.back} versions of policy {name!r} before its newest"
    own.parameter_server.require("keep", own.parameter_server.keep >= least, asked)


def resume_together(folders: Mapping[str, Path], together: Mapping[str, Sequence[str] | frozenset[str]]) -> None:
    """Set checkpoints aside of updates that not all policies of the same episodes have saved: they are made again.

    They are moved beside the others, into a folder `rl-unmatched`: none is deleted, as one whose partner's was lost by
    accident may be all that is left.

    Args:
        folders: checkpoints by policy.
        together: for each policy, the others that play with it.

    Raises:
        UserError: they have checkpoints, and none in common.
    """
    for name, others in together.items():
        saved = {one: list_steps(folders[one]) for one in sorted({name, *others})}
        common = set.intersection(*map(set, saved.values()))
        if not common and all(saved.values()):
            each = ", ".join(f"{one}: {', '.join(map(str, steps))}" for one, steps in saved.items())
            raise UserError(f"policies of the same episodes have no checkpoint of the same update ({each})")
        last = max(common, default=0)
        for one, steps in saved.items():
            aside = folders[one].with_name(f"{folders[one].name}-unmatched")
            for step in (step for step in steps if step > last):
                aside.mkdir(exist_ok=True)
                shutil.rmtree(aside / str(step), ignore_errors=True)  # one that was set aside before and made again
                (folders[one] / str(step)).rename(aside / str(step))
