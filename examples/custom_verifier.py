"""A reward function of your own, scored in processes with a deadline (docs/how-to/add-a-verifier.md).

axl rl examples/custom_verifier.py:short_answers --runtime inprocess --set num_steps=2 --set warm_start.num_steps=20
"""

from experiments.demo.config import demo
from rl.experiment import RLExperiment
from rl.verification.scorers import FunctionScorer
from rl.verification.service import Verifier


def brevity(problem_id: int, answer: str) -> float:
    """Return 1 for an empty answer, falling by 0.1 with each character, and 0 from ten characters on."""
    del problem_id
    return max(0.0, 1.0 - len(answer) / 10)


def short_answers(*, seed: int = 0) -> RLExperiment.Config:
    """RL demo that rewards short answers instead of correct ones.

    The function runs in two processes of its own. An answer on which it raises, or takes more than a second, gets the
    status "error" or "timeout", which is counted and shown, and no reward.
    """
    cfg = demo(seed=seed)
    scorer = FunctionScorer.Config(function=brevity)
    cfg.verifier = Verifier.Config(scorer=scorer, processes=2, deadline_s=1.0)
    return cfg
