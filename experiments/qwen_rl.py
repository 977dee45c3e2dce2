"""Reinforcement learning of small Qwen2.5 models: on one chip, on one host of a small slice, on one GPU.

The models have the sizes of Qwen2.5 0.5B and 1.5B. Runs begin with random weights and have bytes for tokens, until
checkpoints with their tokenizers can be imported: what a run shows is the machinery. The tasks are those of the demo.
Estimated by the compiler, not trained here (docs/reference/mesh-rules.md).
"""

from typing import Any

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import ConfigBase
from axlearn_like.learner import AdamW, BFloat16State, Learner, WarmupLinear
from axlearn_like.tokenizers.bytes import ByteTokenizer
from experiments.demo.data import task_mixture
from experiments.recipes.device_rules import H100, H200, TPU7X, V4, V5E, V5P, V6E, Fit, packed_rl_rules
from experiments.registry import experiment
from experiments.tasks.small import stale_grpo
from models.qwen import qwen
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.rollout.engine import RolloutEngine
from rl.tasks.mixture import TaskMixture
from rl.training.packing import Packing
from rl.training.trainer import PolicyTrainer
from rl.verification.scorers import ReasoningGymScorer
from rl.verification.service import Verifier

LENGTHS = (2048, 1024, 512)  # lengths of rows: an update's last microbatch takes the smallest that fits


@experiment
def qwen25_0_5b_rl(
    *, prompts_per_step: int = 32, samples_per_prompt: int = 8, seed: int = 0, steps: int = 500
) -> RLExperiment.Config:
    """Qwen2.5 0.5B, 32 prompts a step with 8 answers of up to 512 tokens, from one v6e chip to a slice.

    Trainer and worker on one v6e chip or one H200 (`--runtime inprocess`), or a v5e host of eight chips: four for the
    trainer, and four workers with a chip each.
    """
    return _small(
        "Qwen2.5-0.5B",
        Fit((V5P, TPU7X), 1, "context", rows=4, largest=64),
        Fit((V4, V6E), 1, "context", rows=2, largest=64),
        Fit((V5E,), 1, "context", largest=64),
        Fit((H100, H200), 1, "context", rows=2, largest=64),
        prompts_per_step=prompts_per_step,
        samples_per_prompt=samples_per_prompt,
        seed=seed,
        steps=steps,
    )


@experiment
def qwen25_1_5b_rl(
    *, prompts_per_step: int = 32, samples_per_prompt: int = 8, seed: int = 0, steps: int = 500
) -> RLExperiment.Config:
    """Qwen2.5 1.5B, 32 prompts a step with 8 answers of up to 512 tokens, from one v6e chip to a slice.

    As `qwen25_0_5b_rl`. Moments are stored in bfloat16, or one chip of v4 or v6e would not hold what an update needs.
    """
    cfg = _small(
        "Qwen2.5-1.5B",
        Fit((V5P, TPU7X), 1, "context", rows=4, largest=64),
        Fit((V4, V6E), 1, "everything", largest=2),
        Fit((V4, V6E), 4, "context", largest=64),
        Fit((V5E,), 4, "context", largest=64),
        Fit((H100, H200), 1, "context", rows=2, largest=64),
        prompts_per_step=prompts_per_step,
        samples_per_prompt=samples_per_prompt,
        seed=seed,
        steps=steps,
    )
    cfg.learner.state_storage = (BFloat16State.Config(seed=seed),)
    return cfg


def packed_grpo(
    policy: ConfigBase, tasks: TaskMixture.Config, *fits: Fit, packing: Packing.Config, processes: int, **fields: Any
) -> RLExperiment.Config:
    """GRPO of a published model on packed rows, with bytes for tokens and rollouts one update old.

    Args:
        policy: the model.
        tasks: problems that a program checks.
        fits: what was found to fit on which devices.
        packing: rows of an update.
        processes: processes of the verifier.
        fields: other fields of the experiment; `chunks` is the trainer's.
    """
    schedule = WarmupLinear.Config(peak_lr=1e-6, warmup_steps=20, total_steps=fields["num_steps"], end_lr=1e-6)
    trainer = PolicyTrainer.Config(
        checkpoint=Checkpointer.Config(save_every=20),
        packing=packing,
        # Scoring batch size: a row for each answer, divisible by every supported chip count.
        row_multiple=fields["prompts_per_step"] * fields["samples_per_prompt"],
        chunks=fields.pop("chunks"),
    )
    return RLExperiment.Config(
        policy=policy,
        tokenizer=ByteTokenizer.Config(),
        tasks=tasks,
        groups_per_lease=8,
        staleness=1,
        objective=stale_grpo(),
        learner=Learner.Config(optimizer=AdamW.Config(b2=0.98), schedule=schedule, clip_norm=1.0),
        trainer=trainer,
        verifier=Verifier.Config(scorer=ReasoningGymScorer.Config(mixture=tasks, pass_mark=1.0), processes=processes),
        mesh_rules=packed_rl_rules(*fits),
        **fields,
    )


def _small(name: str, *fits: Fit, seed: int, steps: int, **fields: int) -> RLExperiment.Config:
    return packed_grpo(
        qwen(name),
        task_mixture(seed),
        *fits,
        packing=Packing.Config(lengths=LENGTHS, prompts=512),  # several short prompts in a row
        processes=2,
        max_prompt_tokens=257,
        max_new_tokens=512,
        num_steps=steps,
        seed=seed,
        chunks=16,
        engine=RolloutEngine.Config(max_num_seqs=64, page_size=64, prefill_tokens=2048, keep_completions=False),
        evaluation=Evaluation.Config(problems_per_family=96),
        workers=4,
        **fields,
    )
