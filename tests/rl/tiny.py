"""An RL experiment small enough for tests: a few thousand parameters, sixteen rollouts an update, no warm start.

The policy starts from random weights, so reasoning-gym would score nearly every answer 0 and nothing would be learned.
The reward is therefore the share of ASCII characters in the answer: dense, spread over [0, 1], and easy to raise. It is
a function that can be trusted, so it is scored inline; `verifier=Verifier.Config(...)` puts it into processes.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import to_text
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import Params, build_abstract, split
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.norm import RMSNorm
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.run.directory import RunDirectory
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.objective.presets import grpo
from rl.protocol.messages import Group, Prompt, Rollout, Score
from rl.rollout.engine import RolloutEngine
from rl.tasks.family import TaskFamily
from rl.tasks.mixture import TaskMixture
from rl.training.trainer import PolicyTrainer
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer

PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "Spell this word backward (example: sun -> nus): ",
)


def tiny_experiment(**changes: Any) -> RLExperiment.Config:
    """Four updates of 4 prompts x 4 samples in two leases; `changes` are fields of the experiment's config."""
    tasks = tiny_tasks()
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES)
    cfg = RLExperiment.Config(
        policy=tiny_policy(tokenizer.vocab_size),
        tokenizer=tokenizer,
        tasks=tasks,
        max_prompt_tokens=12,
        max_new_tokens=6,
        num_steps=4,
        prompts_per_step=4,
        samples_per_prompt=4,
        groups_per_lease=2,
        objective=grpo().set(old_policy="current", zero_variance="drop"),
        learner=Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-2), clip_norm=1.0),
        trainer=PolicyTrainer.Config(
            checkpoint=Checkpointer.Config(save_every=2, keep=2), row_multiple=4, logprob_diff_every=1
        ),
        engine=RolloutEngine.Config(max_num_seqs=8),
        verifier=InlineVerifier.Config(scorer=FunctionScorer.Config(function=ascii_share)),
        evaluation=Evaluation.Config(problems_per_family=3, ks=(1, 4), shown_per_family=1),
    )
    return cfg.set(**changes)


def tiny_tasks(seed: int = 0) -> TaskMixture.Config:
    """Two families whose prompts have at most 11 tokens."""
    return TaskMixture.Config(
        families=(
            TaskFamily.Config(name="spell_backward", params={"min_word_len": 3, "max_word_len": 5}),
            TaskFamily.Config(
                name="chain_sum", params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
            ),
        ),
        seed=seed,
        heldout_every=4,
    )


def tiny_policy(vocab_size: int = 272, num_layers: int = 1) -> Decoder.Config:
    attention = Attention.Config(num_heads=4, num_kv_heads=2, head_dim=4, qk_norm=RMSNorm.Config())
    block = Block.Config(attention=attention, feed_forward=SwiGLU.Config(hidden=24))
    return Decoder.Config(vocab_size=vocab_size, dim=16, num_layers=num_layers, block=block)


def tiny_params(policy: Decoder.Config, seed: int = 0, scale: float = 4.0) -> Params:
    """Random weights made by numpy: nothing to compile, and far enough from zero that no distribution is uniform."""
    abstract = split(build_abstract(policy))[1]
    rng = np.random.default_rng(seed)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if path[-1].key == "scale":  # of a norm
            return rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
        return (scale * 0.15 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, abstract)


def ascii_share(problem_id: int, answer: str) -> float:
    """The reward: share of ASCII characters; 0 for an empty answer."""
    del problem_id
    return sum(character.isascii() for character in answer) / len(answer) if answer else 0.0


def tiny_run(path: Path, cfg: RLExperiment.Config) -> RunDirectory:
    """The run directory of an experiment, opened."""
    return RunDirectory.open(path, to_text(cfg))


def make_prompt(number: int, length: int = 5, family: str = "chain_sum") -> Prompt:
    """A prompt of random bytes, the same for the same number."""
    tokens = np.random.default_rng(number).integers(0, 256, length).astype(np.int32)
    return Prompt(number, family, tokens)


def make_rollout(prompt: Prompt, sample: int, tokens: Any, *, version: int = 0, stopped: bool = True) -> Rollout:
    """A rollout with these tokens and made-up log-probabilities."""
    length = len(tokens)
    return Rollout(
        prompt_id=prompt.id,
        sample_id=sample,
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.full(length, -2.0, np.float32),
        versions=np.full(length, version, np.int32),
        action_mask=np.ones(length, bool),
        finish_reason="stop" if stopped else "length",
    )


def make_group(prompt: Prompt, completions: Any, rewards: Any, *, version: int = 0) -> Group:
    """A scored group of these completions."""
    rollouts = tuple(make_rollout(prompt, i, tokens, version=version) for i, tokens in enumerate(completions))
    return Group(prompt, rollouts, tuple(Score(float(reward)) for reward in rewards))
