"""Supervised training and RL in one process, cell by cell: paste it into a notebook (docs/tutorials/notebook.md)."""

# %% An experiment is a value. Make it small, and read it.
import tempfile
from pathlib import Path

from axlearn_like.config import set_path, to_text
from axlearn_like.run.metrics import read_rows
from experiments.reasoning_gym import demo
from rl.runtime.run import RLRun

cfg = demo(seed=0)
cfg.set(num_steps=2, prompts_per_step=4, samples_per_prompt=4, groups_per_lease=2)
assert cfg.warm_start is not None and cfg.evaluation is not None
cfg.warm_start.set(num_steps=20, early_stopping=None, evaluators=())
cfg.evaluation.set(problems_per_family=4, ks=(1, 4))
set_path(cfg, "verifier.scorer.pass_mark", None)  # partial credit: after so short a start there is little else
print("\n".join(line for line in to_text(cfg).splitlines() if line.startswith("objective")))

# %% Run it with all roles in this process. Running the cell again resumes; nothing is repeated.
run_dir = Path(tempfile.mkdtemp()) / "run"
report = RLRun(cfg.build()).run(run_dir, runtime="inprocess")
assert report is not None

# %% What came out: a row of metrics for each update.
for row in read_rows(run_dir / "metrics.jsonl"):
    print({name: round(row[name], 4) for name in ("step", "loss", "reward") if name in row})
