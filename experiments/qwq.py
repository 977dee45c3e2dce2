"""Reinforcement learning of a 32B reasoning model with long answers, at the scale for which RLAX was made."""

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.learner import AdamW, Learner, WarmupLinear
from axlearn_like.tokenizers.bytes import ByteTokenizer
from experiments.pretraining import LARGE_FSDP, TPU_OPTIONS
from experiments.registry import experiment
from models.qwen import qwen
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.objective import TruncatedImportance
from rl.objective.presets import grpo
from rl.rollout.engine import RolloutEngine
from rl.tasks.family import TaskFamily
from rl.tasks.mixture import TaskMixture
from rl.training.trainer import PolicyTrainer
from rl.verification.scorers import ReasoningGymScorer
from rl.verification.service import Verifier

ROWS_OF = 2  # answers of a prompt that share a row of the trainer: with more, what the backward pass needs does not fit


@experiment
def qwq_32b_rl(*, groups: int = 256, samples: int = 16, seed: int = 0, steps: int = 500) -> RLExperiment.Config:
    """QwQ 32B, 256 prompts of up to 4,097 tokens a step, 16 answers of up to 16,384 each, on 512 or 1,024 v5p chips.

    The update is compiled for both (docs/benchmarks/aot-experiments.md):
    6.2 GB of arguments and 83 of temporary arrays a chip, of
    102.8, estimated at 144 s on 512 chips and 72 s on 1,024. Not trained here: a run begins with random weights and has
    bytes for tokens.
    """
    tasks = _tasks(seed)
    rows = groups * samples // ROWS_OF
    return RLExperiment.Config(
        policy=qwen("QwQ-32B"),
        tokenizer=ByteTokenizer.Config(),
        tasks=tasks,
        max_prompt=4097,  # a prefix of 4,096: the last token of a prompt begins every answer
        max_new=16_384,
        num_steps=steps,
        groups=groups,
        samples=samples,
        groups_per_lease=8,
        staleness=1,
        seed=seed,
        objective=grpo().set(
            old_policy="current",
            importance=TruncatedImportance.Config(cap=2.0),  # rollouts are one update old
            zero_variance="drop",
        ),
        learner=Learner.Config(
            optimizer=AdamW.Config(b2=0.98),
            schedule=WarmupLinear.Config(peak_lr=1e-6, warmup_steps=20, total_steps=steps, end_lr=1e-6),
            clip_norm=1.0,
        ),
        trainer=PolicyTrainer.Config(
            checkpoint=Checkpointer.Config(save_every=20),
            row_multiple=rows,
            samples_per_row=ROWS_OF,
            chunks=32,
        ),
        engine=RolloutEngine.Config(
            max_num_seqs=64,
            page_size=64,
            prefill_tokens=4096,
            keep_completions=False,
            mesh_rules=(
                ("tpu-v5p-8", {"mesh": {"tensor": 8}}),
                # Half the chips have room for fewer sequences beside two versions of the weights.
                ("tpu-v5p-4", {"mesh": {"tensor": 4}, "max_num_seqs": 32}),
                (".*", {}),
            ),
        ),
        verifier=Verifier.Config(scorer=ReasoningGymScorer.Config(mixture=tasks, pass_mark=1.0), processes=16),
        evaluation=Evaluation.Config(problems_per_family=64),
        mesh_rules=(
            # A row to a chip at a time, and no way of sharing work but by rows.
            ("tpu-v5p-512", _rule(rows // 512)),
            ("tpu-v5p-1024", _rule(rows // 1024)),
            (".*", {"trainer.mesh": {"fsdp": -1}, "policy.remat": "everything"}),
        ),
        workers=64,
    )


def _rule(microbatches: int) -> dict[str, object]:
    return {
        "trainer.mesh": {"data": -1, "fsdp": LARGE_FSDP},
        "trainer.microbatches": max(1, microbatches),
        "trainer.compiler_options": TPU_OPTIONS,
        "policy.remat": "context",
    }


def _tasks(seed: int) -> TaskMixture.Config:
    """Families whose answers take thought, and are checked by a program."""
    return TaskMixture.Config(
        families=(
            TaskFamily.Config(name="countdown"),
            TaskFamily.Config(name="leg_counting"),
            TaskFamily.Config(name="simple_equations"),
            TaskFamily.Config(name="chain_sum", params={"min_terms": 8, "max_terms": 16}),
        ),
        seed=seed,
        heldout_every=4,
    )
