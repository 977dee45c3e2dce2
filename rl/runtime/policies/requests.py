"""Requests for changes of the policies of a run: what cannot be is refused, the rest is written for the run."""

from collections.abc import Sequence
from typing import Literal, cast

from axlearn_like.config import ConfigError, from_text, to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.opening import same_run
from mesh import UserError, did_you_mean
from rl.experiment import RLExperiment
from rl.runtime.policies.adapters import are_adapters
from rl.runtime.policies.changes import NAME, changing, failures, policy_run, stopped_policies, with_joined
from rl.runtime.policies.configs import MOST_POLICIES, check_policies, policy_configs, slots_of
from rl.runtime.policies.role_configs import players_by_policy
from rl.training.trainer import ends_early
from rl.training.warm_start import latest_step

State = Literal["trains", "stopped", "failed", "done"]
_AT_NEXT = "the next `axl rl` of this run"


def request_change(kind: Literal["add", "stop", "resume"], run: RunDirectory, name: str, sets: Sequence[str]) -> str:
    """Ask for a change as the command line says it; returns a sentence that says when it comes.

    Args:
        kind: what to do with the policy.
        run: the run directory of the whole.
        name: name of the policy.
        sets: edits of one that is added, such as "seed=1".

    Raises:
        UserError: see `add_policy`, `stop_policy` and `resume_policy`; or an edit has no path, or a path comes twice.
    """
    if kind != "add":
        return (stop_policy if kind == "stop" else resume_policy)(run, name)
    edits: dict[str, str] = {}
    for text in sets:
        path, equals, value = (part.strip() for part in text.partition("="))
        if not path or not equals or path in edits:
            raise UserError(f"--set {text!r}: expected PATH=VALUE, and each path once")
        edits[path] = value
    return add_policy(run, name, edits)


def add_policy(run: RunDirectory, name: str, edits: dict[str, str]) -> str:
    """Ask for one more policy of a run; returns a sentence that says when it joins.

    Args:
        run: the run directory of the whole.
        name: name of the policy.
        edits: its edits of the experiment's config, path -> text, as `policies` has them.

    Raises:
        UserError: the run's policies cannot change while it runs, there is such a policy, no slot is free, or the
            config cannot be one of them; names the policy and the field.
    """
    with changing(run) as log:
        cfg = _changeable(run)
        if not NAME.fullmatch(name):
            raise UserError(f"policy {name!r}: expected a name of a-z, 0-9, and ._=+- behind the first, up to 100")
        if name in cfg.policies:
            state = _state(run, cfg, name)
            then = f"axl rl resume {run.path} {name}" if state in ("stopped", "failed") else "another name"
            raise UserError(f"policy {name!r} is one of the run's, and {_words(state)}; expected {then}")
        if len(cfg.policies) >= MOST_POLICIES:
            raise UserError(f"policy {name!r}: the run has had {MOST_POLICIES}; expected another run")
        _check_slot(run, cfg, name)
        alone = cfg.clone(policies={name: edits}, policy_shares={}, policy_quotas={})
        found = check_policies(alone, "ray" if cfg.controller.audit else "inprocess", devices=())
        _check_folder(run, name, to_text(found[name]))
        log.append("user", "add", policy=name, edits=edits)
        return f"{name} joins at {_when(run)}"


def stop_policy(run: RunDirectory, name: str) -> str:
    """Ask a policy of a run to stop; returns a sentence that says when (UserError: it, or the run, cannot)."""
    with changing(run) as log:
        state = _state(run, _changeable(run), name)
        if state != "trains":
            raise UserError(f"policy {name!r} {_words(state)}; expected one that trains")
        log.append("user", "stop", policy=name)
        return f"{name} is saved and stops at {_when(run)}"


def resume_policy(run: RunDirectory, name: str) -> str:
    """Ask a policy of a run that was stopped, or has failed, to go on; returns a sentence that says when it does.

    Raises:
        UserError: the run's policies cannot change while it runs, there is no such policy, it trains or is done, or no
            slot is free.
    """
    with changing(run) as log:
        cfg = _changeable(run)
        state = _state(run, cfg, name)
        if state in ("trains", "done"):
            raise UserError(f"policy {name!r} {_words(state)}; expected one that was stopped, or has failed")
        _check_slot(run, cfg, name)
        log.append("user", "resume", policy=name)
        return f"{name} goes on from its last checkpoint at {_when(run)}"


def _changeable(run: RunDirectory) -> RLExperiment.Config:
    """Return the config of a run with the policies that have joined it (UserError: they cannot change one by one)."""
    read = from_text(run.read_config())
    if not isinstance(read, RLExperiment.Config) or not read.policies:
        said = "expected the run of an experiment with `policies`, such as one of axl rl sweep"
        raise UserError(f"{run.path}: {said}; to train more, begin with axl rl sweep")
    cfg = cast(RLExperiment.Config, with_joined(read, run))
    again = "stop the run, and start it with other `policies`"
    if not are_adapters(cfg.policy):
        raise UserError(f"{run.path}: whole models do not come and go while others train; {again}")
    if players_by_policy(policy_configs(cfg)):
        raise UserError(f"{run.path}: policies that play in one another's episodes begin and end together; {again}")
    return cfg


def _state(run: RunDirectory, cfg: RLExperiment.Config, name: str) -> State:
    """Return how a policy stands (UserError: there is none of this name)."""
    if name not in cfg.policies:
        known = ", ".join(sorted(cfg.policies)[:8])
        raise UserError(f"{run.path} has no policy {name!r}{did_you_mean(name, cfg.policies)}; it has {known}")
    own = policy_run(run, name)
    if name in stopped_policies(run):
        return "stopped"
    if name in failures(run):
        return "failed"
    trained = policy_configs(cfg.clone(policies={name: cfg.policies[name]}, policy_shares={}, policy_quotas={}))[name]
    step = latest_step(own.checkpoints / "rl")
    done = step is not None and (step >= trained.num_steps or ends_early(trained.trainer, own, step))
    return "done" if done else "trains"


def _words(state: State) -> str:
    return {"trains": "trains", "stopped": "was stopped", "failed": "has failed", "done": "has made all its updates"}[
        state
    ]


def _check_slot(run: RunDirectory, cfg: RLExperiment.Config, name: str) -> None:
    """Refuse one more policy where as many train as there is room for (UserError)."""
    begun = cast(RLExperiment.Config, from_text(run.read_config()))
    slots = slots_of(begun)
    training = [one for one in sorted(cfg.policies) if _state(run, cfg, one) == "trains"]
    if len(training) >= slots and _is_alive(run):
        said = f"no slot is free: {len(training)} policies train, of {slots} that there is room for"
        how = f"stop one (axl rl stop {run.path} {training[0]}), or stop the run and resume it with --set policy_slots="
        raise UserError(f"policy {name!r}: {said}; {how}{len(training) + 1}")


def _check_folder(run: RunDirectory, name: str, text: str) -> None:
    """Refuse a name under which the run has trained another policy before (UserError)."""
    own = policy_run(run, name)
    if own.config_path.exists() and not same_run(own.read_config(), text):
        raise ConfigError(f"{own.path} holds a policy of another config; expected another name", "policies")


def _is_alive(run: RunDirectory) -> bool:
    holder = run.holder()
    return holder is not None and holder.alive is not False


def _when(run: RunDirectory) -> str:
    return "the next update" if _is_alive(run) else f"{_AT_NEXT}, which does not run now"
