"""Metrics of steps on their way to disk, screen and other writers, one step late."""

import time
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

import jax
import numpy as np

from axlearn_like.operations.step_metrics import LiveFigures
from axlearn_like.operations.writers import Writer
from axlearn_like.run.metrics import MetricsWriter, Progress


class StepLog:
    """Holds metrics back by one step: reading them at once would make the devices wait."""

    def __init__(
        self,
        writer: MetricsWriter,
        others: Sequence[Writer],
        progress: Progress | None,
        figures: LiveFigures,
        start: int,
        rows: MutableSequence[dict[str, Any]],
    ):
        """`rows`: those of earlier processes of this run, up to step `start`; further ones are appended."""
        self._writer, self._others, self._progress = writer, others, progress
        self._figures, self.rows = figures, rows
        self._pending: tuple[int, dict[str, Any], bool] | None = None
        self._now = self._written = (start, time.monotonic())
        self._tokens = 0.0

    @property
    def pending(self) -> dict[str, Any] | None:
        """The metrics of the last step, perhaps still being computed."""
        return self._pending and self._pending[1]

    @property
    def devices_idle(self) -> bool:
        """Whether nothing that was dispatched is still being computed."""
        return self._pending is None or self._pending[1]["loss"].is_ready()

    def add(self, step: int, metrics: Mapping[str, jax.Array | float], *, wanted: bool) -> None:
        """Reads and writes what the step before left, and takes that of `step`."""
        self.flush()
        self._pending = (step, dict(metrics), wanted)
        self._now = (step, time.monotonic())

    def extend(self, step: int, scalars: dict[str, float]) -> None:
        """Adds an evaluator's scalars to the row of `step`, which is then written in any case."""
        assert self._pending is not None and self._pending[0] == step
        self._pending = (step, {**self._pending[1], **scalars}, True)

    def flush(self) -> None:
        """Reads what is pending, which waits for the devices, and writes the row if it is wanted."""
        if self._pending is None:
            return
        (step, metrics, wanted), self._pending = self._pending, None
        values = jax.device_get(metrics)
        tokens = float(np.asarray(values["tokens"]))
        self._tokens += tokens
        if wanted:
            # The loop's period since the last row: with metrics read one step late, the step time.
            (now_step, now), (last_step, last) = self._now, self._written
            steps, self._written = now_step - last_step, self._now
            figures = self._figures.row((now - last) / steps, self._tokens, steps)
            self._tokens = 0.0
            row = self._writer.write(step, {**values, **figures})
            self.rows.append(row)
            for other in self._others:
                other.write(row)
        if self._progress:
            self._progress.update(step, loss=float(values["loss"]), tokens=tokens)
