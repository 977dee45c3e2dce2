"""The policy trainer's feed: batches of the controller before an update, publication of the weights after it."""

import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from axlearn_like.run.events import EventLog
from axlearn_like.training.step import State
from mesh import shard_batch
from mesh.distributed import ProcessGroup
from rl.objective import Objective
from rl.roles.messages import Group
from rl.roles.protocols import BatchSource
from rl.training.agreement import agreed_batch
from rl.training.batching import pack_groups
from rl.training.logprob_diff import LogprobDiff, only_version
from rl.training.publication import Publication


class PolicyFeed:
    """Feed of a training loop; step s updates version s - 1 by batch s - 1 and publishes version s."""

    waits = True
    tokens = "train_tokens"

    def __init__(
        self,
        controller: BatchSource,
        publication: Publication,
        objective: Objective,
        diff: LogprobDiff,
        group: ProcessGroup,
        events: EventLog,
        *,
        diff_every: int,
        sizes: Mapping[str, Any],
        flops: Callable[[int, int, int], float | None] = lambda trunk, samples, length: None,
    ):
        """Connect the sources of batches.

        Args:
            diff_every: updates between comparisons by `diff`.
            sizes: keyword arguments of `pack_groups`.
            flops: model FLOPs of a row.
        """
        self.flops: float | None = None
        self._row_flops = lru_cache(flops)
        self._controller, self._publication, self._group, self._events = controller, publication, group, events
        self._objective, self._diff, self._diff_every, self._sizes = objective, diff, diff_every, sizes
        self._waiting_since: float | None = None
        self._began = 0.0  # of the update, by the monotonic clock
        self._metrics: dict[str, Any] = {}

    def next(self, step: int, state: State, timeout: float) -> dict[str, jax.Array] | None:
        """Return the arrays of the next batch; without one publish again if other roles have restarted."""
        version, params = step - 1, state["params"]
        waiting_since = self._waiting_since = self._waiting_since or time.monotonic()
        groups = agreed_batch(self._controller, self._group, version, timeout)
        if groups is None:
            if self._publication.restart_if_forgotten(version, params):
                self._events.append("trainer", "heal", step=version)
            return None
        waited, self._waiting_since = time.monotonic() - waiting_since, None
        what = {"for": f"batch {version}"}
        self._events.append("trainer", "wait", seconds=round(waited, 4), step=version, **what)
        self._began = time.monotonic()
        self._publication.copied()
        batch, figures = pack_groups(groups, self._objective, **self._sizes)
        arrays = shard_batch(batch)
        if version % self._diff_every == 0 and (drawn_by := only_version(groups)) is not None:
            sampler = self._publication.params(drawn_by, version, params)
            figures |= self._diff.metrics(groups, batch, arrays, sampler)
        live = batch["weights"].any(axis=(1, 2))
        figures["train_tokens"] = float(batch["action_mask"][live].sum() + batch["trunk_lengths"].sum())
        each = self._row_flops(batch["trunk"].shape[1], *batch["inputs"].shape[1:])
        self.flops = None if each is None else float(each * live.sum())
        self._metrics = {**figures, **_staleness(groups, version), "wait_seconds": waited, "version": step}
        return arrays

    def metrics(self) -> Mapping[str, Any]:
        """Return figures of the last batch."""
        return self._metrics

    def updated(self, step: int, state: State, metrics: Mapping[str, Any]) -> None:
        """Mark the batch as consumed and publish the new version."""
        jax.block_until_ready(metrics)
        seconds = round(time.monotonic() - self._began, 4)
        self._events.append("trainer", "update", seconds=seconds, step=step - 1)
        if self._group.leader:
            self._controller.consumed(step - 1)
        self._publication.publish(step, state["params"])

    def checkpoint(self, state: State) -> tuple[State, dict[str, Any]]:
        """Return the state with the versions still in use. Of the controller the step is its whole state."""
        recent, versions = self._publication.saved(state["params"])
        return {**state, "recent": recent}, {"versions": versions}


def _staleness(groups: list[Group], version: int) -> dict[str, float]:
    ages = [version - int(rollout.versions.min()) for group in groups for rollout in group.rollouts]
    return {"staleness_mean": float(np.mean(ages)), "staleness_max": max(ages)}
