import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.losses import supervised_loss, token_logprobs


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


def test_token_logprobs_survive_large_logits():
    logits = jnp.asarray([[[1e4, 0.0, -1e4]]])
    value, gradient = jax.value_and_grad(lambda x: token_logprobs(x, jnp.asarray([[0]])).sum())(logits)
    assert value == 0.0
    assert np.isfinite(gradient).all()


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
