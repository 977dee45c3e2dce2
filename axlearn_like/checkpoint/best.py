"""The best checkpoints by a metric, kept besides the newest ones.

Compared with `BestN` of orbax.checkpoint 0.12: that needs the metric at the save, also of steps that are not evaluated,
and keeps the best among the newest in one directory, without an index of values; ours have a path of their own.
"""

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, override

from axlearn_like.checkpoint.versions import list_steps
from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from mesh.errors import UserError, did_you_mean
from mesh.files.bounded import read_json
from mesh.files.hard_links import link_tree


class KeepBest(Configurable):
    """The best of the checkpoints whose metric is known, in `checkpoints/best/`: hard links, no second copy.

    `best.json` there lists the values, the best first, which `RUN@best` names.
    """

    class Config(ConfigBase["KeepBest"]):
        # Metric of an evaluator, such as eval_loss; of the metrics row, such as reward; or in RL of `evaluate_every`,
        # such as evaluation/pass@1.
        metric: str = REQUIRED
        order: Literal["lowest", "highest"] = "lowest"
        keep: int = 1

        @override
        def check_fields(self) -> None:
            self.require_least(1, "keep")

    def __init__(self, cfg: Config, *, directory: Path):
        self._cfg, self._checkpoints = cfg, directory
        self._directory = directory / "best"
        self._pending = self._directory / "pending"
        self._index = self._directory / "best.json"

    def values(self) -> dict[int, float]:
        """Return step -> value of the kept checkpoints, the best first."""
        if not self._index.exists():
            return {}
        recorded = read_json(self._index)
        if self._other(recorded):
            return {}
        return self._sorted({int(step): value for step, value in recorded["steps"].items()})

    def _other(self, recorded: Mapping[str, Any]) -> bool:
        """Return True if the kept ones are the best by another metric: values of two are not compared."""
        cfg = self._cfg
        return (recorded["metric"], recorded.get("order", cfg.order)) != (cfg.metric, cfg.order)

    def _set_aside(self) -> None:
        """Rename what is the best by another metric, as after `--force`: `best-eval_loss` beside the new `best`."""
        if not self._index.exists() or not self._other(recorded := read_json(self._index)):
            return
        stem = re.sub(r"[^\w.-]+", "_", f"best-{recorded['metric']}")
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        aside = next(path for path in map(self._checkpoints.joinpath, names) if not path.exists())
        self._directory.rename(aside)
        if (aside / self._pending.name).exists():
            self._directory.mkdir()
            (aside / self._pending.name).rename(self._pending)

    def value(self, scalars: Mapping[str, Any]) -> float:
        """Return the metric among these scalars. UserError: it is not there."""
        if self._cfg.metric not in scalars:
            near = did_you_mean(self._cfg.metric, scalars)
            raise UserError(f"keep_best.metric={self._cfg.metric!r}: neither evaluators nor metrics have it{near}")
        value = scalars[self._cfg.metric]
        return math.nan if value is None else float(value)

    def hold(self, step: int) -> None:
        """Keep the finished checkpoint of `step` until its value is known, whatever happens to the newest ones."""
        if not (self._pending / str(step)).exists() and step not in self.values():
            link_tree(self._checkpoints / str(step), self._pending / str(step))

    def pending(self) -> list[int]:
        """Return the steps that are held, oldest first."""
        return list_steps(self._pending)

    def offer(self, step: int, value: float) -> bool:
        """Keep the finished checkpoint of `step` if it is among the best, and drop the worst.

        It may be one that is held; those before it are not held any longer, as values come in the order of the steps.
        """
        try:
            return self._offer(step, value)
        finally:
            for held in (held for held in self.pending() if held <= step):
                shutil.rmtree(self._pending / str(held), ignore_errors=True)

    def _offer(self, step: int, value: float) -> bool:
        kept = dict(list(self._sorted({**self.values(), step: value}).items())[: self._cfg.keep])
        if step not in kept or value != value:
            return False
        self._set_aside()
        held = self._pending / str(step)
        link_tree(held if held.exists() else self._checkpoints / str(step), self._directory / str(step))
        partial = self._index.with_suffix(".json.tmp")
        partial.write_text(json.dumps({"metric": self._cfg.metric, "order": self._cfg.order, "steps": kept}))
        os.replace(partial, self._index)
        for path in self._directory.glob("*"):
            if path.name.isdigit() and int(path.name) not in kept:
                shutil.rmtree(path)
        return True

    def _sorted(self, values: dict[int, float]) -> dict[int, float]:
        """Sort, best first; among equal values the earlier step is the better."""
        sign = 1 if self._cfg.order == "lowest" else -1
        return dict(sorted(values.items(), key=lambda item: (item[1] != item[1], sign * item[1], item[0])))
