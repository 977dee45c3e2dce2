"""Common parts of experiments on one task: a 0.4 M-parameter decoder, fine-tuned, then improved by GRPO."""

from typing import Any

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import ConfigBase
from axlearn_like.input import FirstFit, SupervisedInput
from axlearn_like.learner import AdamW, Learner, WarmupLinear
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.trainer import Trainer
from models.tiny import tiny
from rl.experiment import RLExperiment
from rl.objective import Objective, TruncatedImportance
from rl.objective.presets import grpo
from rl.tasks.mixture import TaskMixture
from rl.training.trainer import PolicyTrainer
from rl.verification.scorers import Scorer
from rl.verification.service import Verifier

# Training problems by index: RL reads those before, supervised fine-tuning from here on, validation behind.
SUPERVISED_START = 1_000_000
VALIDATION_START = 2_000_000


def small_sft(
    source: ConfigBase[Any], *, vocab_size: int, seq_len: int, batch_size: int, steps: int, seed: int
) -> Trainer.Config:
    """Supervised fine-tuning on a source with a field `start`, such as `SupervisedSource`."""
    packing = FirstFit.Config(window=256)  # problems are made as they are read: few at once, or the start is slow
    source = source.clone(num_examples=1_000_000, start=SUPERVISED_START)
    rows = SupervisedInput.Config(source=source, seq_len=seq_len, batch_size=batch_size, rows=packing, seed=seed)
    unseen = rows.clone(source=source.clone(num_examples=1_000, start=VALIDATION_START))
    return Trainer.Config(
        model=tiny(vocab_size=vocab_size, dim=96, num_heads=3, num_kv_heads=1, hidden=256),
        input=rows,
        learner=Learner.Config(
            optimizer=AdamW.Config(b2=0.98, weight_decay=0.1),
            schedule=WarmupLinear.Config(peak_lr=3e-3, warmup_steps=50, total_steps=steps, end_lr=2.5e-3),
        ),
        checkpoint=Checkpointer.Config(save_every=100, keep=1),
        mesh={"data": -1},
        num_steps=steps,
        evaluators=(LossEvaluator.Config(input=unseen, batches=4),),
        seed=seed,
    )


def small_rl(
    supervised: Trainer.Config,
    tokenizer: ConfigBase[Any],
    tasks: TaskMixture.Config,
    scorer: Scorer.Config,
    **fields: Any,
) -> RLExperiment.Config:
    """GRPO after fine-tuning; `fields` are the experiment's: its sizes, its learning rate, its engine."""
    return RLExperiment.Config(
        policy=supervised.model,
        tokenizer=tokenizer,
        tasks=tasks,
        prompts_per_step=16,
        groups_per_lease=8,
        staleness=1,
        seed=supervised.seed,
        warm_start=supervised,
        objective=stale_grpo(),
        trainer=PolicyTrainer.Config(row_multiple=4),
        verifier=Verifier.Config(scorer=scorer, processes=1),
        **fields,
    )


def stale_grpo() -> Objective.Config:
    """GRPO on rollouts that are one update old; prompts whose answers are all alike are left out."""
    importance = TruncatedImportance.Config(cap=2.0)
    return grpo().set(old_policy="current", importance=importance, zero_variance="drop")


def small_learner(peak_lr: float, end_lr: float, *, warmup: int, steps: int) -> Learner.Config:
    """AdamW for RL, with a rate that falls."""
    schedule = WarmupLinear.Config(peak_lr=peak_lr, warmup_steps=warmup, total_steps=steps, end_lr=end_lr)
    return Learner.Config(optimizer=AdamW.Config(b2=0.98), schedule=schedule, clip_norm=0.5)
