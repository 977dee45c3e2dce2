"""Nested sums: plans of every width come to what the digits do, and RL pays for right answers by short paths."""

import itertools
import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from axlearn_like.tokenizers.phrases import PhraseTokenizer
from experiments.tasks.expressions import (
    PHRASES,
    ExpressionExamples,
    expression,
    expressions_rl,
    problem_seed,
    right_sum,
)
from rl.protocol.messages import Rollout
from rl.rollout.agent_loops.graph.decoding import GraphRecord
from rl.rollout.agent_loops.graph.plan import GraphPlan
from rl.rollout.agent_loops.graph.rollouts import GraphRollouts

TOKENIZER = PhraseTokenizer.Config(phrases=PHRASES).build()
WIDTHS = (8, 8, 4, 2)
DEEPEST = {2: 3, 4: 4, 8: 7}  # answers one after the other, of eight digits


def read(plan: str) -> GraphPlan:
    """Read a plan as graph decoding does."""
    found, written = GraphPlan(8), 0
    for line in plan.splitlines(keepends=True)[:-1]:
        written += len(TOKENIZER.encode(line))
        found.add(line, written)
    found.check()
    return found


def drawn(tokens: list[int], sample: int = 0) -> Rollout:
    count = len(tokens)
    arrays = np.asarray(tokens, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32), np.ones(count, bool)
    return Rollout(5, sample, *arrays, "stop")


def recorded(graph: GraphRollouts, plan: str, answers: dict[int, str], sample: int) -> tuple[float, int, str]:
    """Return the cost of a plan with these answers, its critical path, and the answer that is judged."""
    record, given = GraphRecord(), read(plan)
    rollouts = {number: drawn(TOKENIZER.encode(f"{answers[number]}\n")) for number in given.nodes}
    whole = drawn(TOKENIZER.encode(plan), sample)
    graph._decoding._record(given, rollouts, len(whole.tokens), record)
    graph._decoding.records[5, sample] = record
    (found,) = graph.recorded([whole], costs=True)
    assert found.episode is not None and found.episode.answer is not None
    return sum(turn.reward for turn in found.episode.turns), record.critical_path, found.episode.answer


@pytest.mark.parametrize("width", sorted(DEEPEST))
def test_plans_of_every_width_come_to_the_sum_of_the_digits(width: int) -> None:
    for seed in range(100):
        problem = expression(seed, width=width)
        digits = [int(digit) for digit in re.findall(r"\d", problem.question)]
        plan, values, depth = read(problem.plan), dict[int, int](), dict[int, int]()
        assert len(plan.nodes) == len(problem.nodes) == 7 and problem.question == expression(seed).question
        for (number, node), (prompt, answer) in zip(plan.nodes.items(), problem.nodes, strict=True):
            told = "".join(f"#{parent} {problem.nodes[parent - 1][1]}\n" for parent in node.parents)
            assert prompt == f"\n{number}: {node.text}\n{told}= "
            terms = [values[int(one[1:])] if one[0] == "#" else int(one) for one in node.text.split("+")]
            values[number], depth[number] = sum(terms) % 10, 1 + max([0, *(depth[one] for one in node.parents)])
            *steps, last = answer.split("=")
            assert {sum(map(int, step.split("+"))) % 10 for step in steps} == {values[number]} == {int(last)}
            assert steps[0] == "+".join(map(str, terms)) and len(steps) == terms[1] + 1
            assert right_sum(node.text, {one: problem.nodes[one - 1][1] for one in node.parents}, answer) == 1.0
        assert values[7] == sum(digits) % 10 == problem.value and depth[7] == DEEPEST[width]


def test_half_of_the_plans_that_are_shown_are_the_longest() -> None:
    examples: Any = ExpressionExamples.Config(num_examples=2000, widths=WIDTHS).build()
    seen, nodes = Counter[int](), 0
    for number in range(2000):
        row = examples[number]
        text = TOKENIZER.decode(row["tokens"][row["loss_mask"]].tolist())
        forms = {expression(problem_seed(number), width=width).plan: width for width in set(WIDTHS)}
        seen.update([forms[text]] if text in forms else [])
        nodes += text not in forms
    assert nodes == 1500 and sum(seen.values()) == 500
    for width, share in Counter(WIDTHS).items():
        assert abs(seen[width] / 500 - share / 4) < 4 * (share / 4 * (1 - share / 4) / 500) ** 0.5


def test_the_reward_prefers_shorter_plans_and_never_a_wrong_answer() -> None:
    cfg: Any = expressions_rl()
    graph: GraphRollouts = cfg.graph.build(tokenizer=TOKENIZER, max_new_tokens=cfg.max_new_tokens)
    longest = cfg.max_new_tokens + cfg.graph.decoding.max_nodes * cfg.graph.decoding.max_answer_tokens
    assert cfg.graph.path_cost * longest < 1.0, "a right answer by any path is worth more than a wrong one"
    shuffled, tasks, scorer = random.Random(0), cfg.tasks.build(), cfg.verifier.scorer.build()
    seeds = {expression(seed).question: seed for seed in map(problem_seed, range(4000))}
    paths = Counter[int]()
    for number in range(40):
        problem = tasks.train(number)
        found = list[tuple[float, int, bool]]()
        for sample, (width, wrong) in enumerate(itertools.product(DEEPEST, (False, True))):
            planned = expression(seeds[problem.question], width=width)
            answers = {node: answer for node, (_, answer) in enumerate(planned.nodes, start=1)}
            if wrong:
                answers[7] = f"{answers[7][:-1]}{(planned.value + shuffled.randrange(1, 10)) % 10}"
                if shuffled.random() < 0.5:  # by a shorter path
                    answers = {node: answer[-2:] for node, answer in answers.items()}
            cost, path, judged = recorded(graph, planned.plan, answers, sample)
            reward = scorer.score(problem.id, judged)
            assert reward == (0.0 if wrong else 1.0)
            paths[width] += 0 if wrong else path
            found.append((reward + cost, path, not wrong))
        for one, other in itertools.permutations(found, 2):
            if one[2] and (not other[2] or one[1] < other[1]):
                assert one[0] > other[0]
    assert paths[2] < paths[4] < paths[8] and paths[2] < 0.7 * paths[8], "parallelism is worth learning"
