"""The curves of a small mixture with replicas and without, on eight devices of a CPU.

python -m tests.benches.experts.curves STEPS
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from axlearn_like.run.metrics import read_rows
from axlearn_like.training.replicas import Replicas
from experiments.demo.config import demo_moe_sft


def curves(steps: int) -> dict[str, Any]:
    """Return the largest relative difference of losses, and the busiest device over the mean in the last plan."""
    every = max(1, steps // 4)
    replicas = Replicas.Config(slots=1, every=every)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, choice in (("without", None), ("with", replicas), ("again", replicas)):
            cfg = demo_moe_sft(seed=0).set(num_steps=steps)
            cfg.set(mesh={"expert": 4, "fsdp": 2}, replicas=choice, evaluators=(), early_stopping=None, mesh_rules=())
            cfg.set(microbatches=1, log_every=1).build().run(Path(folder) / name, progress=False)
            found[name] = [row["loss"] for row in read_rows(Path(folder) / name / "metrics.jsonl")]
        events = read_rows(Path(folder) / "with" / "events.jsonl")
    planned = [row for row in events if row["event"] == "replicas_planned"]
    apart = np.abs(np.array(found["with"]) / np.array(found["without"]) - 1)
    return {
        "loss_difference": float(apart.max()),
        "identical": found["with"] == found["again"],
        "trained_busiest_to_mean": planned[-1]["busiest_to_mean_before"],
        "trained_busiest_to_mean_without": planned[-1]["busiest_to_mean_without"],
    }


if __name__ == "__main__":
    print(json.dumps(curves(int(sys.argv[1]))))
