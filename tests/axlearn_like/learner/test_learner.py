import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.learner import (
    AdamW,
    Constant,
    Learner,
    WarmupLinear,
    decay_mask,
)

pytestmark = pytest.mark.numerics


def params_like() -> dict:
    rng = np.random.default_rng(0)
    return {
        "layers": {
            "norm": {"scale": rng.normal(size=(2, 3)).astype(np.float32)},  # [layers, dim]
            "mlp": {"up_df": rng.normal(size=(2, 3, 4)).astype(np.float32)},
            "attention": {"q_bias_nh": rng.normal(size=(2, 2, 2)).astype(np.float32)},
        },
        "temperature": np.float32(1.5),
    }


@pytest.mark.slow
def test_adamw_equals_the_formula_written_out():
    cfg = AdamW.Config(b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1)
    learner = Learner.Config(optimizer=cfg, schedule=Constant.Config(lr=0.05), clip_norm=2.0).build()
    params = jax.tree.map(jnp.asarray, params_like())
    opt_state = learner.init(params)
    expected = jax.tree.map(np.float64, params_like())
    mean = jax.tree.map(np.zeros_like, expected)
    square = jax.tree.map(np.zeros_like, expected)
    decayed = {"up_df"}
    rng = np.random.default_rng(1)
    for count in range(1, 5):
        grads = jax.tree.map(lambda p: rng.normal(size=np.shape(p)).astype(np.float32), params)
        params, opt_state, metrics = jax.jit(learner.update)(grads, opt_state, params)

        norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(grads)))
        clipped = jax.tree.map(lambda g, n=norm: g * min(1.0, 2.0 / n), grads)
        mean = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, mean, clipped)
        square = jax.tree.map(lambda s, g: 0.9 * s + 0.1 * g * g, square, clipped)
        before = expected

        def update(path, p, m, s, t=count):
            direction = (m / (1 - 0.8**t)) / (np.sqrt(s / (1 - 0.9**t)) + 1e-6)
            return p - 0.05 * (direction + (0.1 * p if path[-1].key in decayed else 0.0))

        expected = jax.tree_util.tree_map_with_path(update, expected, mean, square)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), params, expected)
        moved = jax.tree.map(lambda a, b: np.sum((a - b) ** 2), expected, before)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        np.testing.assert_allclose(metrics["update_norm"], np.sqrt(sum(jax.tree.leaves(moved))), rtol=1e-4)
        assert metrics["lr"] == np.float32(0.05)


def test_decay_spares_scales_and_biases_of_stacked_layers():
    mask = decay_mask(jax.tree.map(jnp.asarray, params_like()))
    assert mask == {
        "layers": {
            "norm": {"scale": False},
            "mlp": {"up_df": True},
            "attention": {"q_bias_nh": False},
        },
        "temperature": False,
    }


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_but_is_counted(bad):
    learner = Learner.Config(schedule=WarmupLinear.Config(peak_lr=0.1, warmup_steps=2, total_steps=10)).build()
    params = jax.tree.map(jnp.asarray, params_like())
    good = jax.tree.map(jnp.ones_like, params)
    update = jax.jit(learner.update)
    params, opt_state, first = update(good, learner.init(params), params)
    broken = {**good, "temperature": jnp.float32(bad)}
    after, after_state, metrics = update(broken, opt_state, params)
    jax.tree.map(np.testing.assert_array_equal, after, params)
    jax.tree.map(np.testing.assert_array_equal, after_state["optax"], opt_state["optax"])
    assert (first["skipped"], metrics["skipped"]) == (0, 1)
    assert metrics["update_norm"] == 0
    # The skipped update does not advance the schedule.
    _, _, third = update(good, after_state, after)
    np.testing.assert_allclose(third["lr"], 0.05)
