"""A run in this process, with every batch that its trainer has consumed."""

from pathlib import Path
from typing import Any
from unittest import mock

from rl.audit.rollout_ledger import RolloutName
from rl.controller.controller import Controller
from rl.experiment import RLExperiment
from rl.protocol.messages import Group
from tests.rl.runtime.ray.experiments import run_here


def run_recorded(path: Path, cfg: RLExperiment.Config) -> dict[RolloutName, Group]:
    """Run, and return each consumed rollout as a group of its own."""
    found: dict[RolloutName, Group] = {}
    inner = Controller.next_batch

    def next_batch(self: Controller, *args: Any) -> list[Group] | None:
        batch = inner(self, *args)
        for group in batch or []:
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                name = RolloutName(int(rollout.versions[0]), group.prompt.id, rollout.sample_id, group.prompt.draw)
                found[name] = Group(group.prompt, (rollout,), (score,), group.hardware)
        return batch

    with mock.patch.object(Controller, "next_batch", next_batch):
        run_here(path, cfg)
    return found
