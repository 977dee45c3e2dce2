"""RL on rows of a file with a reward function of your own, from a small model (docs/how-to/bring-a-reward.md).

AXL_DATA=/my/data axl rl examples/own_reward.py:own_reward --runtime inprocess
"""

import re

from axlearn_like.checkpoint.convert import StartFrom
from experiments.demo.config import demo
from experiments.small_llama import TOKENIZER, small_model
from rl.experiment import RLExperiment
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.datasets import rows
from rl.verification.verifiers.reward import reward


def score(answer: str, reference: str) -> dict[str, float]:
    """Return 1 for the right number behind ####, 0.2 for any number there, 0.1 for a shown step <<...>>."""
    found = re.search(r"####\s*(-?[\d,]+)\s*$", answer)
    right = found is not None and found[1].replace(",", "") == reference.split("####")[1].strip().replace(",", "")
    return {"right": float(right), "form": 0.2 * (found is not None), "steps": 0.1 * ("<<" in answer)}


def own_reward(
    *, files: str = "$AXL_DATA/gsm8k/train.jsonl.gz", start: str = "runs/small_llama"
) -> RLExperiment.Config:
    """The 5.2 M-parameter Llama of `axl train small_llama`, improved on the rows of `files` by `score`."""
    cfg = demo()
    cfg.set(policy=small_model(), tokenizer=TOKENIZER.clone(), start_from=StartFrom.Config(path=start), warm_start=None)
    cfg.tasks = TaskMixture.Config(families=(rows(files, prompt="question", answer="answer").set(label="mine"),))
    cfg.verifier.set(scorer=reward(score, cfg.tasks), deadline_s=5.0)
    cfg.set(
        max_prompt_tokens=192,
        max_new_tokens=128,
        num_steps=20,
        prompts_per_step=4,
        samples_per_prompt=8,
        groups_per_lease=4,
    )  # tokens; a small run
    return cfg
