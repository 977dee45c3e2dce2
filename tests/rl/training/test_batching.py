"""The arrays of an update against a plain reading of the rollouts they are made of."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.tokenizers.bytes import ByteTokenizer
from rl.objective import Objective
from rl.objective.advantage import GroupAdvantage, LeaveOneOutAdvantage, RawReward, TurnAdvantage
from rl.objective.aggregation import PromptMean, SequenceMean, SequenceSum, TokenMean
from rl.roles.headers import header_of
from rl.roles.messages import Episode, Group, Score, Turn, contents_of
from rl.training.batching import Batch, arrange, fill_packed, pack_groups
from rl.training.packing import Packing
from tests.rl.tiny import make_group, make_prompt, make_rollout

MAX_PROMPT, MAX_NEW = 6, 5
EOS, PAD = ByteTokenizer.eos, ByteTokenizer.pad


def group(number: int, rewards: Sequence[float], lengths: Sequence[int], prompt_length: int = 4) -> Group:
    rng = np.random.default_rng(number)
    prompt = make_prompt(number, prompt_length, family="even" if number % 2 == 0 else "odd")
    made = make_group(prompt, [rng.integers(0, 264, length) for length in lengths], rewards)
    rollouts = tuple(
        dataclasses.replace(r, logprobs=-rng.random(len(r.tokens)).astype(np.float32)) for r in made.rollouts
    )
    return dataclasses.replace(made, rollouts=rollouts)


GROUPS = [
    group(0, [1.0, 0.0], [3, 5]),
    group(1, [0.0, 0.0], [5, 5], prompt_length=6),
    group(2, [0.5, 1.0], [1, 4], prompt_length=1),
]


def pack(groups: Sequence[Group], objective: Objective | None = None, row_multiple: int = 1) -> Batch:
    made = objective or Objective.Config(old_policy="current").build()
    return pack_groups(groups, made, max_prompt=MAX_PROMPT, max_new=MAX_NEW, row_multiple=row_multiple)[0]


def test_prefix_inputs_and_targets_are_the_sequence_shifted_by_one():
    batch = pack(GROUPS)
    assert {name: array.shape for name, array in batch.items()} == {
        "prefix": (3, MAX_PROMPT - 1),
        "prefix_lengths": (3,),
        "advantages": (3, 2),
        **dict.fromkeys(("inputs", "targets", "action_mask", "logprobs_behaviour"), (3, 2, MAX_NEW)),
        **dict.fromkeys(("weights", "metric_weights"), (3, 2, MAX_NEW)),
    }
    for g, made in enumerate(GROUPS):
        prefix = batch["prefix"][g, : batch["prefix_lengths"][g]]
        for n, rollout in enumerate(made.rollouts):
            length = len(rollout.tokens)
            whole = np.concatenate([made.prompt.tokens, rollout.tokens])
            np.testing.assert_array_equal(np.concatenate([prefix, batch["inputs"][g, n, :length]]), whole[:-1])
            np.testing.assert_array_equal(batch["targets"][g, n, :length], rollout.tokens)
            np.testing.assert_array_equal(batch["logprobs_behaviour"][g, n, :length], rollout.logprobs)
            assert not batch["inputs"][g, n, length:].any()


def test_a_group_in_several_rows_has_its_prefix_in_each():
    objective = Objective.Config(old_policy="current").build()
    whole = pack(GROUPS, objective)
    batch, _ = pack_groups(GROUPS, objective, max_prompt=MAX_PROMPT, max_new=MAX_NEW, samples_per_row=1)
    order = np.flatnonzero(whole["weights"].any(axis=2))  # rollouts of which anything counts
    assert batch["inputs"].shape == (len(order), 1, MAX_NEW)
    for name, array in batch.items():
        if name in ("prefix", "prefix_lengths"):
            np.testing.assert_array_equal(array, whole[name][order // 2])
        else:
            np.testing.assert_array_equal(array[:, 0], whole[name].reshape(6, *array.shape[2:])[order])


def test_masks_come_from_positions_whatever_the_tokens_are():
    """Zero (the filler), pad and eos in the middle are actions like others, and so is a final eos."""
    prompt = make_prompt(3)
    completions = [[0, PAD, EOS, 0, EOS], [EOS, PAD], [PAD], [0, 0, 0]]
    batch = pack([make_group(prompt, completions, [0.0, 1.0, 0.0, 1.0])])
    for n, tokens in enumerate(completions):
        expected = np.arange(MAX_NEW) < len(tokens)
        np.testing.assert_array_equal(batch["action_mask"][0, n], expected)
        np.testing.assert_array_equal(batch["weights"][0, n] > 0, expected)


def test_tokens_that_are_no_actions_carry_no_weight():
    """An environment's tokens inside a completion are read, not learned."""
    made = group(0, [1.0, 0.0], [5, 5])
    foreign = np.array([True, False, False, True, True])
    first = dataclasses.replace(made.rollouts[0], action_mask=foreign)
    batch = pack([dataclasses.replace(made, rollouts=(first, made.rollouts[1]))])
    np.testing.assert_array_equal(batch["action_mask"][0, 0], foreign)
    np.testing.assert_array_equal(batch["weights"][0] > 0, [foreign, [True] * 5])
    np.testing.assert_array_equal(batch["targets"][0, 0], made.rollouts[0].tokens)


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


