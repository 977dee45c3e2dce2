"""Rollouts of plans and their nodes: tokens, rewards and records, and what a plan without room does."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from experiments.tasks.expressions import counted, expressions_rl, right_sum
from mesh.errors import UserError
from rl.environments.scoring import score_rollouts
from rl.objective import NodeAdvantage, TurnAdvantage
from rl.protocol.messages import Prompt, Rollout, Score
from rl.rollout.agent_loops.graph.rollouts import GraphRollouts
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import RequestOutput
from rl.training.updates import Updates
from tests.rl.rollout.agent_loops.graph.test_decoding import PLAN, QUESTION, TOKENIZER, Given, engine

pytestmark = pytest.mark.slow

__all__ = ["engine"]


def length(text: str, answers: Mapping[int, str], answer: str) -> float:
    """A reward of what a node has been shown."""
    return len(answer) + 10.0 * len(answers) + 100.0 * len(text)


def play(engine: RolloutEngine, plan: str = PLAN, **fields: Any) -> tuple[GraphRollouts, RequestOutput]:
    room = fields.pop("room", 96)
    cfg = GraphRollouts.Config(**fields)
    cfg.decoding.max_answer_tokens = 12
    graph = cfg.build(tokenizer=TOKENIZER, max_new_tokens=room)
    prompt = Prompt(5, "any", np.asarray(TOKENIZER.encode(QUESTION), np.int32))
    request = graph.request(prompt, 2, 0)
    loop = request.agent_loop
    number = engine.submit(dataclasses.replace(request, agent_loop=lambda one: Given(loop(one), plan)))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = [one for one in engine.step() if one.number == number]
    return graph, outputs[0]


def test_nodes_are_rollouts_of_the_problems_prompt_whose_first_tokens_were_given(engine: RolloutEngine) -> None:
    graph, output = play(engine, node_reward=length, path_cost=0.5)
    found = graph.trained(output)
    samples, nodes = found[:2], found[2:]
    prompt = TOKENIZER.encode(QUESTION)
    assert len(nodes) == 8 and [(one.node.sample, one.node.number) for one in nodes if one.node] == [
        (sample, number) for sample in (0, 1) for number in (1, 2, 4, 3)
    ]
    for node, (whole, drawn) in zip(nodes, output.spawned, strict=True):
        assert [*prompt, *node.tokens] == [*whole.tolist(), *drawn.tokens.tolist()]
        given = len(node.tokens) - len(drawn.tokens)
        assert not node.action_mask[:given].any() and node.action_mask[given:].tolist() == drawn.action_mask.tolist()
        np.testing.assert_array_equal(node.logprobs, [*np.zeros(given), *drawn.logprobs])
        assert len(node.tokens) <= 96 and set(node.versions.tolist()) == {0}
    for sample in samples:
        assert sample.episode is not None and sample.node is None
        figures = dict(sample.episode.figures)
        assert figures["nodes"] == 4 and figures["plan_errors"] == 0
        assert sample.episode.turns[0].reward == -0.5 * figures["critical_path"]
    parents = {1: 0, 2: 0, 4: 1, 3: 2}
    texts = {1: "left", 2: "right", 4: "more", 3: "both"}
    for node in nodes:
        assert node.node is not None and node.node.reward is not None
        answer = node.tokens[node.action_mask]
        said = len(bytes(answer.tolist()).decode().strip())
        number = node.node.number
        assert node.node.reward == said + 10.0 * parents[number] + 100.0 * len(texts[number])
    assert graph.recorded(output.rollouts) == output.rollouts, "records are forgotten"


class Judge:
    """A verifier that is asked nothing but final answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def score(self, problem_ids: Any, answers: Any, details: Any = None) -> list[Score]:
        self.asked += answers
        return [Score(3.0), Score(0.0, "timeout")]


