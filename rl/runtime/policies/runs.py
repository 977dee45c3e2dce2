"""The parts of a run: its only policy, or several, each an ordinary run in a directory of its own."""

import contextlib
import dataclasses
from collections.abc import Iterator

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from rl.experiment import RLExperiment
from rl.runtime.policies.configs import policy_configs

FOLDER = "policies"  # folder in the run directory of an experiment with several


@dataclasses.dataclass(frozen=True)
class PolicyRun:
    """A policy's experiment and run directory.

    Attributes:
        name: name of the policy; "": the experiment's only one, whose run is the whole.
        experiment: its experiment.
        run: its run directory.
    """

    name: str
    experiment: RLExperiment
    run: RunDirectory


def policy_runs(experiment: RLExperiment, run: RunDirectory) -> list[PolicyRun]:
    """Return the policies of an experiment in the order of its config; their directories may not be there yet."""
    if not experiment.cfg.policies:
        return [PolicyRun("", experiment, run)]
    return [
        PolicyRun(name, cfg.build(), RunDirectory.attach(run.path / FOLDER / name))
        for name, cfg in policy_configs(experiment.cfg).items()
    ]


@contextlib.contextmanager
def open_policy_runs(experiment: RLExperiment, run: RunDirectory) -> Iterator[list[PolicyRun]]:
    """Hold the run directories of all policies open; that of the whole is open already.

    Raises:
        RunDirectoryError: one of them belongs to another config, or cannot be written.
    """
    with contextlib.ExitStack() as stack:
        parts = []
        for part in policy_runs(experiment, run):
            if part.name:
                text = to_text(part.experiment.cfg)
                opened = RunDirectory.open(part.run.path, text, force=run.force)
                part = dataclasses.replace(part, run=stack.enter_context(opened))
            parts.append(part)
        yield parts
