# %% [markdown]
# # Reading a run
#
# A run directory is plain files: JSON lines for metrics, events and samples. `FinishedRun` reads them, pandas takes
# them as they are.

# %%
import os
from pathlib import Path

from tools.run import FinishedRun

done = FinishedRun(Path(os.environ.get("AXL_NOTEBOOK_RUN") or "runs/demo"))

# %%
try:
    import pandas as pd  # pyright: ignore[reportMissingImports]
except ImportError:
    raise SystemExit("pip install pandas") from None

metrics = pd.DataFrame(done.metrics)
updates = metrics[metrics["phase"] == "rl"].set_index("step")
print(updates[["reward", "entropy", "grad_norm"]].describe())

# %% [markdown]
# Where the time went, and how far rollouts were behind.

# %%
seconds = [name for name in updates.columns if name.startswith("time/")]
print(updates[seconds].mean().sort_values(ascending=False).head())

# %% [markdown]
# What the policy said, and what it was paid for it, before and after.

# %%
samples = pd.DataFrame(done.samples)
assert {"question", "answer", "reward"} <= set(samples.columns)
print(samples.groupby("phase")["reward"].agg(["count", "mean"]))

# %% [markdown]
# Who did what, when: events are rows, too.

# %%
from axlearn_like.run.metrics import read_rows

events = pd.DataFrame(read_rows(done.path / "events.jsonl"))
print(events.groupby(["role", "event"]).size().sort_values(ascending=False).head(10))
