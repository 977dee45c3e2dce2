"""Lines of plans, the order in which nodes can begin, and the plans that are refused by name."""

import random
import re

import pytest

from rl.rollout.agent_loops.graph.plan import GraphPlan, PlanError


def plan_of(text: str, max_nodes: int = 32) -> GraphPlan:
    plan = GraphPlan(max_nodes)
    for at, line in enumerate(text.split("|")):
        plan.add(f"{line}\n", at)
    plan.check()
    return plan


def test_lines_name_their_parents_once_and_keep_their_text() -> None:
    plan = plan_of("1 (): 3+4|2():a b |7 (2, 1,2): #1 (x): y")
    assert [(node.parents, node.text) for node in plan.nodes.values()] == [
        ((), "3+4"),
        ((), "a b"),
        ((2, 1), "#1 (x): y"),
    ]
    assert [node.number for node in plan.ready(set())] == [1, 2, 7]
    assert [node.number for node in plan.ready({1})] == [2, 7]


def test_nodes_begin_behind_their_parents_wherever_these_stand() -> None:
    draw = random.Random(0)
    for _ in range(50):
        numbers = draw.sample(range(20), 8)
        parents = {n: draw.sample(numbers[:at], min(at, draw.randrange(3))) for at, n in enumerate(numbers)}
        lines = [f"{n} ({', '.join(map(str, parents[n]))}): x" for n in draw.sample(numbers, 8)]
        order = [node.number for node in plan_of("|".join(lines)).ready(set())]
        assert sorted(order) == sorted(numbers)
        for child, all_of_them in parents.items():
            assert all(order.index(parent) < order.index(child) for parent in all_of_them)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1 (): a|2 (3): b|3 (2): c", "nodes 2, 3 need each other"),
        ("1 (1): a", "nodes 1 need each other"),
        ("1 (): a|2 (1, 9): b", "node 2 needs node 9"),
        ("1 (): a|1 (): b", "node 1 stands in the plan twice"),
        ("1 (): ", "plan line '1 ():'"),
        ("first do this", "expected NUMBER"),
        ("1 (a): b", "expected NUMBER"),
        ("|".join(f"{n} (): x" for n in range(33)), "more than 32 nodes"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=re.escape(why)):
        plan_of(text)
    with pytest.raises(PlanError, match="no nodes"):
        GraphPlan(3).check()


def test_as_many_nodes_as_are_allowed_are_taken() -> None:
    assert len(plan_of("|".join(f"{n} (): x" for n in range(3)), 3).nodes) == 3
