"""The arrays of padded rows against a plain reading of the rollouts they are made of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.tokenizers.bytes import ByteTokenizer
from rl.objective import Objective
from tests.rl.tiny import make_group, make_prompt
from tests.rl.training.batching.made import GROUPS, MAX_NEW, MAX_PROMPT, group, pack
from tests.rl.training.whole_groups import pack_groups

EOS, PAD = ByteTokenizer.eos, ByteTokenizer.pad


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
    batch, _ = pack_groups(GROUPS, objective, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, samples_per_row=1)
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


@pytest.mark.slow
@pytest.mark.numerics
def test_padding_to_a_row_multiple_changes_nothing_in_loss_metrics_or_gradient():
    """Padding changes nothing even if the model's output on padding rows is NaN."""
    objective = Objective.Config(old_policy="current", zero_variance="drop").build()
    outcomes = []
    for row_multiple, rows in ((1, 2), (2, 2), (5, 5)):
        batch = {name: jnp.asarray(x) for name, x in pack(GROUPS, objective, row_multiple).items()}
        assert batch["prefix"].shape[0] == rows
        live = np.random.default_rng(1).normal(-1, 0.5, (2, 2, MAX_NEW)).astype(np.float32)
        logprobs = jnp.full((rows, 2, MAX_NEW), jnp.nan).at[:2].set(live)
        (loss, metrics), grads = jax.jit(jax.value_and_grad(objective.loss, has_aux=True))(logprobs, batch)
        assert not np.any(grads[2:])
        outcomes.append(jax.device_get((loss, metrics, grads[:2])))
    for other in outcomes[1:]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), outcomes[0], other)
    assert np.any(outcomes[0][2])


@pytest.mark.slow
def test_a_batch_without_any_live_group_is_one_of_padding():
    objective = Objective.Config(old_policy="current", zero_variance="drop").build()
    batch, figures = pack_groups(
        [GROUPS[1]], objective, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, row_multiple=2
    )
    assert batch["prefix"].shape[0] == 2
    assert not any(array.any() for array in batch.values())
    assert figures["zero_variance_fraction"] == 1.0
    loss, metrics = objective.loss(jnp.zeros((2, 2, MAX_NEW)), {k: jnp.asarray(v) for k, v in batch.items()})
    assert float(loss) == 0.0 and all(np.isfinite(float(value)) for value in metrics.values())
