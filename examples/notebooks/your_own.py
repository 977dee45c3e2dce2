# %% [markdown]
# # Your own layer, your own reward
#
# Two classes or functions of this notebook enter an experiment by one line each.

# %%
import os
import tempfile
from pathlib import Path

import jax
from flax import nnx

from axlearn_like.config import REQUIRED, ConfigBase, replace
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import Layer, fan_in_init, param
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.linear import project
from experiments.demo.config import demo, demo_sft
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from tools.run import live_plot, run

HERE = Path(os.environ.get("AXL_NOTEBOOK_RUNS") or tempfile.mkdtemp())


# %% [markdown]
# A layer is a class with a `Config`: what it needs, with types. `dim` is filled in by the layer around it.


# %%
class SquaredReLU(Layer):
    """down(relu(up(x))^2), without gate and biases (Primer, So et al. 2021, arXiv 2109.08668)."""

    class Config(ConfigBase["SquaredReLU"]):
        dim: int = REQUIRED
        hidden: int = REQUIRED

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.up_df = param(rngs, (cfg.dim, cfg.hidden), ("embed", "hidden"), fan_in_init(cfg.dim))
        self.down_fd = param(rngs, (cfg.hidden, cfg.dim), ("hidden", "embed"), fan_in_init(cfg.hidden))

    def __call__(self, x_btd: jax.Array, routing: object = None) -> tuple[jax.Array, Aux]:
        del routing
        up_btf = project(x_btd, self.up_df[...], out_axis="hidden")
        return project(jax.nn.relu(up_btf) ** 2, self.down_fd[...], in_axis="hidden", like=x_btd), Aux()


# %% [markdown]
# It takes the place of every SwiGLU of the supervised demo, in one line.

# %%
supervised = demo_sft(seed=0).set(num_steps=60, evaluators=(), early_stopping=None)
replace(supervised, SwiGLU.Config, lambda swiglu: SquaredReLU.Config(hidden=swiglu.hidden * 3 // 2))
trained = run(supervised, HERE / "layer", on_step=live_plot("loss"), quiet=True)
losses = trained.series("loss")
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < 0.7 * losses[0], "it has not learned"


# %% [markdown]
# A reward is a function of the answer. This one pays for brevity, and the policy soon says little.


# %%
def brevity(problem_id: int, answer: str) -> float:
    """Return 1 for an empty answer, and 0.1 less with each character."""
    del problem_id
    return max(0.0, 1.0 - len(answer) / 10)


cfg = demo(seed=0, steps=25).set(warm_start=None, evaluation=None)
cfg.learner.schedule.set(peak_lr=3e-3, warmup_steps=2)
cfg.verifier = InlineVerifier.Config(scorer=FunctionScorer.Config(function=brevity))
short = run(cfg, HERE / "reward", on_step=live_plot("reward", "completion_length"), quiet=True)
rewards = short.series("reward", "rl")
print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
assert rewards[-1] > rewards[0] + 0.1, "it has not learned"
