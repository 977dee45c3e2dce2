"""The loop over the steps, with all that happens between them, in its order."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from axlearn_like.checkpoint.tiers import CheckpointTiers
from axlearn_like.input import SupervisedInput
from axlearn_like.operations.goodput import CauseClock
from axlearn_like.operations.profiler import Profiler
from axlearn_like.operations.sdc import SDCCheck
from axlearn_like.operations.step_metrics import StepLog
from axlearn_like.training.evaluators import Evaluator
from axlearn_like.training.step import State, Step
from mesh import shard_batch


@dataclasses.dataclass
class TrainingLoop:
    """One process's part of a run.

    The devices are never waited for but where something needs their results: one step late for the metrics, before an
    evaluation and before a save.
    """

    state: State
    step: int  # completed
    num_steps: int
    log_every: int
    program: Step
    data: SupervisedInput
    log: StepLog
    clock: CauseClock
    tiers: CheckpointTiers
    evaluators: Sequence[Evaluator]
    averaged: Callable[[Any, Any], Any]  # (parameters, optimizer state) -> the learner's average of the parameters
    profiler: Profiler
    check: SDCCheck | None
    beat: Callable[[int], None]  # tells the watchdog that something was completed

    def run(self, reached: Callable[..., bool], stopped: Callable[[], bool]) -> bool:
        """Steps until `num_steps`, until `reached(rows, before=step)` or until `stopped()`; saves at the end.

        Returns:
            Whether there is nothing left to do.
        """

        def finished() -> bool:
            # Rows of earlier steps only: a resumed run then ends where an uninterrupted one does.
            return self.step >= self.num_steps or reached(self.log.rows, before=self.step)

        scalars = None
        while not finished() and not stopped():
            self._advance()
            scalars = self._evaluate()
            if self.tiers.should_save(self.step):
                self._save(scalars)
        done = finished()
        self._save(scalars)
        with self.clock.spending("checkpoint"):
            self.tiers.wait()
        return done

    def _advance(self) -> None:
        clock, log, step = self.clock, self.log, self.step + 1
        clock.to("input")
        batch = shard_batch(next(self.data), rows=self.data.batch_size)
        if not log.devices_idle:
            clock.cause = "step"  # they had not finished meanwhile: nobody waited
        clock.to("step")
        with self.profiler.window(step, log.pending):
            if self.check is None or not self.check.due(step):
                self.state, metrics = self.program(self.state, batch)
            else:
                with clock.spending("sdc_check"):
                    self.state, metrics = self.check.run(self.program, step, self.state, batch)
        self.step = step
        self.tiers.check()
        log.add(step, metrics | self.data.metrics(), wanted=step % self.log_every == 0 or step == self.num_steps)
        self.beat(step)
        clock.completed(step)

    def _evaluate(self) -> dict[str, float] | None:
        """What the evaluators that are due found; None if none is."""
        due = [e for e in self.evaluators if self.step % e.every == 0 or self.step == self.num_steps]
        if not due:
            return None
        jax.block_until_ready(self.log.pending)  # what is left of the step is not the evaluation's
        scalars: dict[str, float] = {}
        with self.clock.spending("evaluation"):
            for evaluator in due:
                scalars |= evaluator.run(self._params_for(evaluator), self.step)
                self.beat(self.step)
        self.log.extend(self.step, scalars)
        return scalars

    def _params_for(self, evaluator: Evaluator) -> Any:
        params = self.state["params"]
        return self.averaged(params, self.state["opt_state"]) if getattr(evaluator, "averaged", False) else params

    def _save(self, scalars: dict[str, float] | None) -> None:
        self.log.flush()  # the row first: a resume from this checkpoint would never write it again
        with self.clock.spending("checkpoint"):
            self.tiers.save(self.step, self.state, {"input": self.data.state()}, scalars)
        self.beat(self.step)
