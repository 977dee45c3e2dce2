"""The demo with another objective and longer words (docs/tutorials/first-experiment.md)."""

from axlearn_like.config import replace, set_path
from axlearn_like.learner import Constant
from experiments.demo.config import demo
from rl.experiment import RLExperiment
from rl.objective.presets import cispo
from rl.tasks.family import TaskFamily


def mine(*, seed: int = 0) -> RLExperiment.Config:
    """CISPO instead of GRPO, a constant learning rate, words of up to ten letters."""
    cfg = demo(seed=seed)

    # A component is swapped by assigning another config; nothing else needs to know.
    cfg.objective = cispo().set(old_policy="current", zero_variance="drop")
    cfg.learner.schedule = Constant.Config(lr=1e-4)

    # Any field can also be reached by its path, as `--set` does on the command line.
    set_path(cfg, "trainer.checkpoint.save_every", 10)

    # One edit for every config of a class, wherever it is (tasks, supervised data, verifier). Matching nothing is an
    # error, and so is a mistyped family or parameter: the message names the nearest right one.
    def longer_words(family: TaskFamily.Config) -> TaskFamily.Config:
        return family.set(params={**family.params, "max_word_len": 10}) if family.name == "spell_backward" else family

    replace(cfg, TaskFamily.Config, longer_words)
    return cfg
