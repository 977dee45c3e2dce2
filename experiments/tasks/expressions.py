"""Nested sums of digits, modulo ten, whose parts depend on each other as their brackets say.

The policy writes a plan, one line for each bracket, and answers a line by counting up to its sum: short lines and
longer answers, of which those that need no other can be drawn at the same time (rl/rollout/agent_loops/graph).

axl train experiments/tasks/expressions.py:expressions_sft
axl rl experiments/tasks/expressions.py:expressions_rl

RL trains the plan and the answers of its nodes: by path (all have the advantage of the final answer), or by node
(`--set objective.advantage=rl.objective:NodeAdvantage`: each answer that of being right itself).
"""

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping
from typing import override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable, config_function
from axlearn_like.input.shuffle import derived_seed
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.tokenizers.protocol import Tokenizer
from axlearn_like.training.trainer import Trainer
from experiments.tasks.small import small_learner, small_rl, small_sft
from mesh.errors import UserError
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.rollout.agent_loops.graph.rollouts import GraphRollouts
from rl.rollout.engine import RolloutEngine
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows
from rl.training.packing import Packing
from rl.verification.verifiers.text import ExactMatch

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


@config_function
def expression_rows(depth: int, count: int) -> Iterator[dict[str, str]]:
    """Yield problems as rows, whose answer is that of the last node."""
    for problem in (expression(problem_seed(number), depth=depth) for number in range(count)):
        yield {"prompt": problem.question.removesuffix("\n"), "answer": problem.nodes[-1][1]}


@config_function
def right_sum(text: str, answers: Mapping[int, str], answer: str) -> float:
    """Return 1 if the answer of a node is right, given the answers of its parents."""
    for number, given in answers.items():
        text = text.replace(f"#{number}", given[-1:])
    return float(re.fullmatch(r"\d\+\d", text) is not None and answer == counted(int(text[0]), int(text[2])))


def expressions_rl(*, seed: int = 0, steps: int = 30) -> RLExperiment.Config:
    """GRPO of plans and of their nodes' answers, after fine-tuning that is too short for the answers."""
    supervised = expressions_sft(seed=seed, steps=200, depth=2)
    rows = RowFunction.Config(function=expression_rows, arguments={"depth": 2, "count": 4000})
    tasks = TaskMixture.Config(families=(TaskRows.Config(rows=rows, label="sums"),), seed=seed, heldout_every=8)
    cfg = small_rl(
        *(supervised, PhraseTokenizer.Config(phrases=PHRASES), tasks, ExactMatch.Config(mixture=tasks)),
        max_prompt_tokens=40,
        max_new_tokens=64,
        num_steps=steps,
        samples_per_prompt=8,
        learner=small_learner(3e-4, 1e-4, warmup=5, steps=steps),
        engine=RolloutEngine.Config(max_num_seqs=64, steps_per_dispatch=4),
        graph=GraphRollouts.Config(node_reward=right_sum),
        evaluation=Evaluation.Config(problems_per_family=64),
    )
    cfg.trainer.packing = Packing.Config(tree=True)
    return cfg.set(prompts_per_step=8, groups_per_lease=4)


def expressions_sft(*, seed: int = 0, steps: int = 400, depth: int = 3) -> Trainer.Config:
    """Supervised fine-tuning of a 0.4 M-parameter decoder on plans and nodes."""
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES)
    source = ExpressionExamples.Config(depth=depth)
    return small_sft(source, vocab_size=tokenizer.vocab_size, seq_len=128, batch_size=16, steps=steps, seed=seed)
