"""Samples with nodes in an update: what a paper would write of whole trees, token by token."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from rl.audit.rollout_ledger import pack, unpack
from rl.objective import GroupAdvantage, NodeAdvantage, Objective, SequenceMean, SequenceSum, TokenMean
from rl.protocol.headers import header_of
from rl.protocol.messages import Group, Score, TreeNode
from rl.training.batching import Arranged, PackedRows, arrange
from rl.training.batching.metrics import batch_metrics
from rl.training.packing import Packing
from tests.rl.training.batching.made import MAX_NEW, MAX_PROMPT, group

pytestmark = pytest.mark.numerics

REWARDS = [[1.0, 0.0, 0.5], [0.0, 1.0]]
# Nodes of each sample: tokens of which the first two were given, and the reward of each
NODES = [[[(5, 1.0), (3, 0.0)], [(4, 0.5)], []], [[(3, 0.25)], [(5, 0.75)]]]


def trees() -> list[Group]:
    """Return groups whose samples have none to two nodes."""
    found: list[Group] = []
    for number, (rewards, nodes) in enumerate(zip(REWARDS, NODES, strict=True)):
        flat = [(sample, *node) for sample, own in enumerate(nodes) for node in own]
        sizes = [2 + sample for sample in range(len(rewards))] + [size for _, size, _ in flat]
        made = group(number, rewards + [reward for _, _, reward in flat], sizes)
        rollouts = list(made.rollouts)
        for place, (sample, size, reward) in enumerate(flat, start=len(rewards)):
            mask = np.arange(size) >= 2
            node = TreeNode(sample, place, reward)
            rollouts[place] = dataclasses.replace(rollouts[place], action_mask=mask, node=node, sample_id=100 + place)
        found.append(dataclasses.replace(made, rollouts=tuple(rollouts)))
    return found


def arranged(groups: list[Group], **objective: Any) -> Arranged:
    packing = Packing.Config(tree=True, lengths=(16,)).build(max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    made = Objective.Config(old_policy="current", **objective).build()
    return arrange([header_of(one) for one in groups], made, PackedRows(packing))


def members(one: Group, sample: int) -> list[int]:
    """Return the rollouts of a sample's tree."""
    own = [n for n, rollout in enumerate(one.rollouts) if rollout.node is not None and rollout.node.sample == sample]
    return [sample, *own]


def drawn(one: Group, sample: int) -> int:
    return sum(int(one.rollouts[n].action_mask.sum()) for n in members(one, sample))


def centred(rewards: list[float]) -> np.ndarray:
    return np.asarray(rewards) - np.mean(rewards)


@pytest.mark.parametrize("aggregation", [TokenMean, SequenceMean, SequenceSum])
def test_by_path_all_tokens_of_a_tree_have_its_samples_advantage_and_share_its_weight(aggregation: type) -> None:
    groups = trees()
    advantage = GroupAdvantage.Config(normalise_std=False)
    arrays = arranged(groups, advantage=advantage, aggregation=aggregation.Config()).prepared.arrays
    total = sum(drawn(one, sample) for g, one in enumerate(groups) for sample in range(len(REWARDS[g])))
    for g, one in enumerate(groups):
        count = len(REWARDS[g])
        for sample, expected in enumerate(centred(REWARDS[g])):
            size = drawn(one, sample)
            weight = {TokenMean: 1 / total, SequenceMean: 1 / (2 * count * size), SequenceSum: 1 / (2 * count)}
            for n in members(one, sample):
                mask = np.zeros(MAX_NEW, bool)
                mask[: len(one.rollouts[n].tokens)] = one.rollouts[n].action_mask
                np.testing.assert_allclose(arrays["advantages"][g, n], expected, atol=1e-6)
                np.testing.assert_allclose(arrays["weights"][g, n], mask * weight[aggregation], rtol=1e-6)


def test_by_node_each_answer_has_the_advantage_of_its_own_reward() -> None:
    groups = trees()
    advantage = NodeAdvantage.Config(advantage=GroupAdvantage.Config(normalise_std=False))
    arrays = arranged(groups, advantage=advantage).prepared.arrays
    for g, one in enumerate(groups):
        places = [members(one, sample) for sample in range(len(REWARDS[g]))]
        for place in range(3):
            there = [own[place] for own in places if len(own) > place]
            rewards = [one.scores[n].reward for n in there]
            for n, expected in zip(there, centred(rewards) if there else [], strict=True):
                size = len(one.rollouts[n].tokens)
                mask = one.rollouts[n].action_mask
                np.testing.assert_allclose(arrays["advantages"][g, n, :size], mask * expected, atol=1e-6)
                assert not arrays["advantages"][g, n, size:].any()


def test_every_rollout_of_a_tree_is_in_a_row_once() -> None:
    groups = trees()
    found = arranged(groups, advantage=GroupAdvantage.Config())
    placed = [(g, n) for batch in found.microbatches for row in batch.rows for g, ns in row for n in ns]
    assert sorted(placed) == [(g, n) for g, one in enumerate(groups) for n in range(len(one.rollouts))]
    assert found.figures["live_rollouts"] == 5, "samples are counted, not nodes"


def test_a_sample_that_could_not_be_scored_takes_its_nodes_with_it() -> None:
    one = trees()[0]
    failed = tuple(Score(0.0, "crash") if n in members(one, 1) else score for n, score in enumerate(one.scores))
    arrays = arranged([dataclasses.replace(one, scores=failed)], advantage=GroupAdvantage.Config()).prepared.arrays
    weighed = arrays["weights"][0].any(axis=-1).tolist()
    assert weighed == [n not in members(one, 1) for n in range(len(one.rollouts))]


def test_metrics_are_of_samples_and_nodes_have_their_own() -> None:
    groups = trees()
    alone = [
        dataclasses.replace(one, rollouts=one.rollouts[: len(own)], scores=one.scores[: len(own)])
        for one, own in zip(groups, REWARDS, strict=True)
    ]
    found, expected = ([header_of(one) for one in side] for side in (groups, alone))
    figures = batch_metrics(found, 1.0)
    nodes = {name: figures.pop(name) for name in ("nodes", "node_tokens", "node_reward")}
    assert (
        nodes == {"nodes": 5.0, "node_tokens": 20.0, "node_reward": 0.5}
        and figures.pop("gen_tokens") == 20 + 2 + 3 + 4 + 2 + 3
    )
    alone_figures = batch_metrics(expected, 1.0)
    del alone_figures["gen_tokens"]
    assert figures == alone_figures
    assert [one.drawn_rewards() for one in groups] == REWARDS


def test_a_ledger_names_samples_alone() -> None:
    groups = trees()
    alone = [
        dataclasses.replace(one, rollouts=one.rollouts[: len(own)], scores=one.scores[: len(own)])
        for one, own in zip(groups, REWARDS, strict=True)
    ]
    assert unpack(pack(groups)) == unpack(pack(alone)) and len(unpack(pack(groups))) == 5
