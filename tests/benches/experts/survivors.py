"""Trained samples under kills: an elastic trainer against one that starts again from its checkpoint.

python -m tests.benches.experts.survivors RUN_DIR: a member of a run.

A trainer over `jax.distributed` ends as a whole with any of its processes. The baseline is the same trainer with the
same exchange, all of whose members are killed where the elastic one loses one.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import to_text
from axlearn_like.elastic.elastic import Elastic
from axlearn_like.elastic.membership import MemberTimeouts
from axlearn_like.elastic.supervisor import MemberSupervisor
from axlearn_like.operations.step_metrics import without_clock
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.trainer import Trainer
from mesh.programs.compilation import enable_compilation_cache
from tests.axlearn_like.tiny import tiny_trainer

_BATCH = 8


def config() -> Trainer.Config:
    """Return a tiny trainer that ends when it is stopped."""
    cfg = tiny_trainer(
        10_000_000, evaluators=(), elastic=Elastic.Config(parts=_BATCH), checkpoint=Checkpointer.Config()
    )
    cfg.input.set(batch_size=_BATCH)
    return cfg


def survived(
    cfg: Trainer.Config, module: Sequence[str], folder: Path, plan: tuple[int, int, float], *, one: bool
) -> dict[str, Any]:
    """Run members, killing one or all so many times; returns figures from the first update to `every` after the last.

    Args:
        cfg: config of the trainer.
        module: module that is run as a member, with its arguments.
        folder: run directory.
        plan: members, kills, and seconds between kills, before the first and after the last.
        one: kill one member at a time, else all.
    """
    members, kills, every = plan
    began: list[float] = []  # unix times: of the first update, then of each kill
    command = [sys.executable, "-m", *module]
    with RunDirectory.open(folder, to_text(cfg)) as run:
        supervisor = MemberSupervisor(command, members, EventLog(run.events_path), MemberTimeouts(60.0, 300.0))

        def ended() -> bool:
            now = time.time()
            if not began and (rows := read_rows(run.metrics_path)):
                began.append(rows[0]["time"])
            if began and len(began) <= kills and now >= began[0] + len(began) * every:
                pids = list(supervisor.pids.values())
                for pid in pids[len(began) % members :][:1] if one else pids:
                    os.kill(pid, signal.SIGKILL)
                began.append(now)
            return bool(began) and now >= began[0] + (kills + 1) * every

        supervisor.run(ended)
        rows, events = read_rows(run.metrics_path), read_rows(run.events_path)
    first, last = began[0], began[0] + (kills + 1) * every
    resized = [row for row in events if row["event"] == "resized" and row["members_before"] and row["time"] <= last]
    return {
        "rows": {row["step"]: without_clock(row) for row in rows},
        "steps": max(row["step"] for row in rows if row["time"] <= last),
        "steps_before": max(row["step"] for row in rows if row["time"] <= began[1]),
        "before_s": began[1] - first,
        "shrunk_s": [row["seconds"] for row in resized if row["members"] < row["members_before"]],
        "grown_s": [row["seconds"] for row in resized if row["members"] > row["members_before"]],
        "steps_lost": sum(row["steps_lost"] for row in resized),
        "bytes": max((row["bytes"] for row in resized), default=0),
    }


def check_same_rows(folder: Path, other: Path) -> bool:
    """Return True if the metrics of all steps of a run are those of another, but for its clock."""
    ours, theirs = (
        {row["step"]: without_clock(row) for row in read_rows(run / "metrics.jsonl")} for run in (folder, other)
    )
    return all(theirs.get(step) == row for step, row in ours.items())


def figures(quick: bool) -> dict[str, Any]:
    """Return the ratio of samples, and what resizes took."""
    members, kills, every = (2, 1, 20.0) if quick else (6, 3, 60.0)
    with tempfile.TemporaryDirectory() as folder:
        found: list[dict[str, Any]] = []
        for one, name in ((True, "elastic"), (False, "restart")):
            path = Path(folder) / name
            module = ["tests.benches.experts.survivors", str(path)]
            found.append(survived(config(), module, path, (members, kills, every), one=one))
        ours, theirs = found
    both = sorted(ours["rows"].keys() & theirs["rows"].keys())
    undisturbed = ours["steps_before"] / ours["before_s"] * every * (kills + 1)
    return {
        "samples_vs_restart": round(ours["steps"] / theirs["steps"], 3),
        "samples_vs_undisturbed": round(ours["steps"] / undisturbed, 3),
        "elastic_members": members,
        "elastic_kills": kills,
        "elastic_seconds_between_kills": every,
        "elastic_samples": _BATCH * ours["steps"],
        "restart_samples": _BATCH * theirs["steps"],
        "elastic_steps_lost": ours["steps_lost"],
        "restart_steps_lost": theirs["steps_lost"],
        "shrunk_s": ours["shrunk_s"],
        "grown_s": ours["grown_s"],
        "fetched_bytes": ours["bytes"],
        "elastic_identical": all(ours["rows"][step] == theirs["rows"][step] for step in both),
        "elastic_compared_steps": len(both),
    }


if __name__ == "__main__":
    enable_compilation_cache()
    config().build().run(sys.argv[1], progress=False)
