"""Several updates by one batch: its prompts in mini-batches, for several epochs, until the policy has moved too far.

Advantages are those of the whole batch. Weights are those of the mini-batch, whose loss is the mean that the objective
takes, so a step is as large as that of a batch of this size. Which prompts are together follows from seed and version,
so a run that is killed makes the same updates again; it resumes before the first of them, never between two.
"""

from collections.abc import Mapping
from typing import Any, override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from rl.protocol.experiment import ExperimentFields


class Updates(Configurable):
    """Mini-batches and epochs of each batch."""

    class Config(ConfigBase["Updates"]):
        minibatches: int = 1  # parts of a batch, of whole groups; each gets an optimizer step
        epochs: int = 1  # passes over the mini-batches of a batch
        stop_kl: float | None = None  # limit of `kl_old_new`; beyond it a batch gets no further update; None: no limit

        @property
        def count(self) -> int:
            """Updates of a batch, at most."""
            return self.minibatches * self.epochs

        @override
        def check_fields(self) -> None:
            self.require_least(1, "minibatches", "epochs")
            several = "None with one update a batch, before which the policy has not moved"
            self.require("stop_kl", self.stop_kl is None or self.count > 1, several)
            self.require("stop_kl", self.stop_kl is None or self.stop_kl > 0, "above 0, in nats per token")

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse more mini-batches than prompts, and ratios to a policy that the first update leaves behind."""
            objective = experiment.objective
            expected = (
                "'recompute' or 'behaviour' with several updates a batch (trainer.updates): after the first one the "
                "policy is not the one at their start"
            )
            objective.require("old_policy", objective.old_policy != "current" or self.count == 1, expected)
            fits = self.minibatches <= experiment.prompts_per_step
            self.require("minibatches", fits, f"at most prompts_per_step={experiment.prompts_per_step}")

    def __init__(self, cfg: Config, *, seed: int):
        self.epochs, self._minibatches = cfg.epochs, cfg.minibatches
        self._stop_kl, self._seed = cfg.stop_kl, seed

    def parts(self, live: np.ndarray, version: int) -> list[np.ndarray]:
        """Return bool[groups] of each mini-batch: random equal shares of the live groups, by the version."""
        order = np.random.default_rng((self._seed, version)).permutation(np.flatnonzero(live))
        shares = [share for share in np.array_split(order, self._minibatches) if share.size]
        return [np.isin(np.arange(len(live)), share) for share in shares]

    def too_far(self, metrics: Mapping[str, Any]) -> bool:
        """Return True if these metrics of an update end its batch; only a limit waits for the devices."""
        return self._stop_kl is not None and float(metrics["kl_old_new"]) > self._stop_kl