@pytest.mark.parametrize("own", [True, False])
def test_a_node_has_its_own_reward_or_its_samples(engine: RolloutEngine, own: bool) -> None:
    graph, output = play(engine, node_reward=length if own else None)
    rollouts, judge = graph.trained(output), Judge()
    _, scores = score_rollouts(judge, rollouts, TOKENIZER)
    assert judge.asked == [one.episode.answer for one in rollouts[:2] if one.episode] and all(judge.asked)
    assert [score.status for score in scores] == ["ok", "timeout", *["ok"] * 4, *["timeout"] * 4]
    for rollout, score in zip(rollouts[2:6], scores[2:6], strict=True):
        assert rollout.node is not None and score.reward == (rollout.node.reward if own else 3.0)


def test_an_evaluation_has_samples_without_the_cost_of_the_path(engine: RolloutEngine) -> None:
    graph, output = play(engine, path_cost=0.5)
    found = graph.recorded(output.rollouts)
    assert [one.episode.turns[0].reward for one in found if one.episode] == [0.0, 0.0]


@pytest.mark.parametrize(("plan", "room", "why"), [("1 (2): x\n\n", 96, "needs node 2"), (PLAN, 8, "less than 8")])
def test_a_plan_that_cannot_be_carried_out_has_no_nodes_and_no_answer(
    engine: RolloutEngine, plan: str, room: int, why: str
) -> None:
    graph, output = play(engine, plan, room=room, node_reward=length, path_cost=0.5)
    assert why in graph._decoding.records[5, 0].error
    found: tuple[Rollout, ...] = graph.trained(output)
    assert len(found) == 2
    assert [(one.episode.answer, dict(one.episode.figures)["plan_errors"]) for one in found if one.episode] == [
        ("", 1)
    ] * 2
    costs = {turn.reward for one in found if one.episode for turn in one.episode.turns}
    assert costs == {-0.5 * room}, "as much as a whole rollout: a short one gains nothing"


def raises(text: str, answers: Mapping[int, str], answer: str) -> float:
    raise KeyError(text)


def test_a_reward_that_raises_is_named(engine: RolloutEngine) -> None:
    graph, output = play(engine, node_reward=raises)
    with pytest.raises(UserError, match=r"graph.node_reward: node 1 \('left'\): KeyError"):
        graph.trained(output)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"objective.advantage": TurnAdvantage.Config()}, "advantage: expected one of rewards alone, or NodeAdvantage"),
        ({"trainer.packing": None}, "packing: expected a packing"),
        ({"trainer.updates": Updates.Config(minibatches=2)}, "updates: expected None, or one mini-batch"),
        ({"controller.audit": 1}, "graph: expected None with controller.audit"),
        ({"graph": None, "objective.advantage": NodeAdvantage.Config()}, "graph: expected a graph with a node_reward"),
    ],
)
def test_what_does_not_know_of_nodes_is_refused(change: dict[str, Any], says: str) -> None:
    cfg: Any = expressions_rl()
    cfg.check_fields()
    for path, value in change.items():
        owner = cfg
        *above, last = path.split(".")
        for name in above:
            owner = getattr(owner, name)
        owner.set(**{last: value})
    with pytest.raises(ConfigError, match=says):
        cfg.check_fields()


def test_sums_are_right_by_what_their_parents_have_answered() -> None:
    assert right_sum("8+3", {}, "8+3=9+2=0+1=1+0=1") == 1.0 and counted(8, 3) == "8+3=9+2=0+1=1+0=1"
    assert right_sum("#1+#2", {1: "3+1=4+0=4", 2: "1+1=2+0=2"}, "4+2=5+1=6+0=6") == 1.0
    assert right_sum("#1+#2", {1: "3+1=4+0=4", 2: "1+1=2+0=2"}, "4+2=5+1=6+0=7") == 0.0
    assert right_sum("#1+", {1: "3+1=4+0=4"}, "4+0=4") == 0.0 and right_sum("x+#1", {1: "?"}, "") == 0.0
