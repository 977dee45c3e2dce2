"""Rollouts of a batch that count, and their weights, in groups of any sizes and rows of any layout."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rl.objective import GroupAdvantage, LeaveOneOutAdvantage, NegativeReward, Objective, RawReward, TurnAdvantage
from rl.objective.aggregation import PromptMean, SequenceMean, SequenceSum, TokenMean
from rl.objective.presets import maxrl
from rl.protocol.headers import header_of
from rl.protocol.messages import Group, Score, contents_of
from rl.training.batching import PackedRows, arrange, fill_packed
from rl.training.packing import Packing
from tests.rl.training.batching.made import GROUPS, MAX_NEW, MAX_PROMPT, SIZES, group, pack, played, ragged
from tests.rl.training.whole_groups import pack_groups

pytestmark = pytest.mark.numerics

PAPERS = {
    SequenceMean: lambda made, weight: np.mean(
        [np.mean([np.mean(x) for x in rows if len(x)]) for rows in by_group(made, weight)]
    ),
    SequenceSum: lambda made, weight: np.mean([np.mean([np.sum(x) for x in rows]) for rows in by_group(made, weight)]),
    TokenMean: lambda made, weight: np.mean(np.concatenate([x for rows in by_group(made, weight) for x in rows])),
    PromptMean: lambda made, weight: np.mean([np.mean(np.concatenate(rows)) for rows in by_group(made, weight)]),
}


def by_group(made: Sequence[Group], terms: np.ndarray) -> list[list[np.ndarray]]:
    """The terms of each token, of each scored rollout, of each group: as a paper writes its sums."""
    return [
        [terms[g, n, : len(r.tokens)] for n, r in enumerate(one.rollouts) if one.scores[n].status == "ok"]
        for g, one in enumerate(made)
    ]


@pytest.mark.parametrize("aggregation", [TokenMean, SequenceMean, PromptMean])
def test_dropped_groups_leave_the_denominator(aggregation: type):
    objective = Objective.Config(old_policy="current", zero_variance="drop", aggregation=aggregation.Config()).build()
    with_constant, without = pack(GROUPS, objective), pack([GROUPS[0], GROUPS[2]], objective)
    for name in without:
        np.testing.assert_array_equal(with_constant[name], without[name])
    np.testing.assert_allclose(with_constant["weights"].sum(), 1.0, rtol=1e-6)
    kept = pack(GROUPS, Objective.Config(old_policy="current", aggregation=aggregation.Config()).build())
    assert kept["weights"].shape[0] == 3
    assert kept["weights"][0, 0, 0] < without["weights"][0, 0, 0]


def test_a_rollout_that_the_verifier_failed_on_leaves_group_loss_and_denominator():
    made = group(0, [1.0, 0.0, 0.0], [3, 5, 2])
    failed = dataclasses.replace(made, scores=(*made.scores[:2], Score(0.0, "timeout")))
    only = dataclasses.replace(made, rollouts=made.rollouts[:2], scores=made.scores[:2])
    found, expected = pack([failed]), pack([only])
    for name in ("weights", "advantages"):
        np.testing.assert_array_equal(found[name][:, :2], expected[name])
        assert not found[name][:, 2].any()


def test_a_negative_reward_for_maxrl_names_its_answer_and_a_failed_verification_is_none():
    made = group(7, [1.0, -0.5, 0.0], [3, 5, 2])
    failed = dataclasses.replace(made, scores=(made.scores[0], Score(-0.5, "error"), made.scores[2]))
    pack([failed], maxrl().build())
    with pytest.raises(NegativeReward, match=r"problem 7 of '\w+', sample 1: .*is -0\.5, and objective\.advantage"):
        pack([made], maxrl().build())


def test_truncated_rollouts_can_be_masked_and_leave_the_denominator():
    made = group(0, [1.0, 0.0], [3, 5])
    cut = dataclasses.replace(made.rollouts[1], finish_reason="length")
    made = dataclasses.replace(made, rollouts=(made.rollouts[0], cut))
    objective = Objective.Config(old_policy="current", truncated="mask").build()
    weights = pack([made], objective)["weights"]
    assert not weights[0, 1].any()
    np.testing.assert_allclose(weights[0, 0, :3], 1 / 3, rtol=1e-6)


def test_credit_by_turn_is_in_every_token_of_both_layouts():
    cfg = Objective.Config(old_policy="current", zero_variance="drop", advantage=TurnAdvantage.Config())
    objective = cfg.build()
    expected = [[0, -1, -1, 0, 0], [0, 0, 1, 1, 1]]  # first turns have equal returns, second ones 0 and 1
    padded = pack([played()], objective)
    np.testing.assert_allclose(padded["advantages"][0], expected, atol=1e-5)
    packing = Packing.Config(lengths=(16,), completions=2).build(max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    arranged = arrange([header_of(played())], objective, PackedRows(packing))
    ((microbatch,),) = [one.microbatches for one in arranged.minibatches]
    filled = fill_packed(microbatch.rows, microbatch.length, arranged.prepared, contents_of([played()]), packing)
    (placed,) = microbatch.rows[0]
    for index, n in enumerate(placed[1]):
        first, size = filled["first"][0, index], filled["lengths"][0, index]
        np.testing.assert_allclose(filled["advantages"][0, first : first + size], expected[n][:size], atol=1e-5)
    assert not pack([played()], cfg.set(advantage=GroupAdvantage.Config()).build())["weights"].any()


@pytest.mark.parametrize("failed", [False, True], ids=["drawn", "by verifier failures"])
@pytest.mark.parametrize("aggregation", PAPERS, ids=lambda cls: cls.__name__)
def test_uneven_groups_have_the_means_of_the_paper(aggregation: type, failed: bool):
    """J of arbitrary terms, and its advantages, against float64 loops over groups, rollouts and tokens."""
    made = ragged(failed)
    objective = Objective.Config(aggregation=aggregation.Config(), advantage=LeaveOneOutAdvantage.Config()).build()
    batch = pack(made, objective)
    assert batch["inputs"].shape[:2] == (3, 7)
    terms = np.random.default_rng(0).normal(size=batch["weights"].shape)
    expected = np.zeros((3, 7))
    for g, one in enumerate(made):
        rewards = [s.reward for s in one.scores if s.status == "ok"]
        for n, reward in enumerate(rewards):
            expected[g, n] = reward - (sum(rewards) - reward) / (len(rewards) - 1)
    np.testing.assert_allclose(batch["advantages"], expected, rtol=1e-6, atol=1e-7)
    terms *= expected[..., None]
    found = np.sum(batch["weights"].astype(np.float64) * terms)
    assert found == pytest.approx(PAPERS[aggregation](made, terms), rel=1e-6)


@pytest.mark.parametrize("samples_per_row", [None, 2])
def test_rows_of_uneven_groups_hold_every_rollout_once(samples_per_row: int | None):
    made, objective = ragged(failed=False), Objective.Config(advantage=RawReward.Config(baseline=-1.0)).build()
    sizes: dict[str, Any] = {"max_prompt_tokens": MAX_PROMPT, "max_new_tokens": MAX_NEW}
    batch, figures = pack_groups(made, objective, **sizes, samples_per_row=samples_per_row)
    targets, mask = (batch[name].reshape(-1, MAX_NEW) for name in ("targets", "action_mask"))
    found = sorted(tuple(row[m]) for row, m in zip(targets, mask, strict=True))
    expected = sorted(tuple(r.tokens) for one in made for r in one.rollouts)
    assert [tokens for tokens in found if tokens] == expected
    assert figures["unscored_fraction"] == 0 and figures["live_rollouts"] == sum(SIZES)
    packing = Packing.Config(lengths=(2 * MAX_NEW,), rows=2).build(max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    arranged = arrange([header_of(one) for one in made], objective, PackedRows(packing))
    packed = [
        fill_packed(m.rows, m.length, arranged.prepared, contents_of(made), packing) for m in arranged.microbatches
    ]
    for name in ("weights", "advantages"):
        total = sum(float(part[name].sum()) for part in packed)
        assert total == pytest.approx(float(batch[name].sum()), rel=1e-6)
