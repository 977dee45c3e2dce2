"""Supervised training and RL from Python, cell by cell: paste it into a notebook (docs/tutorials/notebook.md)."""

# %% An experiment is a value. Make it small, and read it.
import tempfile

from axlearn_like.config import set_path, to_text
from experiments.demo.config import demo
from tools.run import run

cfg = demo(seed=0)
cfg.set(num_steps=2, prompts_per_step=4, samples_per_prompt=4, groups_per_lease=2)
assert cfg.warm_start is not None and cfg.evaluation is not None
cfg.warm_start.set(num_steps=20, early_stopping=None, evaluators=())
cfg.evaluation.set(problems_per_family=4, ks=(1, 4))
set_path(cfg, "verifier.scorer.pass_mark", None)  # partial credit: after so short a start there is little else
print("\n".join(line for line in to_text(cfg).splitlines() if line.startswith("objective")))

# %% Run it with all roles in this process. Running the cell again resumes; nothing is repeated.
done = run(cfg, tempfile.mkdtemp())

# %% What came out: a row of metrics for each update, and a policy.
for row in done.metrics:
    print({name: round(row[name], 4) for name in ("step", "loss", "reward") if name in row})
print(done.policy().generate("Add the complex numbers: (3 + 4i) + (2 + 5i)", samples=2))
