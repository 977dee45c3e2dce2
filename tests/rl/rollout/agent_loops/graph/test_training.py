"""Runs whose samples are plans: nodes are trained on in trees, and a stopped run equals an uninterrupted one."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, override

import pytest

from rl.audit.invariants import check_run
from rl.objective import NodeAdvantage
from rl.protocol.messages import Prompt, Rollout
from rl.rollout.agent_loops.graph.decoding import GraphDecoding
from rl.rollout.agent_loops.graph.rollouts import GraphRollouts
from rl.rollout.request import Request
from rl.training.packing import Packing
from tests.bounds import within
from tests.rl.rollout.agent_loops.graph.test_decoding import Given
from tests.rl.runtime.ray.experiments import assert_same_outcome, metrics, parameters, run_here, run_in_parts
from tests.rl.tiny import tiny_experiment

pytestmark = pytest.mark.numerics

PLAN = "1 (): a\n2 (1): b\n\n"


def ascii_of(text: str, answers: Mapping[int, str], answer: str) -> float:
    return sum(character.isascii() for character in answer) / max(1, len(answer)) + 0.1 * len(answers)


class GivenPlans(GraphRollouts):
    """Rollouts of given plans: a policy of random weights writes none."""

    class Config(GraphRollouts.Config):
        pass

    @override
    def request(self, prompt: Prompt, samples: int, seed: int, partial: Iterable[Rollout] = ()) -> Request:
        asked = super().request(prompt, samples, seed, partial)
        return dataclasses.replace(asked, agent_loop=lambda one: Given(asked.agent_loop(one), PLAN))


def plans(**changes: Any) -> Any:
    decoding = GraphDecoding.Config(max_answer_tokens=3)
    cfg = tiny_experiment(max_prompt_tokens=24, max_new_tokens=48, staleness=1, evaluation=None)
    cfg.trainer.packing = Packing.Config(lengths=(96, 48), rows=2, tree=True)
    return cfg.set(graph=GivenPlans.Config(decoding=decoding, node_reward=ascii_of), **changes)


@pytest.mark.full
def test_nodes_are_trained_on_and_a_stopped_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    cfg = plans()
    cfg.objective.advantage = NodeAdvantage.Config()
    cfg.check()
    whole = run_here(tmp_path / "whole", cfg)
    assert_same_outcome(run_in_parts(tmp_path / "parts", cfg, stop_after=2), whole)
    rows = metrics(whole)
    assert [row["nodes"] for row in rows] == [4 * 4 * 2] * 4
    assert all(row["episode/nodes"] == 2 and row["shared_tokens"] > 0.2 for row in rows)
    assert all(within(row["logprob_diff_max"], 4e-6) for row in rows)
    assert rows[-1]["node_reward"] != rows[0]["node_reward"]
    assert [finding.broken for finding in check_run(whole)] == [()] * len(check_run(whole))
    by_path = run_here(tmp_path / "path", plans())
    assert parameters(by_path) != parameters(whole)
