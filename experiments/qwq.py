"""Reinforcement learning of a 32B reasoning model with long answers, at the scale for which RLAX was made."""

from axlearn_like.config import set_path
from axlearn_like.layers.decoder import Decoder
from experiments.qwen_rl import packed_grpo
from experiments.recipes.device_rules import H200, TPU7X, V5P, Fit
from experiments.registry import experiment
from models.qwen import qwen
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.rollout.engine import RolloutEngine
from rl.tasks.family import TaskFamily
from rl.tasks.mixture import TaskMixture
from rl.training.packing import Packing


@experiment
def qwq_32b_rl(
    *, prompts_per_step: int = 256, samples_per_prompt: int = 16, seed: int = 0, steps: int = 500
) -> RLExperiment.Config:
    """QwQ 32B, 256 prompts of up to 4,097 tokens a step, 16 answers of up to 16,384 each, on 512 or 1,024 v5p chips.

    Answers are packed into rows of 32,768 tokens, a row to a chip at a time. A fleet with 512 or 1,024 chips for the
    trainer and 64 workers is planned by the compiler (docs/reference/mesh-rules.md). Not trained here: a run begins
    with random weights and has bytes for tokens.
    """
    max_new_tokens = 16_384
    return packed_grpo(
        _policy(),
        _tasks(seed),
        # 36,864 tokens of a row on one chip: there is no way of sharing work but by rows.
        Fit((V5P, TPU7X), 512, "context"),
        # Answers differ in length by far. The last rows of an update fit into the shorter ones.
        packing=Packing.Config(lengths=(2 * max_new_tokens, max_new_tokens)),
        processes=16,
        max_prompt_tokens=4097,  # a prefix of 4,096: the last token of a prompt begins every answer
        max_new_tokens=max_new_tokens,
        num_steps=steps,
        prompts_per_step=prompts_per_step,
        samples_per_prompt=samples_per_prompt,
        seed=seed,
        chunks=32,
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
        evaluation=Evaluation.Config(problems_per_family=64),
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
