"""Early stopping by a training metric."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, override

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from mesh import UserError, did_you_mean


class EarlyStopping(Configurable):
    """End of training when the mean of a metric over the last logged rows reaches a value.

    It looks at training metrics only, so what is measured on held-out data stays held out.
    """

    class Config(ConfigBase["EarlyStopping"]):
        metric: str = "accuracy"
        at_least: float = REQUIRED
        rows: int = 5  # logged rows averaged

        @override
        def check_fields(self) -> None:
            self.require_least(1, "rows")

    def __init__(self, cfg: Config):
        self._cfg = cfg

    def __call__(self, rows: Sequence[Mapping[str, Any]], before: float = math.inf) -> bool:
        """Return True if the last rows of steps below `before` reach the value (UserError: no row has the metric)."""
        if rows and not any(self._cfg.metric in row for row in rows):
            hint = did_you_mean(self._cfg.metric, [name for name in rows[-1] if name not in ("step", "phase")])
            raise UserError(f"early_stopping.metric={self._cfg.metric!r} is in no row of metrics.jsonl{hint}")
        usable = (row for row in reversed(rows) if self._cfg.metric in row and row.get("step", 0) < before)
        last = [row[self._cfg.metric] for row, _ in zip(usable, range(self._cfg.rows), strict=False)]
        return len(last) == self._cfg.rows and sum(last) / len(last) >= self._cfg.at_least
