"""The policy trainer's feed: batches of the controller before an update, publication of the weights after it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.base import Params
from axlearn_like.layers.moe.routing import RoutingLayout
from axlearn_like.run.events import EventLog
from axlearn_like.training.alignment.reference import Reference
from axlearn_like.training.step import State
from mesh import shard_batch
from mesh.batches import local_rows
from mesh.distributed import ProcessGroup
from mesh.rules import axis_sizes
from rl.objective import Objective, derived_metrics
from rl.protocol.headers import GroupHeader
from rl.protocol.messages import RolloutData
from rl.protocol.protocols import BatchSource
from rl.training.agreement import AgreedBatch, agreed_batch, fetched
from rl.training.batching import (
    Arranged,
    Batch,
    Layout,
    Minibatch,
    PackedRows,
    PaddedRows,
    arrange,
    fill_packed,
    fill_padded,
)
from rl.training.critic.values import RolloutValues
from rl.training.packing import Microbatch, Packing
from rl.training.publication import Publication
from rl.training.replay import (
    replay_packed,
    replay_padded,
    routing_bytes,
    support_bytes,
    support_packed,
    support_padded,
)
from rl.training.scoring.logprob_diff import LogprobDiff, only_version
from rl.training.scoring.reference_scores import PendingArrays, ReferenceScores, ReferenceScoring
from rl.training.updates import Updates

Filled = tuple[Batch, dict[str, jax.Array]]  # rows of this process in a microbatch, and arrays on all devices
Pending = Callable[[], dict[str, Any]] | None  # arrays of the reference, if the objective needs them


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
        correct_threshold: float,
        sizes: Mapping[str, Any],
        packing: Packing | None = None,
        updates: Updates | None = None,
        reference: Reference | None = None,
        scores: ReferenceScores | None = None,
        critic: RolloutValues | None = None,
        replay: RoutingLayout | None = None,
        support: int | None = None,
        flops: Callable[[int, int, int], float | None] = lambda prefix, samples, length: None,
        on_update: Callable[[], None] = lambda: None,
    ):
        """Connect the sources of batches.

        Args:
            diff_every: updates between comparisons by `diff`.
            correct_threshold: reward from which on a rollout is right, for metrics.
            sizes: keyword arguments of `pack_groups`.
            packing: packing of rollouts into rows; None: rows are padded to the greatest length.
            updates: by each batch; None: one.
            reference: policy that the objective compares with, if the trainer holds it.
            scores: what updates take of the policy that the objective compares with, if it does.
            critic: critic of the objective's advantage, if it has one; its own update is before the policy's.
            replay: batches carry the recorded routing, of this layout.
            support: batches carry the recorded tokens that each was drawn from, so many at most.
            flops: model FLOPs of a row.
            on_update: called once the version of an update is on its way.
        """
        self.flops: float | None = None
        self._row_flops = lru_cache(flops)
        self._controller, self._publication, self._group, self._events = controller, publication, group, events
        self._objective, self._diff, self._diff_every, self._sizes = objective, diff, diff_every, sizes
        self._packing, self._replay, self._on_update = packing, replay, on_update
        self._updates, self._reference, self._critic, self._support = updates, reference, critic, support
        self._scores = scores
        self._correct_threshold = correct_threshold
        self._waiting_since: float | None = None
        self._began = 0.0  # start of the update on the monotonic clock
        self._metrics: dict[str, Any] = {}
        self._plan: Mapping[str, Any] | None = None  # `plan_after` of the last batch
        self._skipped: Mapping[str, float] = {}  # counts of problems that the controller has left out

    def next(self, step: int, state: State, timeout: float) -> Any | None:
        """Return the arrays of each update by the next batch; without one publish again if other roles have restarted.

        There is no update if nothing in the batch has a gradient. With a packing, an update's are those of each
        microbatch.
        """
        version, params = step - 1, state["params"]
        waiting_since = self._waiting_since = self._waiting_since or time.monotonic()
        agreed = agreed_batch(self._controller, self._group, version, timeout)
        contents = scored = None
        if agreed is not None and (scored := self._scored(agreed, state)) is not None:
            headers = agreed.headers
            others: dict[str, Any] = {**scored, "correct_threshold": self._correct_threshold}
            parts = None if self._updates is None else partial(self._updates.parts, version=version)
            arranged = arrange(headers, self._objective, self._layout(), parts=parts, **others)
            drawn_by = only_version(headers) if version % self._diff_every == 0 else None
            compared = [] if drawn_by is None else self._diff.rows(headers)
            learned = self._critic.rows(headers) if self._critic is not None and self._critic.separate else []
            wanted = rollouts_of(arranged, [*compared, *learned])
            contents = fetched(agreed, self._controller, self._group, wanted)
        plan = None if agreed is None or contents is None else self._plan_after(version)
        if agreed is None or scored is None or contents is None or plan is None:
            if self._publication.restart_if_forgotten(version, params):
                self._events.append("trainer", "republish", step=version)
            return None
        self._plan = plan
        waited, self._waiting_since = time.monotonic() - waiting_since, None
        what = {"for": f"batch {version}"}
        self._events.append("trainer", "wait", seconds=round(waited, 4), step=version, **what)
        self._began = time.monotonic()
        self._publication.copied()
        minibatches = [minibatch for minibatch in arranged.minibatches if minibatch.has_gradient]
        reads_reference = self._objective.needs_reference or self._objective.needs_exact_kl
        scoring = self._scoring(params, version) if reads_reference else None
        filled, reference = self._fill_all(minibatches, contents, scoring)
        figures = dict(arranged.figures)
        if self._critic is not None and arranged.targets[1].any():
            figures |= self._critic.update(headers, contents, scored["values"], *arranged.targets)
        if drawn_by is not None:
            sampler = self._publication.params(drawn_by, version, params)
            figures |= self._diff.metrics([one for part in filled for one in part], headers, contents, sampler)
        self.flops = self._model_flops(minibatches, filled)
        self._metrics = {**figures, **_staleness(headers, version), "wait_seconds": waited, "version": step}
        self._metrics |= {**self._skipped, **plan.get("figures", {})}
        if self._replay is not None:
            self._metrics["routing_bytes"] = routing_bytes(contents)
        if self._support is not None:
            self._metrics["support_bytes"] = support_bytes(contents)
        return self._inputs(filled, reference, params)

    def _layout(self) -> Layout:
        """Return the layout of rows on the mesh in force."""
        if self._packing is None:
            return PaddedRows(**self._sizes)
        return PackedRows(self._packing, math.prod(axis_sizes("batch").values()))

    def _plan_after(self, step: int) -> Mapping[str, Any] | None:
        """Return the plan's state once the step is consumed; None: a controller that has restarted lacks it."""
        if self._plan == {}:  # run without a plan
            return {}
        return self._group.broadcast(self._controller.plan_after(step) if self._group.leader else None)

    def _scored(self, agreed: AgreedBatch, state: State) -> dict[str, np.ndarray] | None:
        """Return what the objective needs of each whole rollout; None if a process cannot get its rollouts."""
        needed = self._objective.needs_divergence, self._objective.needs_values
        if not any(needed):
            return {}
        wanted: dict[int, set[int]] = {}
        compared = self._diff.rows(agreed.headers) if needed[0] else []
        for g, n in [*compared, *([] if self._critic is None else self._critic.rows(agreed.headers))]:
            wanted.setdefault(g, set()).add(n)
        contents = fetched(agreed, self._controller, self._group, wanted)
        if contents is None:
            return None
        scored: dict[str, np.ndarray] = {}
        if needed[0]:
            reference = self._scoring(state["params"], agreed.step).rollouts
            scored["divergence"] = self._diff.divergence(agreed.headers, contents, reference)
        if needed[1]:
            assert self._critic is not None, "built with the advantage"
            scored["values"] = self._critic.values(agreed.headers, contents, state)
        return scored

    def _fill_all(
        self, minibatches: list[Minibatch], contents: RolloutData, scoring: ReferenceScoring | None
    ) -> tuple[list[list[Filled]], list[list[Pending]]]:
        """Return the microbatches of all mini-batches, and what their tokens' scores by the reference will be."""
        filled: list[list[Filled]] = []
        reference: list[list[Pending]] = []
        for minibatch in minibatches:
            filled.append([])
            reference.append([])
            for microbatch in minibatch.microbatches:
                batch, arrays = self._fill(minibatch, microbatch, contents)
                filled[-1].append((batch, arrays))
                started = None if scoring is None else scoring.start(batch, arrays, len(microbatch.rows))
                reference[-1].append(started)
        return filled, reference

    def _fill(self, minibatch: Minibatch, microbatch: Microbatch, contents: RolloutData) -> Filled:
        """Return this process's rows of a microbatch, and the arrays on the devices of all."""
        prepared = minibatch.prepared
        rows = [microbatch.rows[row] for row in local_rows(len(microbatch.rows))]
        if self._packing is None:
            samples = self._sizes["samples_per_row"] or prepared.arrays["weights"].shape[1]
            sizes = (self._sizes["max_prompt_tokens"], self._sizes["max_new_tokens"], samples)
            batch = fill_padded(rows, prepared, contents, *sizes)
            if self._replay is not None:
                batch["routing"] = replay_padded(rows, contents, self._replay, sizes)
            if self._support is not None:
                batch["support"] = support_padded(rows, contents, self._support, samples, self._sizes["max_new_tokens"])
        else:
            batch = fill_packed(rows, microbatch.length, prepared, contents, self._packing)
            if self._replay is not None:
                places = batch["first"], self._packing.prompts, microbatch.length
                batch["routing"] = replay_packed(rows, contents, self._replay, *places)
            if self._support is not None:
                batch["support"] = support_packed(rows, contents, self._support, batch["first"], microbatch.length)
        return batch, shard_batch(batch, rows=len(microbatch.rows), by_length=False)

    def _scoring(self, params: Params, version: int) -> ReferenceScoring:
        assert self._scores is not None, "a term against a reference is refused without one"
        return self._scores.of_update(params, version)

    def _inputs(self, filled: list[list[Filled]], reference: list[list[Pending]], params: Params) -> Sequence[Any]:
        """Return what the update by each mini-batch takes: with the other policies' log-probabilities of its tokens.

        Those of the policy are computed now, when it is still the one at the start of the update. Those of a reference
        role may come while earlier microbatches are used.
        """

        def other(rows: dict[str, jax.Array], pending: Pending) -> Callable[[], dict[str, jax.Array]]:
            old = {"logprobs_old": self._diff.logprobs(params, rows)} if self._objective.needs_old else {}
            return cache(partial(_complete, {**rows, **old}, pending))

        parts = [
            [other(rows, pending) for (_, rows), pending in zip(part, own, strict=True)]
            for part, own in zip(filled, reference, strict=True)
        ]
        inputs = [part[0] if self._packing is None else cache(partial(PendingArrays, part)) for part in parts]
        return PendingArrays(inputs * (1 if self._updates is None else self._updates.epochs))

    def _model_flops(self, minibatches: list[Minibatch], filled: list[list[tuple[Batch, Any]]]) -> float | None:
        """Return the model FLOPs of the rows that hold anything, in all epochs."""
        total = 0.0
        for minibatch, part in zip(minibatches, filled, strict=True):
            for microbatch, (batch, _) in zip(minibatch.microbatches, part, strict=True):
                samples = 1 if self._packing else batch["inputs"].shape[1]
                each = self._row_flops(batch["prefix"].shape[1], samples, microbatch.length)
                if each is None:
                    return None
                total += each * sum(1 for row in microbatch.rows if row)
        return total * (1 if self._updates is None else self._updates.epochs)

    def metrics(self) -> Mapping[str, Any]:
        """Return figures of the last batch."""
        return self._metrics

    def updated(self, step: int, state: State, metrics: Mapping[str, Any]) -> None:
        """Mark the batch as consumed and publish the new version."""
        jax.block_until_ready(metrics)
        self._metrics |= derived_metrics(metrics)
        self._metrics |= {} if self._scores is None else self._scores.figures()
        seconds = round(time.monotonic() - self._began, 4)
        self._events.append("trainer", "update", seconds=seconds, step=step - 1)
        self._publication.pool = None if self._plan is None else self._plan.get("pool")
        if self._group.leader:
            self._skipped = self._controller.consumed(step - 1)
        if self._reference is not None:
            self._reference.updated(step, state["params"])
        self._publication.publish(step, state["params"])
        self._on_update()

    def checkpoint(self, state: State) -> tuple[State, dict[str, Any]]:
        """Return the state with the versions still in use, and the state of the controller beside the step."""
        recent, versions = self._publication.saved(state["params"])
        reference = {} if self._reference is None else self._reference.saved()
        pool = {} if self._publication.pool is None else {"pool": self._publication.pool}
        critic = {} if self._critic is None else self._critic.saved()
        return {**state, "recent": recent, **reference, **critic}, {"versions": versions, **pool}


def _complete(rows: dict[str, jax.Array], pending: Pending) -> dict[str, jax.Array]:
    return rows if pending is None else {**rows, **pending()}


def rollouts_of(arranged: Arranged, others: list[tuple[int, int]]) -> dict[int, set[int]]:
    """Return the rollouts in the rows of this process, and others: group -> rollouts."""
    found: dict[int, set[int]] = {}
    for microbatch in arranged.microbatches:
        for row in local_rows(len(microbatch.rows)):
            for g, rollouts in microbatch.rows[row]:
                found.setdefault(g, set()).update(rollouts)
    for g, n in others:
        found.setdefault(g, set()).add(n)
    return found


def _staleness(headers: list[GroupHeader], version: int) -> dict[str, float]:
    ages = [version - rollout.oldest for header in headers for rollout in header.rollouts]
    return {"staleness_mean": float(np.mean(ages)), "staleness_max": max(ages)}
