"""The parts of a run: its only policy, or several, each an ordinary run in a directory of its own."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.jsonl import JsonlTail
from mesh import UserError, did_you_mean
from rl.experiment import RLExperiment
from rl.runtime.policies.changes import changes_path, policy_run, with_joined
from rl.runtime.policies.configs import policy_configs


@dataclasses.dataclass(frozen=True)
class PolicyRun:
    """A policy's experiment and run directory."""

    name: str  # name of the policy; "": the experiment's only one, whose run is the whole
    experiment: RLExperiment
    run: RunDirectory


def policy_runs(experiment: RLExperiment, run: RunDirectory) -> list[PolicyRun]:
    """Return an experiment's policies by name, and those that have joined; directories may not be there yet."""
    if not experiment.cfg.policies:
        return [PolicyRun("", experiment, run)]
    configs = policy_configs(with_joined(experiment.cfg, run))
    return [PolicyRun(name, cfg.build(), policy_run(run, name)) for name, cfg in configs.items()]


class OpenRuns:
    """The policies of a run whose directories this process holds open; that of the whole is open already.

    Attributes:
        parts: the policies.
    """

    def __init__(self, experiment: RLExperiment, run: RunDirectory, stack: contextlib.ExitStack):
        """Open the directories (RunDirectoryError: one is of another config, or cannot be written)."""
        self._experiment, self._run, self._stack = experiment, run, stack
        self._changes = JsonlTail(changes_path(run), from_end=True)
        self.parts = [self.open(part) for part in policy_runs(experiment, run)]

    def open(self, part: PolicyRun) -> PolicyRun:
        """Open the directory of a policy (RunDirectoryError: see `OpenRuns`)."""
        if not part.name:
            return part
        opened = RunDirectory.open(part.run.path, to_text(part.experiment.cfg), force=self._run.force)
        return dataclasses.replace(part, run=self._stack.enter_context(opened))

    def new(self) -> list[PolicyRun]:
        """Return the policies that have joined since the last look, whose directories are not open."""
        if not self._changes.new_lines():
            return []
        known = {part.name for part in self.parts}
        return [part for part in policy_runs(self._experiment, self._run) if part.name not in known]


@contextlib.contextmanager
def open_policy_runs(experiment: RLExperiment, run: RunDirectory) -> Iterator[OpenRuns]:
    """Hold the run directories of all policies open (RunDirectoryError: see `OpenRuns`)."""
    with contextlib.ExitStack() as stack:
        yield OpenRuns(experiment, run, stack)


class ByPolicy[Part](dict[str, Part]):
    """Parts by policy, of which those of policies that join are made when they are asked for."""

    def __init__(self, names: list[str], make: Callable[[str], Part]):
        super().__init__((name, make(name)) for name in names)
        self._make = make

    def __missing__(self, name: str) -> Part:
        part = self[name] = self._make(name)
        return part


def role_of[Role](roles: Mapping[str, Role], policy: str) -> Role:
    """Return the role of a policy (UserError: there is no policy of this name)."""
    if policy not in roles:
        raise UserError(f"there is no policy {policy!r}{did_you_mean(policy, roles)}")
    return roles[policy]
