"""Nested sums of digits, modulo ten, whose parts depend on each other as their brackets say.

The policy writes a plan, one line for each sum, and answers a line by counting one term up and the other down: short
lines and longer answers, of which those that need no other can be drawn at the same time
(rl/rollout/agent_loops/graph). Sums may be regrouped, so a problem has plans of more and of less parallelism.

axl train experiments/tasks/expressions.py:expressions_sft
axl rl experiments/tasks/expressions.py:expressions_rl

RL trains the plan and the answers of its nodes: by path (all have the advantage of the final answer), or by node
(`--set objective.advantage=rl.objective:NodeAdvantage`: each answer that of being right itself). The reward is that of
the final answer, less a cost for each token of the critical path.
"""

import dataclasses
import functools
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
from rl.rollout.agent_loops.graph.decoding import GraphDecoding
from rl.rollout.agent_loops.graph.rollouts import GraphRollouts
from rl.rollout.engine import RolloutEngine
from rl.tasks.encoding import encode_prompt
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows
from rl.training.packing import Packing
from rl.verification.verifiers.text import RegexMatch

PHRASES = (" (): ", "): ", " (", ", ", "= ", ": ", "+#")


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """A problem with its solution."""

    question: str  # such as "((3+4)+(9+5))"
    plan: str  # lines of the plan, with their ends and an empty one
    nodes: tuple[tuple[str, str], ...]  # prompt behind the question, and answer, of each line
    value: int  # value of the expression


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """A part of a sum: a digit, or the answer of a node."""

    text: str
    value: int
    node: int = 0  # number of the node; 0: a digit


def expression(seed: int, *, depth: int = 3, width: int = 2) -> Expression:
    """Return an expression of random digits and a plan of it, which is right for any width: sums may be regrouped.

    Args:
        seed: seed of the digits.
        depth: brackets inside one another; 2 to the power of it are digits.
        width: so many terms are added one after the other, then so many of what they come to. 2: as the brackets say,
            all sums of a depth at a time; the number of digits: from the left to the right, each waits for the last.
    """
    draw = random.Random(seed)
    terms = [Term(text, int(text)) for text in (str(draw.randrange(10)) for _ in range(2**depth))]
    shown, lines, nodes = [term.text for term in terms], list[str](), list[tuple[str, str]]()

    def add(a: Term, b: Term) -> Term:
        number, text = len(nodes) + 1, f"{a.text}+{b.text}"
        parents = [term.node for term in (a, b) if term.node]
        lines.append(f"{number} ({', '.join(map(str, parents))}): {text}\n")
        given = [f"#{parent} {nodes[parent - 1][1]}\n" for parent in parents]
        nodes.append((f"\n{number}: {text}\n{''.join(given)}= ", counted(a.value, b.value)))
        return Term(f"#{number}", (a.value + b.value) % 10, number)

    while len(terms) > 1:
        terms = [functools.reduce(add, terms[at : at + width]) for at in range(0, len(terms), width)]
    while len(shown) > 1:
        shown = [f"({shown[at]}+{shown[at + 1]})" for at in range(0, len(shown), 2)]
    return Expression(shown[0], "".join(lines) + "\n", tuple(nodes), terms[0].value)


def counted(a: int, b: int) -> str:
    """Return the answer to a sum, one up for one down until nothing is left, such as "8+3=9+2=0+1=1+0=1" for 8 + 3."""
    return "".join(f"{(a + step) % 10}+{b - step}=" for step in range(b + 1)) + str((a + b) % 10)


