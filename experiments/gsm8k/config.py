"""RL on rows of a file: GSM8K, a small model, and its final number as the reward (docs/how-to/bring-your-data.md)."""

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.input import SupervisedInput
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.training.trainer import Trainer
from experiments.gsm8k.data import gsm8k
from experiments.registry import experiment
from experiments.small_llama import TOKENIZER, small_model
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.objective.presets import grpo
from rl.rollout.engine import RolloutEngine
from rl.tasks.mixture import TaskMixture
from rl.tasks.supervised import SupervisedSource
from rl.training.trainer import PolicyTrainer
from rl.verification.scorers import ReasoningGymScorer
from rl.verification.service import Verifier


@experiment
def gsm8k_small(*, folder: str = "$AXL_DATA/gsm8k", steps: int = 20, seed: int = 0) -> RLExperiment.Config:
    """A 5.2 M-parameter Llama learns the form of worked answers by supervision, then RL on the same rows.

    So small a model solves next to none of them: this shows how rows get in, not a score.
    """
    tasks = TaskMixture.Config(families=(gsm8k(f"{folder}/train.jsonl.gz", f"{folder}/test.jsonl.gz"),), seed=seed)
    policy = small_model()
    learner = Learner.Config(optimizer=AdamW.Config(b2=0.98), schedule=Constant.Config(lr=1e-3), clip_norm=1.0)
    source = SupervisedSource.Config(mixture=tasks, tokenizer=TOKENIZER.clone(), num_examples=7_000)
    supervised = Trainer.Config(
        model=policy,
        input=SupervisedInput.Config(source=source, seq_len=512, batch_size=8, long="split", seed=seed),
        learner=learner,
        checkpoint=Checkpointer.Config(save_every=100, keep=1),
        mesh={"data": -1},
        num_steps=200,
        seed=seed,
    )
    return RLExperiment.Config(
        policy=policy,
        tokenizer=TOKENIZER.clone(),
        tasks=tasks,
        max_prompt_tokens=192,  # longer questions are left out, and counted
        max_new_tokens=96,
        num_steps=steps,
        prompts_per_step=4,
        samples_per_prompt=4,
        seed=seed,
        warm_start=supervised,
        objective=grpo().set(old_policy="current", zero_variance="drop"),
        learner=learner.clone(schedule=Constant.Config(lr=1e-5)),
        trainer=PolicyTrainer.Config(row_multiple=4),
        engine=RolloutEngine.Config(max_num_seqs=16, keep_completions=False),
        verifier=Verifier.Config(scorer=ReasoningGymScorer.Config(mixture=tasks), processes=1),
        evaluation=Evaluation.Config(problems_per_family=16, ks=(1, 4)),
    )
