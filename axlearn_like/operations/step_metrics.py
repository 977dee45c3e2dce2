"""Metrics of steps on their way to disk, screen and other writers, and those of the run: speed, memory, goodput."""

import resource
import sys
import time
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

import jax
import numpy as np

from axlearn_like.operations.goodput import Account, CauseClock
from axlearn_like.operations.writers import Writer
from axlearn_like.run.metrics import MetricsWriter
from axlearn_like.run.progress import Progress

_BY_CLOCK = {"time", "wait_seconds", "step_seconds", "input_seconds", "tokens_per_second", "goodput", "mfu"}
_BY_CLOCK |= {"host_memory_bytes", "device_memory_bytes", "reference_wait_seconds"}


def without_clock(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a row that are the same in every run of the same config: no times, speeds or memory."""
    return {name: value for name, value in row.items() if name not in _BY_CLOCK and not name.startswith("time/")}


class StepMetrics:
    """Speed, utilisation, memory and goodput; computed for rows that are written only, so steps pay nothing."""

    def __init__(
        self,
        clock: CauseClock,
        past: Account,
        devices: Sequence[Any],
        *,
        peak: float | None = None,
    ):
        """Start counting now.

        Args:
            past: account of the event log up to now, this process included.
            peak: FLOP/s of one device, if known.
        """
        self._clock, self._past, self._devices = clock, past, devices
        self._peak = peak
        self._accounted = dict(clock.totals)  # included in `past`
        self._input = 0.0

    def row(self, seconds: float, tokens: float, steps: int, flops: float | None = None) -> dict[str, float]:
        """Return the metrics of a row.

        Args:
            seconds: wall time per step since the last row.
            tokens: learned since the last row.
            steps: since the last row.
            flops: model FLOPs of these steps (see axlearn_like/operations/flops.py), if known.

        Returns:
            `step_seconds`, `tokens_per_second`, `input_seconds` (per step: waiting for input while the devices had
            nothing to do), `goodput` and `time/CAUSE` (fractions of the run's whole time, see goodput.py),
            `host_memory_bytes` (peak of this process); where the devices report it, `device_memory_bytes` (peak of the
            fullest one of this process); where known, `mfu`.
        """
        totals = self._clock.totals
        waited, self._input = totals["input"] - self._input, totals["input"]
        figures = {
            "step_seconds": round(seconds, 6),
            "tokens_per_second": round(tokens / (seconds * steps), 3) if seconds > 0 else 0.0,
            "input_seconds": round(waited / steps, 6),
            "host_memory_bytes": _host_peak(),
        }
        since = {cause: spent - self._accounted.get(cause, 0.0) for cause, spent in totals.items()}
        shares = self._past.shares(since)
        figures["goodput"] = round(shares.pop("step", 0.0), 4)
        figures |= {f"time/{cause}": round(share, 4) for cause, share in shares.items()}
        if (memory := _device_peak(self._devices)) is not None:
            figures["device_memory_bytes"] = memory
        if flops is not None and self._peak is not None and seconds > 0:
            figures["mfu"] = round(flops / (seconds * steps * self._peak * len(self._devices)), 4)
        return figures


class StepLog:
    """Writer of metrics rows, one step late: reading metrics at once would make the devices wait."""

    def __init__(
        self,
        writer: MetricsWriter,
        others: Sequence[Writer],
        progress: Progress | None,
        run_metrics: StepMetrics,
        start: int,
        rows: MutableSequence[dict[str, Any]],
        *,
        tokens: str = "tokens",
    ):
        """Start after step `start`. `rows`: those of earlier processes of this run; further ones are appended.

        `tokens`: the metric that counts the tokens learned by a step.
        """
        self._tokens_metric = tokens
        self._writer, self._others, self._progress = writer, others, progress
        self._run_metrics, self.rows = run_metrics, rows
        self._pending: tuple[int, dict[str, Any], bool] | None = None
        self._now = self._written = (start, time.monotonic())
        self._tokens, self._flops = 0.0, 0.0
        self._flops_known = True

    @property
    def pending(self) -> dict[str, Any] | None:
        """The metrics of the last step, perhaps still being computed."""
        return self._pending and self._pending[1]

    @property
    def devices_idle(self) -> bool:
        """True if nothing that was dispatched is still being computed."""
        return self._pending is None or self._pending[1]["loss"].is_ready()

    def add(
        self, step: int, metrics: Mapping[str, jax.Array | float], *, wanted: bool, flops: float | None = None
    ) -> None:
        """Hold the metrics of `step`, and its model FLOPs if known; write those of the step before."""
        self.flush()
        self._flops += flops or 0.0
        self._flops_known &= flops is not None
        self._pending = (step, dict(metrics), wanted)
        self._now = (step, time.monotonic())

    def extend(self, step: int, scalars: dict[str, float]) -> None:
        """Add an evaluator's scalars to the row of `step`, which is then written in any case."""
        assert self._pending is not None and self._pending[0] == step
        self._pending = (step, {**self._pending[1], **scalars}, True)

    def flush(self) -> None:
        """Read the pending metrics, which waits for the devices, and write the row if it is wanted."""
        if self._pending is None:
            return
        (step, metrics, wanted), self._pending = self._pending, None
        values = jax.device_get(metrics)
        tokens = float(np.asarray(values[self._tokens_metric]))
        self._tokens += tokens
        if wanted:
            # The loop's period since the last row: with metrics read one step late, the step time.
            (now_step, now), (last_step, last) = self._now, self._written
            steps, self._written = now_step - last_step, self._now
            flops = self._flops if self._flops_known else None
            measured = self._run_metrics.row((now - last) / steps, self._tokens, steps, flops)
            self._tokens, self._flops, self._flops_known = 0.0, 0.0, True
            row = self._writer.write(step, {**values, **measured})
            self.rows.append(row)
            for other in self._others:
                other.write(row)
        if self._progress:
            self._progress.update(step, loss=float(values["loss"]), tokens=tokens)


def _host_peak() -> int:
    """Return the peak memory of this process in bytes; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _device_peak(devices: Sequence[Any]) -> int | None:
    local = [device.memory_stats() for device in devices if device.process_index == devices[0].client.process_index()]
    return max((stats["peak_bytes_in_use"] for stats in local if stats and "peak_bytes_in_use" in stats), default=None)
