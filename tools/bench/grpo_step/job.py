"""The small GRPO job that our stack and every peer run.

A random Qwen3-shaped decoder of 1.6 million parameters learns to write digits: the reward of a
rollout is the share of ASCII digits in its completion. Lengths are forced, so that each step does
the same work whatever the policy has learnt.

Standard library only, and Python 3.11: peers import this file inside environments of their own.
"""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class GrpoJob:
    """Sizes and settings of one run; a step is one generation of all rollouts and one update."""

    prompts: int = 8
    group: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 64
    layers: int = 4
    dim: int = 192
    ffn: int = 512
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 128  # one token per ASCII character
    norm_eps: float = 1e-6
    rope_theta: float = 1e6  # tunix 0.1.7 has this one, whatever its config says
    learning_rate: float = 1e-3
    clip: float = 0.2
    temperature: float = 1.0
    seed: int = 0

    @property
    def rollouts(self) -> int:
        """Return the number of completions of one step."""
        return self.prompts * self.group

    @property
    def new_tokens_per_step(self) -> int:
        """Return the number of tokens that one step samples."""
        return self.rollouts * self.new_tokens

    def prompt_texts(self, step: int, length: int | None = None) -> list[str]:
        """Return the prompts of step `step`: lower-case letters, the same for every system.

        Args:
            step: 0-based step.
            length: characters of each prompt; `prompt_tokens` where None. A system that puts a
                beginning-of-sequence token in front requests one less.
        """
        letters = random.Random(self.seed * 1_000_003 + step)
        size = self.prompt_tokens if length is None else length
        return ["".join(chr(letters.randrange(97, 123)) for _ in range(size)) for _ in range(self.prompts)]


def digit_share(completion: str) -> float:
    """Reward: the share of ASCII digits among the characters, 0 for an empty completion."""
    return sum("0" <= character <= "9" for character in completion) / max(len(completion), 1)