def test_truncated_rollouts_can_be_masked_and_leave_the_denominator():
    made = group(0, [1.0, 0.0], [3, 5])
    cut = dataclasses.replace(made.rollouts[1], finish_reason="length")
    made = dataclasses.replace(made, rollouts=(made.rollouts[0], cut))
    objective = Objective.Config(old_policy="current", truncated="mask").build()
    weights = pack([made], objective)["weights"]
    assert not weights[0, 1].any()
    np.testing.assert_allclose(weights[0, 0, :3], 1 / 3)


def test_padding_to_a_row_multiple_changes_nothing_in_loss_metrics_or_gradient():
    """Padding changes nothing even if the model's output on padding rows is NaN."""
    objective = Objective.Config(old_policy="current", zero_variance="drop").build()
    outcomes = []
    for row_multiple, rows in ((1, 2), (2, 2), (5, 5)):
        batch = {name: jnp.asarray(x) for name, x in pack(GROUPS, objective, row_multiple).items()}
        assert batch["prefix"].shape[0] == rows
        live = np.random.default_rng(1).normal(-1, 0.5, (2, 2, MAX_NEW)).astype(np.float32)
        logprobs = jnp.full((rows, 2, MAX_NEW), jnp.nan).at[:2].set(live)
        (loss, metrics), grads = jax.value_and_grad(objective.loss, has_aux=True)(logprobs, batch)
        assert not np.any(grads[2:])
        outcomes.append(jax.device_get((loss, metrics, grads[:2])))
    for other in outcomes[1:]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), outcomes[0], other)
    assert np.any(outcomes[0][2])


def test_a_batch_without_any_live_group_is_one_of_padding():
    objective = Objective.Config(old_policy="current", zero_variance="drop").build()
    batch, figures = pack_groups([GROUPS[1]], objective, max_prompt=MAX_PROMPT, max_new=MAX_NEW, row_multiple=2)
    assert batch["prefix"].shape[0] == 2
    assert not any(array.any() for array in batch.values())
    assert figures["zero_variance_fraction"] == 1.0
    loss, metrics = objective.loss(jnp.zeros((2, 2, MAX_NEW)), {k: jnp.asarray(v) for k, v in batch.items()})
    assert float(loss) == 0.0 and all(np.isfinite(float(value)) for value in metrics.values())


