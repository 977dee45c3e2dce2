"""Submission: all is checked before the first thing is created, and a submission that breaks off is taken back."""

import os
import secrets
from collections.abc import Callable, Mapping

from mesh import UserError
from tools.launch.bundle import Bundle
from tools.launch.control.api import ROLE, ClusterApi, LaunchedApi, Object, terminal
from tools.launch.kubernetes.jobset import TOKEN_KEY, jobset, jobset_name, jobsets, token_secret
from tools.launch.launch import Launch
from tools.launch.plan import LaunchPlan

Say = Callable[[str], None]


def submit(
    api: ClusterApi,
    cfg: Launch.Config,
    plan: LaunchPlan,
    files: Mapping[str, str],
    bundle: Bundle | None,
    say: Say,
) -> None:
    """Submit a run, or resume one that has ended or was lost; `files`: texts of the submission by name.

    Raises:
        UserError: the cluster refuses something, or the run is active. Nothing of this submission is left.
    """
    api.check()
    _remove_ended(api, plan.name)
    digest = "" if bundle is None else bundle.digest
    wanted = [one for role in jobsets(cfg, plan, digest).values() for one in role]
    made: list[str] = []
    try:
        api.place(plan.name, files, None if bundle is None else (bundle.file_name, bundle.content))
        for name, values in secrets_of(cfg, plan).items():
            api.make_secret(name, values)
        for one in wanted:
            api.create(one)
            made.append(one["metadata"]["name"])
    except BaseException:
        api.delete(*made)
        if not api.jobsets(plan.name):
            api.clean(plan.name)
        raise
    say(f"submitted {', '.join(made)}")


def add_workers(api: ClusterApi, cfg: Launch.Config, plan: LaunchPlan, count: int, say: Say) -> None:
    """Add workers to an active RL run (UserError: the run is not active, or is no RL run)."""
    role = next((role for role in plan.roles if role.name == "worker"), None)
    if role is None:
        raise UserError(f"{plan.name} is no RL run, and has no workers")
    if role.pods > 1:
        raise UserError(f"a worker that joins {plan.name} is one process, and {role.slices} has {role.pods} hosts")
    there = api.jobsets(plan.name)
    head = next((one for one in there if one["metadata"]["labels"].get(ROLE) == "head"), None)
    if head is None or terminal(head) or head.get("status", {}).get("lost"):
        raise UserError(f"{plan.name} is not active; submit it first")
    digest = head["metadata"]["labels"].get("axl/bundle", "").removeprefix("axl-")
    names = {one["metadata"]["name"] for one in there}
    index, added = 0, list[str]()
    while len(added) < count:
        name = jobset_name(plan, role, index)
        if name not in names:
            api.create(jobset(cfg, plan, role, index, digest))
            added.append(name)
        index += 1
    say(f"added {', '.join(added)}")


def stop(api: LaunchedApi, run: str, say: Say) -> None:
    """Delete all JobSets of a run, and what a submission that was killed has left; results stay.

    Raises:
        UserError: there is nothing of that name.
    """
    names = [one["metadata"]["name"] for one in api.jobsets(run)]
    heads = [name for name in names if name.endswith("-head")]
    api.delete(*heads)  # head first: it saves, and the roles have no work left
    api.delete(*(name for name in names if name not in heads))
    cleaned = api.clean(run)
    if not names and not cleaned:
        raise UserError(f"there is nothing of a run {run!r}")
    say(f"stopped: {', '.join([*names, *cleaned])}; the run directory stays")


def secrets_of(cfg: Launch.Config, plan: LaunchPlan) -> dict[str, dict[str, str]]:
    """Return the Secrets that a submission makes: the token of the run, and on this machine those that it names.

    There they are taken from variables of the same names.
    """
    found: dict[str, dict[str, str]] = {}
    if plan.command == "rl":
        found[token_secret(plan.name)] = {TOKEN_KEY: secrets.token_hex(32)}
    if cfg.on == "local":
        for name, where in cfg.secret_env.items():
            owner, _, key = where.partition("/")
            if name in os.environ:
                found.setdefault(owner, {})[key] = os.environ[name]
    return found


def _remove_ended(api: ClusterApi, run: str) -> None:
    """Remove JobSets of the run that have ended or were lost (UserError: some are active)."""
    there = api.jobsets(run)
    active = [one for one in there if not terminal(one) and not one.get("status", {}).get("lost")]
    if active:
        raise UserError(
            f"{run} is active: {', '.join(map(_name, active))}; `axl launch status` shows it, `axl launch stop` ends "
            "it, and --name gives another run a name"
        )
    api.delete(*map(_name, there))


def _name(one: Object) -> str:
    return one["metadata"]["name"]
