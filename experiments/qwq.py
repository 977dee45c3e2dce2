"""Reinforcement learning of a 32B reasoning model with long answers, at the scale for which RLAX was made."""

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import set_path
from axlearn_like.layers.decoder import Decoder
from axlearn_like.learner import AdamW, Learner, WarmupLinear
from axlearn_like.tokenizers.bytes import ByteTokenizer
from experiments.recipes.device_rules import H200, TPU7X, V5P, Fit, packed_rl_rules
from experiments.registry import experiment
from models.qwen import qwen
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.objective import TruncatedImportance
from rl.objective.presets import grpo
from rl.rollout.engine import RolloutEngine
from rl.tasks.family import TaskFamily
from rl.tasks.mixture import TaskMixture
from rl.training.packing import Packing
from rl.training.trainer import PolicyTrainer
from rl.verification.scorers import ReasoningGymScorer
from rl.verification.service import Verifier


@experiment
def qwq_32b_rl(
    *, prompts_per_step: int = 256, samples_per_prompt: int = 16, seed: int = 0, steps: int = 500
) -> RLExperiment.Config:
    """QwQ 32B, 256 prompts of up to 4,097 tokens a step, 16 answers of up to 16,384 each, on 512 or 1,024 v5p chips.

    Answers are packed into rows of 32,768 tokens, a row to a chip at a time. A fleet with 512 or 1,024 chips for the
    trainer and 64 workers is planned by the compiler (docs/reference/mesh-rules.md). Not trained here: a run begins
    with random weights and has bytes for tokens.
    """
    tasks, max_new_tokens = _tasks(seed), 16_384
    return RLExperiment.Config(
        policy=_policy(),
        tokenizer=ByteTokenizer.Config(),
        tasks=tasks,
        max_prompt_tokens=4097,  # a prefix of 4,096: the last token of a prompt begins every answer
        max_new_tokens=max_new_tokens,
        num_steps=steps,
        prompts_per_step=prompts_per_step,
        samples_per_prompt=samples_per_prompt,
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
            # Answers differ in length by far. The last rows of an update fit into the shorter ones.
            packing=Packing.Config(lengths=(2 * max_new_tokens, max_new_tokens)),
            row_multiple=prompts_per_step
            * samples_per_prompt,  # scoring batch size, divisible by every supported chip count
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
                ("tpu7x-8", {"mesh": {"tensor": 8}}),
                ("tpu-v6e-8", {"mesh": {"tensor": 8}, "max_num_seqs": 16}),
                (f"{H200}-8", {"mesh": {"tensor": 8}}),
                (".*", {}),
            ),
        ),
        verifier=Verifier.Config(scorer=ReasoningGymScorer.Config(mixture=tasks, pass_mark=1.0), processes=16),
        evaluation=Evaluation.Config(problems_per_family=64),
        # 36,864 tokens of a row on one chip: there is no way of sharing work but by rows.
        mesh_rules=packed_rl_rules(Fit((V5P, TPU7X), 512, "context")),
        workers=64,
    )


def _policy() -> Decoder.Config:
    """QwQ 32B, with one backward pass of attention: of its long rows 18 parts of dq, of 0.35 GiB each."""
    cfg = qwen("QwQ-32B")
    set_path(cfg, "block.attention.kernel.kernels.0.fused_backward", True)
    return cfg


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
