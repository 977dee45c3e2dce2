"""Nested sums of digits, modulo ten, whose parts depend on each other as their brackets say.

The policy writes a plan, one line for each bracket, and answers a line by counting up to its sum: short lines and
longer answers, of which those that need no other can be drawn at the same time (rl/rollout/agent_loops/graph).
"""

import dataclasses
import random
from typing import override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input.shuffle import derived_seed
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.tokenizers.protocol import Tokenizer
from axlearn_like.training.trainer import Trainer
from experiments.tasks.small import small_sft
from mesh.errors import UserError

PHRASES = (" (): ", "): ", " (", ", ", "= ", ": ", "+#")


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """A problem with its solution."""

    question: str  # such as "((3+4)+(9+5))" and a line end
    plan: str  # lines of the plan, with their ends and an empty one
    nodes: tuple[tuple[str, str], ...]  # prompt behind the question, and answer, of each line
    value: int  # value of the expression


def expression(seed: int, *, depth: int = 3) -> Expression:
    """Return an expression of random digits; `depth`: brackets inside one another, 2 to the power of it are digits."""
    draw = random.Random(seed)
    texts = [str(draw.randrange(10)) for _ in range(2**depth)]
    shown, values, lines, nodes = list(texts), list(map(int, texts)), list[str](), list[tuple[str, str]]()
    numbers: list[int] = []
    while len(texts) > 1:
        below, pairs = numbers, range(0, len(texts), 2)
        numbers = list(range(len(nodes) + 1, len(nodes) + 1 + len(pairs)))
        for number, at in zip(numbers, pairs, strict=True):
            parents = below[at : at + 2]
            text = f"{texts[at]}+{texts[at + 1]}"
            lines.append(f"{number} ({', '.join(map(str, parents))}): {text}\n")
            given = [f"#{parent} {nodes[parent - 1][1]}\n" for parent in parents]
            nodes.append((f"\n{number}: {text}\n{''.join(given)}= ", counted(values[at], values[at + 1])))
        shown = [f"({shown[at]}+{shown[at + 1]})" for at in pairs]
        values = [(values[at] + values[at + 1]) % 10 for at in pairs]
        texts = [f"#{number}" for number in numbers]
    return Expression(f"{shown[0]}\n", "".join(lines) + "\n", tuple(nodes), values[0])


def counted(a: int, b: int) -> str:
    """Return the answer to a sum: `b` steps up from `a`, and where they end, such as "8901=1" for 8 + 3."""
    return "".join(str((a + step) % 10) for step in range(b + 1)) + f"={(a + b) % 10}"


class ExpressionExamples(Configurable):
    """Examples of plans and of nodes, by random access: {"tokens": int32, "loss_mask": bool}."""

    class Config(ConfigBase["ExpressionExamples"]):
        num_examples: int = 1000
        start: int = 0  # index of the first problem
        depth: int = 3
        plans: int = 4  # one of so many examples is a plan
        tokenizer: ConfigBase = PhraseTokenizer.Config(phrases=PHRASES)

        @override
        def check_fields(self) -> None:
            self.require_least(1, "num_examples", "depth", "plans")

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._tokenizer: Tokenizer = cfg.tokenizer.build()

    def __len__(self) -> int:
        return self._cfg.num_examples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise UserError(f"example {index} of {len(self)}")
        number = self._cfg.start + index
        problem = expression(problem_seed(number), depth=self._cfg.depth)
        node, answer = problem.nodes[number // self._cfg.plans % len(problem.nodes)]
        given, drawn = ("", problem.plan) if number % self._cfg.plans == 0 else (node, f"{answer}\n")
        prompt = self._tokenizer.encode(problem.question + given)
        tokens = np.asarray([*prompt, *self._tokenizer.encode(drawn)], np.int32)
        return {"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= len(prompt)}


def problem_seed(number: int) -> int:
    """Return the seed of a problem by its number."""
    return derived_seed("expression", number)


def expressions_sft(*, seed: int = 0, steps: int = 400) -> Trainer.Config:
    """Supervised fine-tuning of a 0.4 M-parameter decoder on plans and nodes."""
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES)
    return small_sft(
        ExpressionExamples.Config(), vocab_size=tokenizer.vocab_size, seq_len=128, batch_size=16, steps=steps, seed=seed
    )
