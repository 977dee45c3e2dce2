"""The loop over the updates of a run, with everything that happens between them, in its order."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax

from axlearn_like.checkpoint.tiers import CheckpointTiers
from axlearn_like.operations.goodput import CauseClock
from axlearn_like.operations.profiler import Profiler
from axlearn_like.operations.sdc import SDCCheck
from axlearn_like.operations.step_metrics import StepLog
from axlearn_like.training.evaluators import Evaluator
from axlearn_like.training.step import State, Step

_WAIT = 1.0  # seconds for a batch, after which the loop looks whether it is to stop


class UpdateSource(Protocol):
    """Batches before updates and what follows them: all that differs between supervised and policy training."""

    waits: bool  # `updated` waits for the devices, so metrics are written at once instead of one step late
    tokens: str  # the metric that counts the tokens learned by a step
    flops: float | None  # model FLOPs of the update by the last batch, if known

    def next(self, step: int, state: State, timeout: float) -> Any | None:
        """Return the arrays of update number `step`; None if they are not there within `timeout` seconds."""
        ...

    def metrics(self) -> Mapping[str, Any]:
        """Return metrics of the last batch."""
        ...

    def updated(self, step: int, state: State, metrics: Mapping[str, Any]) -> None:
        """Act on a completed update, before its metrics are written and its state is saved."""
        ...

    def checkpoint(self, state: State) -> tuple[State, dict[str, Any]]:
        """Return the arrays and JSON-able extras of a checkpoint."""
        ...


@dataclasses.dataclass
class TrainingLoop:
    """One process's part of a run.

    Nothing waits for the devices but what needs their results: metrics (one step late), evaluations, saves and a source
    that publishes the weights.
    """

    state: State
    step: int  # completed
    num_steps: int
    log_every: int
    step_fn: Step
    source: UpdateSource
    log: StepLog
    clock: CauseClock
    tiers: CheckpointTiers
    evaluators: Sequence[Evaluator]
    averaged: Callable[[Any, Any], Any]  # (parameters, optimizer state) -> the learner's average of the parameters
    profiler: Profiler
    sdc_check: SDCCheck | None
    reached: Callable[..., bool]  # (metrics rows, before=step): what the run is for, before `num_steps`
    seen: Callable[[State], State]  # the state as evaluators take it
    beat: Callable[[int], None]  # reports a completed step, evaluation or save to the watchdog
    _scalars: dict[str, float] | None = None  # scalars of the last update's evaluation, if there was one

    def finished(self) -> bool:
        """Return True if there is nothing left to do: all updates are made, or early stopping says so."""
        # Rows of earlier steps only: a resumed run then ends where an uninterrupted one does.
        return self.step >= self.num_steps or self.reached(self.log.rows, before=self.step)

    def run(self, stopped: Callable[[], bool]) -> bool:
        """Update until the run is finished or until `stopped()`; save at the end. Returns True if it is finished."""
        while not (done := self.finished()) and not stopped():
            self.advance(_WAIT)
        self.save()
        with self.clock.spending("checkpoint"):
            self.tiers.wait()
        return done

    def advance(self, timeout: float = 0.0) -> bool:
        """Make one update and do all that is due after it; False if its batch is not there within `timeout` seconds."""
        if (batch := self.take(timeout)) is None:
            return False
        with self.profiled():
            state, metrics = self._update(batch)
        self.complete(state, metrics)
        return True

    def take(self, timeout: float = 0.0) -> Any | None:
        """Return the batch of the next update, which is to follow; None if it is not there within `timeout` seconds."""
        self.clock.to("input")
        batch = self.source.next(self.step + 1, self.state, timeout)
        if batch is not None:
            if not self.log.devices_idle:
                self.clock.cause = "step"  # the devices were still busy: nobody waited
            self.clock.to("step")
        return batch

    def profiled(self) -> AbstractContextManager[Any]:
        """Return the context of the next update, which a profile may be of."""
        return self.profiler.window(self.step + 1, self.log.pending)

    def complete(self, state: State, metrics: Mapping[str, Any]) -> None:
        """Do all that is due after the update by the batch that was taken."""
        clock, log = self.clock, self.log
        self.state, self.step = state, self.step + 1
        step = self.step
        self.source.updated(step, self.state, metrics)
        self.tiers.check()
        wanted = step % self.log_every == 0 or step == self.num_steps or self.tiers.compares(step)
        logged = {name: value for name, value in metrics.items() if not name.endswith("_by_layer")}
        log.add(step, {**self.source.metrics(), **logged}, wanted=wanted, flops=self.source.flops)
        self.beat(step)
        clock.completed(step)
        self._scalars = self._evaluate()
        if self.source.waits:
            log.flush()
        self.tiers.hold(step, lambda: self.source.checkpoint(self.state))
        if self.tiers.should_save(step):
            self.save()
        clock.to("input")

    def save(self) -> None:
        """Start to write a checkpoint of the last update, if there is none yet."""
        self.log.flush()  # the row first: a resume from this checkpoint would never write it again
        with self.clock.spending("checkpoint"):
            state, extras = self.source.checkpoint(self.state)
            self.tiers.save(self.step, state, extras, self._measured())
        self.beat(self.step)

    def _update(self, batch: Any) -> tuple[State, Mapping[str, Any]]:
        if self.sdc_check is None or not self.sdc_check.due(self.step + 1):
            return self.step_fn(self.state, batch)
        with self.clock.spending("sdc_check"):
            return self.sdc_check.run(self.step_fn, self.step + 1, self.state, batch)

    def _evaluate(self) -> dict[str, float] | None:
        """Run the evaluators that are due and return their scalars; None if none is."""
        due = [e for e in self.evaluators if self.step % e.every == 0 or self.step == self.num_steps]
        if not due:
            return None
        jax.block_until_ready(self.log.pending)  # the rest of the step is not the evaluation's time
        scalars: dict[str, float] = {}
        with self.clock.spending("evaluation"):
            state = self.seen(self.state)
            for evaluator in due:
                params = state["params"]
                if evaluator.averaged:
                    params = self.averaged(params, state["opt_state"])
                scalars |= evaluator.run(params, self.step)
                self.beat(self.step)
        self.log.extend(self.step, scalars)
        return scalars

    def _measured(self) -> dict[str, Any] | None:
        """Return the metrics of this step by which checkpoints are compared; None if they are not known.

        Evaluators were not due, or the run was stopped between two rows.
        """
        row = self.log.rows[-1] if self.log.rows else {"step": None}
        if row["step"] != self.step or (self.evaluators and self._scalars is None):
            return self._scalars
        return {**row, **(self._scalars or {})}
