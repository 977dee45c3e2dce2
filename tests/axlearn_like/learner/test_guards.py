"""Clipping, spikes and the average of parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.learner import (
    EMA,
    SGD,
    AdamW,
    ClipByBlockRMS,
    ClipByValue,
    Learner,
    LearnerError,
    ParameterGroup,
    SkipSpikes,
)
from tests.axlearn_like.learner.parameters import arrays, close, learner, train

PLAIN = SGD.Config(momentum=0.0)


@pytest.mark.slow
def test_clipping_by_value_and_by_the_rms_of_each_layer():
    value, _, _ = train(learner(PLAIN, clip=ClipByValue.Config(limit=0.3)), updates=1)
    close(value, jax.tree.map(lambda p, g: p - 0.1 * np.clip(g, -0.3, 0.3), arrays(0), arrays(1)))
    block, _, _ = train(learner(PLAIN, clip=ClipByBlockRMS.Config(limit=0.9)), updates=1)
    for name in ("q_dkqh", "out_kqhd"):
        for layer in range(4):
            p, g = (np.float64(arrays(seed)["layers"]["attention"][name][layer]) for seed in (0, 1))
            g *= min(1.0, 0.9 / np.sqrt(np.mean(g * g)))
            close(block["layers"]["attention"][name][layer], p - 0.1 * g)


def test_spikes_are_skipped_until_they_are_usual():
    guard = SkipSpikes.Config(factor=2.0, decay=0.5, warmup=2)
    built: Learner = learner(PLAIN, skip_spikes=guard).build()
    params = {"w": jnp.zeros(1)}
    state, update = built.init(params), jax.jit(built.update)
    norms, mean, skipped = [1.0, 1.0, 1.0, 5.0, np.nan, 1.0, *[9.0] * 6], 0.0, []
    expected, seen = [], 0
    for norm in norms:
        params, state, metrics = update({"w": jnp.asarray([norm], jnp.float32)}, state, params)
        skipped.append(int(metrics["skipped"]))
        if np.isfinite(norm):
            usual = mean / (1 - 0.5 ** max(seen, 1))
            spike = seen >= 2 and norm > 2 * usual
            mean, seen = 0.5 * mean + 0.5 * (2 * usual if spike else norm), seen + 1
        expected.append((expected or [0])[-1] + (spike if np.isfinite(norm) else 1))
    assert skipped == expected
    assert skipped[2:6] == [0, 1, 2, 2] and skipped[-1] == skipped[-2] > 3  # 9 has become usual
    assert metrics["spikes"] == skipped[-1] - 1  # one was not finite
    close(params["w"], [-0.1 * sum(n for n, a, b in zip(norms, skipped, [0, *skipped], strict=False) if a == b)])


@pytest.mark.slow
def test_the_average_is_debiased_and_skips_what_is_skipped():
    cfg = learner(PLAIN, ema=EMA.Config(decay=0.7), groups=(ParameterGroup.Config(match="embedding/*", frozen=True),))
    built: Learner = cfg.build()
    params = jax.tree.map(jnp.asarray, arrays(0))
    state, update = built.init(params), jax.jit(built.update)
    jax.tree.map(np.testing.assert_array_equal, built.ema_params(params, state), params)
    path: list[Any] = []
    for seed in (1, 2, 3):
        params, state, _ = update(jax.tree.map(jnp.asarray, arrays(seed)), state, params)
        path.append(jax.device_get(params))
    nans = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
    params, state, _ = update(nans, state, params)
    weights = np.array([0.49, 0.7, 1.0]) / 2.19
    expected = jax.tree.map(lambda *p: sum(w * x for w, x in zip(weights, p, strict=True)), *path)
    close(built.ema_params(params, state), expected)
    assert "embedding" not in str(jax.tree_util.tree_leaves_with_path(state["ema"]))
    with pytest.raises(LearnerError, match=r"Learner.ema: expected EMA.Config\(\)"):
        learner(PLAIN).build().ema_params(params, state)


def test_the_state_of_a_plain_learner_has_the_paths_that_checkpoints_have():
    state = Learner.Config(schedule=learner(PLAIN).schedule).build().init({"up_df": jnp.zeros((2, 3))})
    paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths == ["applied", "optax/1/0/count", "optax/1/0/mu/up_df", "optax/1/0/nu/up_df", "skipped"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip": ClipByValue.Config(limit=0.0)}, "Learner.clip.limit: expected above 0"),
        ({"skip_spikes": SkipSpikes.Config(factor=1.0)}, "factor: expected above 1"),
        ({"ema": EMA.Config(decay=1.0)}, "decay: expected above 0 and below 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        learner(AdamW.Config(), **fields).build()
