"""The small jobs of supervised fine-tuning and of DPO that our trainer and TRL's run, from the same files.

The decoder has the shape of that of `grpo_step`. It learns completions of random prompts (SFT), or to prefer digits to
letters (DPO). Every step sees the same examples, so that in whatever order a system takes its data, it computes the
same sums, and losses can be compared step by step.

Standard library only, and Python 3.11: peers import this file inside environments of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

EOS = 127  # ends a completion

# Tokens of prompts and completions. The first 32 of GSM8K's training problems and answers by GPT-2's tokenizer: 163 a
# text, 344 in the longest.
GSM8K = (
    ((36, 45), (28, 51), (58, 74), (50, 99), (25, 64), (61, 126), (54, 63), (104, 108))
    + ((103, 93), (61, 283), (74, 132), (94, 111), (37, 68), (66, 74), (24, 61), (60, 141))
    + ((49, 86), (72, 197), (64, 131), (58, 84), (68, 66), (46, 106), (69, 86), (52, 119))
    + ((77, 48), (84, 118), (53, 78), (78, 153), (46, 59), (49, 167), (54, 117), (62, 104))
)
EQUAL = ((32, 64),) * 64  # those of `grpo_step`


@dataclass(frozen=True)
class PostTrainingJob:
    """Sizes and settings of one run; a step is one update by all examples."""

    lengths: tuple[tuple[int, int], ...]  # tokens of each prompt, and of its completion with the end of the text
    layers: int = 4
    dim: int = 192
    ffn: int = 512
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 128  # one token per ASCII character
    learning_rate: float = 1e-4
    clip: float = 1.0  # norm of the gradient
    beta: float = 0.1  # of DPO
    seed: int = 0

    def texts(self) -> list[dict[str, str]]:
        """Return prompts and completions of SFT, without the end of the text."""
        draw = random.Random(self.seed)
        return [
            {"prompt": _letters(draw, prompt), "completion": _digits(draw, completion - 1)}
            for prompt, completion in self.lengths
        ]

    def pairs(self) -> list[dict[str, str]]:
        """Return half as many prompts with chosen and rejected completions, without the end of the text."""
        draw = random.Random(self.seed)
        return [
            {
                "prompt": _letters(draw, prompt),
                "chosen": _digits(draw, chosen - 1),
                "rejected": _letters(draw, rejected - 1),
            }
            for prompt, chosen, rejected in self.pair_lengths()
        ]

    def pair_lengths(self) -> Iterator[tuple[int, int, int]]:
        """Yield tokens of prompt, chosen and rejected completion: those of a text, and of the completion of another."""
        half = len(self.lengths) // 2
        for (prompt, chosen), (_, rejected) in zip(self.lengths[:half], self.lengths[half:], strict=True):
            yield prompt, chosen, rejected


def _letters(draw: random.Random, size: int) -> str:
    return "".join(chr(97 + draw.randrange(26)) for _ in range(size))


def _digits(draw: random.Random, size: int) -> str:
    return "".join(str(draw.randrange(10)) for _ in range(size))


JOBS = {
    "gsm8k": PostTrainingJob(GSM8K),
    "equal": PostTrainingJob(EQUAL),
    "quick": PostTrainingJob(
        ((4, 6), (3, 2), (5, 3), (2, 4)), layers=2, dim=16, ffn=32, heads=2, kv_heads=1, head_dim=8
    ),
}
