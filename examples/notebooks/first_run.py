# %% [markdown]
# # First run: a policy that learns in a few minutes
#
# Supervised fine-tuning and then reinforcement learning of a decoder of 0.4 M parameters, on the CPU of this
# machine, without a login. Python 3.12 and jax 0.11.2 or newer are needed. The file is a notebook in percent
# format: Jupyter (with jupytext), VS Code and PyCharm open it cell by cell.
#
# Where the package is not installed, as on Colab, the first cell asks for it: the path or address of the wheel, or
# `git+https://...` of the repository. Restart the session if it asks for that. In a checkout: `pip install -e
# ".[rl,notebook]"`.

# %%
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

if importlib.util.find_spec("axlearn_like") is None:
    place = input("wheel (path or https://...), or git+https://... of the repository: ").strip()
    wanted = f"{place}[rl,notebook]" if Path(place).is_file() else f"axlearn-like[rl,notebook] @ {place}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", wanted], check=True)

import jax

if sys.version_info < (3, 12) or tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
    raise SystemExit(
        f"jax {jax.__version__} on Python {sys.version[:4]}: choose a runtime with Python 3.12, jax 0.11.2"
    )
HERE = Path(os.environ.get("AXL_NOTEBOOK_RUNS") or tempfile.mkdtemp())
print(jax.__version__, HERE)

# %% [markdown]
# An experiment is a value. It is shown as a tree of fields; edits are assignments.

# %%
from experiments.demo.config import demo

cfg = demo(seed=0, steps=60)
cfg.warm_start.set(num_steps=400)  # pyright: ignore[reportOptionalMemberAccess]
cfg.evaluation.set(problems_per_family=32)  # pyright: ignore[reportOptionalMemberAccess]
cfg.learner.schedule.set(peak_lr=4e-4, end_lr=4e-4)
cfg  # pyright: ignore[reportUnusedExpression]

# %% [markdown]
# One task: the question, the right answer, and what the verifier says of it.

# %%
problem = cfg.tasks.build().train(0)
print(problem)

# %% [markdown]
# Run it, all roles in this process. Run the cell again, and it goes on where it was; the interrupt button stops it
# cleanly. `logprob_diff_max` compares the engine that draws tokens with the trainer that scores them: 0, or a bit
# of rounding.

# %%
from tools.run import live_plot, plot_rows, run

done = run(cfg, HERE / "first", on_step=live_plot("reward", "logprob_diff_max", phase="rl"))
assert done.finished
plot_rows([row for row in done.metrics if row["phase"] == "rl"], ["reward", "entropy"])

# %% [markdown]
# Did it learn? The mean reward of the first ten updates, and of the last ten.

# %%
rewards = done.series("reward", "rl")
before, after = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
print(f"reward {before:.3f} -> {after:.3f}; log-probabilities within {max(done.series('logprob_diff_max')):.1e}")
assert after > before + 0.03, "it has not learned"

# %% [markdown]
# The same questions before and after.

# %%
done.compare()

# %% [markdown]
# Another objective is one line. It starts from the supervised policy of the run above.

# %%
from axlearn_like.checkpoint.convert import StartFrom
from rl.objective.presets import cispo

other = cfg.clone(objective=cispo(), num_steps=10, evaluation=None)
other.set(warm_start=None, start_from=StartFrom.Config(path=str(done.path / "warm_start")))
swapped = run(other, HERE / "cispo")
print([round(reward, 2) for reward in swapped.series("reward", "rl")])

# %% [markdown]
# The same experiment on TPUs: the plan, and the manifests that would ask for them. `launch(...)` submits them, and
# `on="local"` carries them out on this machine.

# %%
from tools.commands.launch import plan_lines
from tools.launch.launch import Launch
from tools.launch.plan import plan_launch
from tools.launch.submission import submission

workers = {"workers": 2, "worker_devices": "v6e:1x1", "worker_capacity": "spot"}
tpu = Launch.Config(experiment="demo", sets=("trainer.mesh={'fsdp': -1}",), devices="v5p:2x2x1", **workers)
plan = plan_launch(tpu)
files, bundle = submission(tpu, plan)
print("\n".join(plan_lines(plan)), *files, sep="\n")
print(files["workers.yaml"][:1500])

# %% [markdown]
# The report of the run, in the cell. The directory holds checkpoints, metrics and samples; `axl rl` continues it,
# too.

# %%
done.report()
