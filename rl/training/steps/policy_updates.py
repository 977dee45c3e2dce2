"""The policy trainer's source of updates: batches of the controller before them, publication of the weights after."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from axlearn_like.run.events import EventLog, spent_since
from axlearn_like.training.alignment.reference import Reference
from axlearn_like.training.step import State
from rl.objective import derived_metrics
from rl.protocol.headers import GroupHeader, batch_marks
from rl.training.critic.values import RolloutValues
from rl.training.publication import Publication
from rl.training.scoring.reference_scores import ReferenceScores
from rl.training.steps.fill import FillStep
from rl.training.steps.inputs import InputsStep
from rl.training.steps.observers import BatchObserver
from rl.training.steps.score import ScoreStep
from rl.training.steps.take import TakeStep


class Steps(NamedTuple):
    """The way of a batch from the controller to the arrays of updates, in its order."""

    take: TakeStep
    score: ScoreStep
    fill: FillStep
    inputs: InputsStep


class PolicyUpdates:
    """Updates of a training loop; step s updates version s - 1 by batch s - 1 and publishes version s."""

    waits = True
    tokens = "train_tokens"

    def __init__(
        self,
        steps: Steps,
        publication: Publication,
        events: EventLog,
        *,
        observers: Sequence[BatchObserver] = (),
        beside: Sequence[Reference | RolloutValues] = (),
        scores: ReferenceScores | None = None,
        on_update: Callable[[], None] = lambda: None,
    ):
        """Connect the steps with what is around them.

        Args:
            observers: what acts on a batch before the updates, in this order.
            beside: what follows the updates and is saved beside the policy.
            scores: the policy that the objective compares with, if it does.
            on_update: called once the version of an update is on its way.
        """
        self.flops: float | None = None
        self._steps, self._publication, self._events, self._observers = steps, publication, events, observers
        self._beside, self._scores, self._on_update = beside, scores, on_update
        self._waiting_since: float | None = None
        self._began = 0.0, 0.0  # start of the update, by the monotonic clock and in CPU seconds of the process
        self._metrics: dict[str, Any] = {}
        self._observed: dict[str, float] = {}  # metrics by the observers of the last batch
        self._marks: Mapping[str, str] = {}  # marks of the last batch, for the log
        self._plan: Mapping[str, Any] = {}  # state of the plan once the last batch is consumed

    def next(self, step: int, state: State, timeout: float) -> Any | None:
        """Return the arrays of each update by the next batch; without one publish again if other roles have restarted.

        There is no update if nothing in the batch has a gradient. With a packing, an update's are those of each
        microbatch.
        """
        version, params = step - 1, state["params"]
        take, score, fill, inputs = self._steps
        waiting_since = self._waiting_since = self._waiting_since or self._events.clock()
        scored = plan = None
        if (agreed := take(version, timeout)) is not None:
            seen = [rollout for one in self._observers for rollout in one.rollouts(agreed.headers, version)]
            scored = score(agreed, state, seen)
            plan = None if scored is None else take.plan_after(version)
        if scored is None or plan is None:
            if self._publication.restart_if_forgotten(version, params):
                self._events.append("trainer", "republish", step=version)
            return None
        self._plan = plan
        waited, self._waiting_since = self._events.clock() - waiting_since, None
        what = {"for": f"batch {version}"}
        self._events.append("trainer", "wait", seconds=round(waited, 4), step=version, **what)
        self._began = self._events.clock(), self._events.clock.cpu()
        self._publication.copied()
        filled = fill(scored, params)
        self._observed = {name: x for one in self._observers for name, x in one.before(filled).items()}
        self.flops = None if filled.flops is None else filled.flops * inputs.epochs
        self._marks = batch_marks(scored.headers)
        self._metrics = {**scored.arranged.figures, **_staleness(scored.headers, version)}
        self._metrics |= {"wait_seconds": waited, "version": step, **plan.get("figures", {})}
        self._metrics |= {f"{column.name}_bytes": column.nbytes(scored.contents) for column in fill.columns}
        return inputs(filled)

    def metrics(self) -> Mapping[str, Any]:
        """Return figures of the last batch."""
        return self._metrics

    def updated(self, step: int, state: State, metrics: Mapping[str, Any]) -> None:
        """Mark the batch as consumed and publish the new version."""
        jax.block_until_ready(metrics)
        self._metrics |= derived_metrics(metrics)
        self._metrics |= self._observed | ({} if self._scores is None else self._scores.figures())
        spent = spent_since(self._events, *self._began)
        self._events.append("trainer", "update", **spent, step=step - 1, **self._marks)
        self._publication.pool = self._plan.get("pool")
        self._metrics |= self._steps.take.consumed(step - 1)
        for part in self._beside:
            part.updated(step, state["params"])
        self._publication.publish(step, state["params"])
        self._on_update()

    def checkpoint(self, state: State) -> tuple[State, dict[str, Any]]:
        """Return the state with the versions still in use, and the state of the controller beside the step."""
        recent, versions = self._publication.saved(state["params"])
        pool = {} if self._publication.pool is None else {"pool": self._publication.pool}
        beside = {name: arrays for part in self._beside for name, arrays in part.saved().items()}
        return {**state, "recent": recent, **beside}, {"versions": versions, **pool}


def _staleness(headers: list[GroupHeader], version: int) -> dict[str, float]:
    ages = [version - rollout.oldest for header in headers for rollout in header.rollouts]
    return {"staleness_mean": float(np.mean(ages)), "staleness_max": max(ages)}
