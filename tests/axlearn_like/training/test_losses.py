import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.training.losses import (
    SupervisedLoss,
    make_supervised_loss,
    supervised_loss,
    token_hits,
    token_logprobs,
)
from tests.axlearn_like.layers.small import initialise, small_decoder

pytestmark = pytest.mark.numerics


def test_token_logprobs_are_log_softmax_in_float32():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 11)).astype(np.float32) * 5
    targets = rng.integers(0, 11, (2, 3)).astype(np.int32)
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    expected = np.take_along_axis(exact, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(token_logprobs(jnp.asarray(logits), jnp.asarray(targets)), expected, rtol=1e-5)
    low = token_logprobs(jnp.asarray(logits, jnp.bfloat16), jnp.asarray(targets))
    assert low.dtype == jnp.float32


@pytest.mark.slow
def test_token_logprobs_survive_large_logits():
    logits = jnp.asarray([[[1e4, 0.0, -1e4]]])
    value, gradient = jax.value_and_grad(lambda x: token_logprobs(x, jnp.asarray([[0]])).sum())(logits)
    assert value == 0.0
    assert np.isfinite(gradient).all()


@pytest.mark.slow
def test_a_hit_is_the_first_of_the_largest_logits():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 3, (4, 9, 5)).astype(np.float32)  # many equals
    targets = rng.integers(0, 5, (4, 9)).astype(np.int32)
    hits = token_hits(jnp.asarray(logits), jnp.asarray(targets))
    np.testing.assert_array_equal(hits, logits.argmax(-1) == targets)
    assert 0 < np.sum(hits) < hits.size
    broken = jnp.asarray(logits).at[0, :, 2].set(jnp.nan)
    assert not token_hits(broken, jnp.asarray(targets))[0].any()


@pytest.mark.slow
def test_supervised_loss_counts_only_weighted_targets():
    logits = jnp.zeros((1, 4, 8)).at[0, :, 3].set(9.0)
    batch = {
        "targets": jnp.asarray([[3, 3, 5, 5]]),
        "weights": jnp.asarray([[0.0, 0.5, 0.5, 0.0]]),
    }
    loss, metrics = supervised_loss(logits, batch)
    good, bad = -np.log(np.exp(9) / (np.exp(9) + 7)), -np.log(1 / (np.exp(9) + 7))
    np.testing.assert_allclose(loss, (good + bad) / 2, rtol=1e-5)
    assert metrics["accuracy"] == 0.5
    assert metrics["tokens"] == 2


def tiny_loss(**loss):
    """Loss, metrics and gradients of a small decoder under a loss config."""
    graphdef, params = initialise(small_decoder())
    rng = np.random.default_rng(1)
    batch = {
        "tokens": rng.integers(0, 40, (2, 8)),
        "targets": rng.integers(0, 40, (2, 8)),
        "positions": np.tile(np.arange(8), (2, 1)),
        "segment_ids": np.ones((2, 8), np.int32),
        "weights": rng.integers(0, 2, (2, 8)).astype(np.float32) / 16,
    }
    loss_fn = make_supervised_loss(graphdef, SupervisedLoss.Config(**loss).build())
    return jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params, batch)


@pytest.mark.full
def test_chunks_of_the_head_change_nothing():
    (whole, metrics), gradients = tiny_loss()
    (chunked, chunked_metrics), chunked_gradients = tiny_loss(chunks=4)
    np.testing.assert_allclose(chunked, whole, rtol=1e-6)
    assert chunked_metrics["tokens"] == metrics["tokens"]
    np.testing.assert_allclose(chunked_metrics["accuracy"], metrics["accuracy"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), chunked_gradients, gradients)


@pytest.mark.slow
def test_the_z_loss_is_the_squared_logsumexp_and_has_a_gradient():
    (plain, _), without = tiny_loss()
    (total, metrics), with_it = tiny_loss(z_loss=0.1)
    np.testing.assert_allclose(total - plain, metrics["z_loss"], rtol=1e-4)
    logits = np.random.default_rng(2).normal(size=(1, 2, 5))
    weights = np.asarray([[0.25, 0.5]])
    batch = {"targets": jnp.zeros((1, 2), jnp.int32), "weights": jnp.asarray(weights)}
    squared = np.log(np.exp(logits).sum(-1)) ** 2
    got = supervised_loss(jnp.asarray(logits, jnp.float32), batch, z_loss=0.1)[1]["z_loss"]
    np.testing.assert_allclose(got, 0.1 * (squared * weights).sum(), rtol=1e-5)
    assert not np.allclose(jax.tree.leaves(without)[0], jax.tree.leaves(with_it)[0])


@pytest.mark.full
def test_no_array_of_all_logits_exists_where_the_head_works_in_chunks():
    graphdef, params = initialise(small_decoder(vocab_size=4096))

    def compiled(chunks: int) -> tuple[int, bool]:
        """Temporary bytes, and whether there is any array as large as all logits."""
        loss_fn = make_supervised_loss(graphdef, SupervisedLoss.Config(chunks=chunks).build())
        ints = jax.ShapeDtypeStruct((4, 64), jnp.int32)
        batch = {
            **dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), ints),
            "weights": jax.ShapeDtypeStruct((4, 64), jnp.float32),
        }
        program = jax.jit(jax.grad(loss_fn, has_aux=True)).lower(params, batch).compile()
        arrays = re.findall(r"f32\[([\d,]+)\]", program.as_text() or "")
        sizes = [math.prod(map(int, array.split(","))) for array in arrays]
        memory = program.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes, max(sizes) >= 4 * 64 * 4096

    whole, chunked = compiled(1), compiled(8)
    assert whole[1] and not chunked[1]
    assert chunked[0] < 0.7 * whole[0]
