"""What a metrics row tells of the run itself: speed, utilisation, memory, goodput."""

import resource
import sys
from collections.abc import Sequence
from typing import Any

from axlearn_like.operations.goodput import Account, CauseClock


class LiveFigures:
    """Computed for rows that are written only: nothing here costs a step anything."""

    def __init__(
        self,
        clock: CauseClock,
        past: Account,
        devices: Sequence[Any],
        *,
        flops: float | None = None,
        peak: float | None = None,
    ):
        """Starts counting now.

        Args:
            clock: of this process.
            past: what the event log tells up to now, this process included.
            devices: those of the mesh.
            flops: of one step, model FLOPs (see axlearn_like/operations/flops.py), if known.
            peak: FLOP/s of one device, if known.
        """
        self._clock, self._past, self._devices = clock, past, devices
        self._flops, self._peak = flops, peak
        self._told = dict(clock.totals)  # is in `past`
        self._input = 0.0

    def row(self, seconds: float, tokens: float, steps: int) -> dict[str, float]:
        """The figures of a row.

        Args:
            seconds: of wall time per step since the last row.
            tokens: learned since the last row.
            steps: since the last row.

        Returns:
            `step_seconds`, `tokens_per_second`, `input_seconds` (of a step: waiting for input while the devices had
            nothing to do), `goodput` and `time/CAUSE` (fractions of the run's whole time, see goodput.py),
            `host_memory_bytes` (peak of this process); if the devices tell, `device_memory_bytes` (the fullest one of
            this process, peak); if known, `mfu`.
        """
        totals = self._clock.totals
        waited, self._input = totals["input"] - self._input, totals["input"]
        figures = {
            "step_seconds": round(seconds, 6),
            "tokens_per_second": round(tokens / (seconds * steps), 3) if seconds > 0 else 0.0,
            "input_seconds": round(waited / steps, 6),
            "host_memory_bytes": _host_peak(),
        }
        shares = self._past.shares({cause: spent - self._told.get(cause, 0.0) for cause, spent in totals.items()})
        figures["goodput"] = round(shares.pop("step", 0.0), 4)
        figures |= {f"time/{cause}": round(share, 4) for cause, share in shares.items()}
        if (memory := _device_peak(self._devices)) is not None:
            figures["device_memory_bytes"] = memory
        if self._flops is not None and self._peak is not None and seconds > 0:
            figures["mfu"] = round(self._flops / (seconds * self._peak * len(self._devices)), 4)
        return figures


def _host_peak() -> int:
    """Bytes; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _device_peak(devices: Sequence[Any]) -> int | None:
    local = [device.memory_stats() for device in devices if device.process_index == devices[0].client.process_index()]
    return max((stats["peak_bytes_in_use"] for stats in local if stats and "peak_bytes_in_use" in stats), default=None)