class ExpressionExamples(Configurable):
    """Examples of plans and of nodes, by random access: {"tokens": int32, "loss_mask": bool}."""

    class Config(ConfigBase["ExpressionExamples"]):
        num_examples: int = 1000
        start: int = 0  # index of the first problem
        depth: int = 3
        plans: int = 4  # one of so many examples is a plan
        widths: tuple[int, ...] = (2,)  # widths of the plans; nodes are shown of each width as often
        tokenizer: ConfigBase = PhraseTokenizer.Config(phrases=PHRASES)

        @override
        def check_fields(self) -> None:
            self.require_least(1, "num_examples", "depth", "plans")
            self.require("widths", bool(self.widths) and min(self.widths) > 1, "widths of 2 or more")

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._tokenizer: Tokenizer = cfg.tokenizer.build()

    def __len__(self) -> int:
        return self._cfg.num_examples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise UserError(f"example {index} of {len(self)}")
        number = self._cfg.start + index
        draw, planned = random.Random(derived_seed("example", number)), number % self._cfg.plans == 0
        width = draw.choice(self._cfg.widths if planned else sorted(set(self._cfg.widths)))
        problem = expression(problem_seed(number), depth=self._cfg.depth, width=width)
        hard = [1 + node.count("\n#") for node, _ in problem.nodes]  # answers of parents to be read
        node, answer = draw.choices(problem.nodes, hard)[0]
        given, drawn = ("", problem.plan) if planned else (node, f"{answer}\n")
        prompt = [*encode_prompt(problem.question, self._tokenizer), *self._tokenizer.encode(given)]
        tokens = np.asarray([*prompt, *self._tokenizer.encode(drawn)], np.int32)
        return {"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= len(prompt)}


def problem_seed(number: int) -> int:
    """Return the seed of a problem by its number."""
    return derived_seed("expression", number)


@config_function
def expression_rows(depth: int, count: int) -> Iterator[dict[str, str]]:
    """Yield problems as rows; the answer is a regular expression of those that end with the right value."""
    for problem in (expression(problem_seed(number), depth=depth) for number in range(count)):
        yield {"prompt": problem.question, "answer": f".*={problem.value}"}


@config_function
def right_sum(text: str, answers: Mapping[int, str], answer: str) -> float:
    """Return 1 if the answer of a node is right, given the answers of its parents."""
    for number, given in answers.items():
        text = text.replace(f"#{number}", given[-1:])
    return float(re.fullmatch(r"\d\+\d", text) is not None and answer == counted(int(text[0]), int(text[2])))


def expressions_rl(*, seed: int = 0, steps: int = 40) -> RLExperiment.Config:
    """GRPO of plans and of their nodes' answers, for right answers by short critical paths.

    Half of the plans of fine-tuning add from the left to the right, a quarter does so in two halves, and a quarter as
    the brackets say. A right answer by the longest path is worth more than a wrong one by the shortest.
    """
    supervised = expressions_sft(seed=seed, steps=1000, widths=(8, 8, 4, 2))
    rows = RowFunction.Config(function=expression_rows, arguments={"depth": 3, "count": 4000})
    tasks = TaskMixture.Config(families=(TaskRows.Config(rows=rows, label="sums"),), seed=seed, heldout_every=8)
    decoding = GraphDecoding.Config(max_nodes=7, max_line_tokens=16, max_answer_tokens=44)
    cfg = small_rl(
        *(supervised, PhraseTokenizer.Config(phrases=PHRASES), tasks, RegexMatch.Config(mixture=tasks)),
        max_prompt_tokens=48,
        max_new_tokens=144,
        num_steps=steps,
        samples_per_prompt=8,
        learner=small_learner(3e-4, 1e-4, warmup=5, steps=steps),
        engine=RolloutEngine.Config(max_num_seqs=64, steps_per_dispatch=4),
        graph=GraphRollouts.Config(decoding=decoding, path_cost=0.002, node_reward=right_sum),
        evaluation=Evaluation.Config(problems_per_family=128),
    )
    cfg.trainer.packing = Packing.Config(tree=True)
    return cfg.set(prompts_per_step=8, groups_per_lease=4)


def expressions_sft(
    *, seed: int = 0, steps: int = 400, depth: int = 3, widths: tuple[int, ...] = (2,)
) -> Trainer.Config:
    """Supervised fine-tuning of a 0.4 M-parameter decoder on plans and nodes."""
    tokenizer = PhraseTokenizer.Config(phrases=PHRASES)
    source = ExpressionExamples.Config(depth=depth, widths=widths)
    cfg = small_sft(source, vocab_size=tokenizer.vocab_size, seq_len=192, batch_size=16, steps=steps, seed=seed)
    cfg.learner.schedule.end_lr = 1e-4  # a rate that falls: one token in a hundred that is wrong spoils an answer
    return cfg
