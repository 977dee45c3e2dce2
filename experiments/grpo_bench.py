"""Small GRPO job that compares stacks: 1.6 M parameters learn to write digits (docs/benchmarks/index.md)."""

import random
from collections.abc import Iterable
from typing import override

from axlearn_like.config import ConfigBase, Configurable, config_function, replace
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.tokenizers.bytes import ByteTokenizer
from experiments.registry import experiment
from models.tiny import tiny
from rl.experiment import RLExperiment
from rl.objective.presets import grpo
from rl.protocol.messages import Problem
from rl.rollout.engine import RolloutEngine
from rl.training.trainer import PolicyTrainer
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer


class RandomLetters(Configurable):
    """Problem i asks with `length` random lower-case letters; there is nothing to know."""

    class Config(ConfigBase["RandomLetters"]):
        length: int = 30

    def __init__(self, cfg: Config):
        self._length = cfg.length

    def train(self, index: int) -> Problem:
        """Return problem `index`."""
        letters = random.Random(index)
        text = "".join(chr(letters.randrange(97, 123)) for _ in range(self._length))
        return Problem(index, "letters", text, "", {})


class AsciiTokenizer(ByteTokenizer):
    """One token for each of the 128 ASCII characters; no character is special but 1, which begins a prompt."""

    class Config(ByteTokenizer.Config):
        vocab_size: int = 259

    bos = 1

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.vocab_size = 128  # the model's; the field counts what its parent class needs

    @override
    def decode(self, ids: Iterable[int]) -> str:
        return "".join(map(chr, ids))


@config_function
def digit_share(problem_id: int, answer: str) -> float:
    """The share of ASCII digits among the characters of an answer."""
    return sum("0" <= character <= "9" for character in answer) / max(len(answer), 1)


@experiment
def grpo_bench(
    *,
    prompts: int = 8,
    group: int = 8,
    prompt_tokens: int = 32,
    new_tokens: int = 64,
    layers: int = 4,
    dim: int = 192,
    ffn: int = 512,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 128,
    rope_theta: float = 10_000.0,
    learning_rate: float = 1e-3,
    num_steps: int = 1000,
) -> RLExperiment.Config:
    """GRPO on forced lengths: every step does the same work, whatever has been learnt."""
    policy = tiny(
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=ffn,
    )
    replace(policy, Rope.Config, lambda rope: rope.set(theta=rope_theta))
    return RLExperiment.Config(
        policy=policy,
        tokenizer=AsciiTokenizer.Config(),
        tasks=RandomLetters.Config(length=prompt_tokens - 2),  # two further tokens: a beginning and a newline
        max_prompt_tokens=prompt_tokens,
        max_new_tokens=new_tokens,
        stop_at_eos=False,
        num_steps=num_steps,
        prompts_per_step=prompts,
        samples_per_prompt=group,
        objective=grpo().set(old_policy="current"),
        trainer=PolicyTrainer.Config(row_multiple=prompts),
        learner=Learner.Config(
            optimizer=AdamW.Config(b2=0.999, weight_decay=1e-4),
            schedule=Constant.Config(lr=learning_rate),
        ),
        engine=RolloutEngine.Config(max_num_seqs=prompts * group, keep_completions=False),
        verifier=InlineVerifier.Config(scorer=FunctionScorer.Config(function=digit_share)),
        evaluation=None,
    )