def test_figures_count_the_whole_batch_dropped_groups_included():
    timed_out = dataclasses.replace(GROUPS[0], scores=(Score(1.0), Score(0.0, "timeout")))
    cut = make_rollout(GROUPS[1].prompt, 0, [1, 2, 3, 4, 5], stopped=False)
    second = dataclasses.replace(GROUPS[1], rollouts=(cut, GROUPS[1].rollouts[1]))
    objective = Objective.Config(old_policy="current", zero_variance="drop").build()
    _, figures = pack_groups([timed_out, second, GROUPS[2]], objective, max_prompt=MAX_PROMPT, max_new=MAX_NEW)
    assert figures["reward"] == pytest.approx((1 + 0 + 0 + 0.5 + 1) / 5)  # of what could be scored
    assert figures["reward/even"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert figures["reward/odd"] == 0.0
    assert figures["gen_tokens"] == 3 + 5 + 5 + 5 + 1 + 4
    assert figures["completion_length"] == pytest.approx(23 / 6)
    assert figures["verifier_failures"] == 1
    assert figures["truncation_fraction"] == pytest.approx(1 / 5)  # of the rollouts that were scored
    assert all(isinstance(value, float) for value in figures.values())


# ---- episodes

EPISODES = (
    Episode((Turn(1, 1.0), Turn(3, 0.0)), figures=(("tool_calls", 2.0), ("tool_seconds", 0.5))),
    Episode((Turn(2, 0.0), Turn(5, 1.0)), ended="truncated", figures=(("tool_calls", 1.0), ("tool_seconds", 0.1))),
)


def played() -> Group:
    """Return the first group as episodes of equal sums, of which the turns differ."""
    rollouts = zip(GROUPS[0].rollouts, EPISODES, strict=True)
    scores = (Score(1.0), Score(1.0))
    return dataclasses.replace(
        GROUPS[0], rollouts=tuple(dataclasses.replace(r, episode=e) for r, e in rollouts), scores=scores
    )


def test_figures_of_episodes_are_means_of_those_that_there_are():
    objective = Objective.Config(old_policy="current").build()
    _, figures = pack_groups([played(), GROUPS[1]], objective, max_prompt=MAX_PROMPT, max_new=MAX_NEW)
    named = {name: value for name, value in figures.items() if name.startswith(("episode/", "time/"))}
    assert named == {
        "episode/turns": 2.0,
        "episode/turn_rewards": 1.0,
        "episode/truncated": 0.5,
        "episode/failures": 0.0,
        "episode/tool_calls": 1.5,
        "time/tool_seconds": 0.3,
    }
    assert not any(
        name.startswith("episode/")
        for name in pack_groups([GROUPS[1]], objective, max_prompt=MAX_PROMPT, max_new=MAX_NEW)[1]
    )


def test_credit_by_turn_is_in_every_token_of_both_layouts():
    cfg = Objective.Config(old_policy="current", zero_variance="drop", advantage=TurnAdvantage.Config())
    objective = cfg.build()
    expected = [[0, -1, -1, 0, 0], [0, 0, 1, 1, 1]]  # first turns have equal returns, second ones 0 and 1
    padded = pack([played()], objective)
    np.testing.assert_allclose(padded["advantages"][0], expected, atol=1e-5)
    sizes: dict[str, Any] = {"max_prompt": MAX_PROMPT, "max_new": MAX_NEW}
    packing = Packing.Config(lengths=(16,), completions=2).build(max_prompt=MAX_PROMPT, max_new=MAX_NEW)
    arranged = arrange([header_of(played())], objective, **sizes, packing=packing)
    ((microbatch,),) = [one.microbatches for one in arranged.minibatches]
    filled = fill_packed(microbatch.rows, microbatch.length, arranged.prepared, contents_of([played()]), packing)
    (placed,) = microbatch.rows[0]
    for index, n in enumerate(placed[1]):
        first, size = filled["first"][0, index], filled["lengths"][0, index]
        np.testing.assert_allclose(filled["advantages"][0, first : first + size], expected[n][:size], atol=1e-5)
    assert not pack([played()], cfg.set(advantage=GroupAdvantage.Config()).build())["weights"].any()


# ---- groups of any sizes


SIZES = (3, 5, 7)
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


def ragged(failed: bool) -> list[Group]:
    """Groups of 3, 5 and 7 rollouts; of 7 each, of which the verifier failed on all others, if `failed`."""
    rng, made = np.random.default_rng(3), []
    for number, size in enumerate(SIZES):
        one = group(number, rng.random(7).round(2).tolist(), [int(x) for x in rng.integers(1, MAX_NEW + 1, 7)])
        scores = tuple(s if n < size else Score(0.0, "crash") for n, s in enumerate(one.scores))
        kept = 7 if failed else size
        made.append(dataclasses.replace(one, rollouts=one.rollouts[:kept], scores=scores[:kept]))
    return made


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
    sizes: dict[str, Any] = {"max_prompt": MAX_PROMPT, "max_new": MAX_NEW}
    batch, figures = pack_groups(made, objective, **sizes, samples_per_row=samples_per_row)
    targets, mask = (batch[name].reshape(-1, MAX_NEW) for name in ("targets", "action_mask"))
    found = sorted(tuple(row[m]) for row, m in zip(targets, mask, strict=True))
    expected = sorted(tuple(r.tokens) for one in made for r in one.rollouts)
    assert [tokens for tokens in found if tokens] == expected
    assert figures["unscored_fraction"] == 0 and figures["live_rollouts"] == sum(SIZES)
    packing = Packing.Config(lengths=(2 * MAX_NEW,), rows=2).build(max_prompt=MAX_PROMPT, max_new=MAX_NEW)
    arranged = arrange([header_of(one) for one in made], objective, **sizes, packing=packing)
    packed = [
        fill_packed(m.rows, m.length, arranged.prepared, contents_of(made), packing) for m in arranged.microbatches
    ]
    for name in ("weights", "advantages"):
        total = sum(float(part[name].sum()) for part in packed)
        assert total == pytest.approx(float(batch[name].sum()), rel=1e-6)
