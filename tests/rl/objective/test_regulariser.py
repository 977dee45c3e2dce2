"""KL estimators by exact expectation over a small vocabulary, and the entropy bonus."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh.errors import UserError
from rl.objective import EntropyBonus, NoRegulariser, ReferenceKL, Sum, kl_k1, kl_k2, kl_k3
from rl.objective.tokens import gather_tokens

pytestmark = pytest.mark.numerics

RNG = np.random.default_rng(0)
LOGITS, REFERENCE, OLD = (jnp.asarray(RNG.normal(size=6), jnp.float32) for _ in range(3))


def log_softmax(logits):
    return jax.nn.log_softmax(logits)


def reverse_kl(logits):
    return jnp.sum(jnp.exp(log_softmax(logits)) * (log_softmax(logits) - log_softmax(REFERENCE)))


def forward_kl(logits):
    reference = log_softmax(REFERENCE)
    return jnp.sum(jnp.exp(reference) * (reference - log_softmax(logits)))


def expected_term(cfg, old_logits):
    """Exact E over tokens drawn from pi_old of the regulariser's term, a function of logits."""
    old = log_softmax(old_logits)
    regulariser = cfg.build()

    def term(logits):
        probabilities = jnp.exp(old)[None]
        batch = {
            "logprobs_old": old[None],
            "logprobs_behaviour": old[None],
            "logprobs_reference": log_softmax(REFERENCE)[None],
            "action_mask": jnp.ones((1, 6), bool),
            "weights": probabilities,  # the "sequence" runs over the vocabulary
            "advantages": jnp.zeros(1),
        }
        tokens = gather_tokens(log_softmax(logits)[None], batch, old_policy="recompute")
        return jnp.sum(tokens.weights * regulariser(tokens))

    return term


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_values():
    p, q = log_softmax(LOGITS), log_softmax(REFERENCE)
    d = np.asarray(p, np.float64) - np.asarray(q, np.float64)
    close(kl_k1(p, q), d)
    close(kl_k2(p, q), d**2 / 2)
    close(kl_k3(p, q), np.exp(-d) - 1 + d)
    assert np.all(np.asarray(kl_k3(p, q)) >= 0)
    close(jnp.sum(jnp.exp(p) * kl_k1(p, q)), reverse_kl(LOGITS))
    close(jnp.sum(jnp.exp(p) * kl_k3(p, q)), reverse_kl(LOGITS))


def test_k3_does_not_overflow():
    assert np.isfinite(kl_k3(jnp.float32(-400.0), jnp.float32(0.0)))


def test_k1_has_no_gradient_in_expectation_and_is_refused_as_a_loss():
    p = jnp.exp(log_softmax(LOGITS))
    gradient = jax.grad(lambda x: jnp.sum(p * kl_k1(log_softmax(x), log_softmax(REFERENCE))))
    np.testing.assert_allclose(gradient(LOGITS), 0.0, atol=1e-6)
    with pytest.raises(UserError, match="ReferenceKL.estimator: expected 'k2'.*kl_k1.* got 'k1'"):
        ReferenceKL.Config(coef=0.1, estimator="k1").build()


@pytest.mark.slow
def test_on_policy_k2_follows_the_reverse_kl_and_k3_the_forward():
    k2 = expected_term(ReferenceKL.Config(coef=0.5, estimator="k2"), LOGITS)
    k3 = expected_term(ReferenceKL.Config(coef=0.5, estimator="k3"), LOGITS)
    close(jax.grad(k2)(LOGITS), -0.5 * jax.grad(reverse_kl)(LOGITS))
    close(jax.grad(k3)(LOGITS), -0.5 * jax.grad(forward_kl)(LOGITS))
    close(k3(LOGITS), -0.5 * reverse_kl(LOGITS))
    assert np.abs(jax.grad(reverse_kl)(LOGITS) - jax.grad(forward_kl)(LOGITS)).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "ratio"), [("k2", "detached"), ("k3", "differentiated")])
def test_off_policy_the_ratio_restores_the_reverse_kl(estimator, ratio):
    cfg = ReferenceKL.Config(coef=1.0, estimator=estimator, ratio=ratio)
    close(jax.grad(expected_term(cfg, OLD))(LOGITS), -jax.grad(reverse_kl)(LOGITS))
    bare = expected_term(cfg.clone(ratio="none"), OLD)
    assert np.abs(jax.grad(bare)(LOGITS) + jax.grad(reverse_kl)(LOGITS)).max() > 0.01


def arrays(mask):
    names = ("logprobs_old", "logprobs_behaviour", "weights")
    batch = {name: jnp.ones(mask.shape) for name in names}
    return {**batch, "action_mask": jnp.asarray(mask), "advantages": jnp.zeros(mask.shape[:-1])}


def test_entropy_bonus_pushes_only_where_tokens_count():
    mask = np.array([[True, True, False]])
    entropy = jnp.asarray([[1.0, 2.0, jnp.nan]])

    def total(h):
        tokens = gather_tokens(jnp.zeros((1, 3)), arrays(mask), old_policy="recompute", entropy=h)
        return jnp.sum(EntropyBonus.Config(coef=0.1).build()(tokens))

    value, gradient = jax.value_and_grad(total)(entropy)
    assert float(value) == pytest.approx(0.3)
    close(gradient, [[0.1, 0.1, 0.0]])


def test_sum_adds_and_reports_what_it_needs():
    terms = (EntropyBonus.Config(coef=1.0), EntropyBonus.Config(coef=0.5))
    tokens = gather_tokens(
        jnp.zeros((1, 2)),
        arrays(np.ones((1, 2), bool)),
        old_policy="recompute",
        entropy=jnp.asarray([[1.0, 2.0]]),
    )
    combined = Sum.Config(terms=terms).build()
    close(combined(tokens), [[1.5, 3.0]])
    assert not combined.needs_reference
    assert Sum.Config(terms=(ReferenceKL.Config(coef=1.0),)).build().needs_reference
    close(NoRegulariser.Config().build()(tokens), [[0.0, 0.0]])


def test_the_exact_kl_has_its_gradient_whichever_token_was_drawn():
    """One state at three places of a row, of which the last is no action."""
    cfg, batch = ReferenceKL.Config(coef=0.5, estimator="exact"), arrays(np.array([[True, True, False]]))

    def total(logits):
        kl = reverse_kl(logits) * jnp.asarray([[1.0, 1.0, 7.0]])
        tokens = gather_tokens(log_softmax(logits)[None, :3], batch, old_policy="recompute", kl=kl)
        return jnp.sum(cfg.build()(tokens))

    close(jax.grad(total)(LOGITS), -0.5 * 2 * jax.grad(reverse_kl)(LOGITS))
    both = Sum.Config(terms=(cfg, ReferenceKL.Config(coef=1.0))).build()
    alone = cfg.build()
    assert (both.needs_exact_kl, both.needs_reference) == (True, True)
    assert (alone.needs_exact_kl, alone.needs_reference) == (True, False)


def test_missing_inputs_are_named():
    tokens = gather_tokens(jnp.zeros((1, 2)), arrays(np.ones((1, 2), bool)), old_policy="recompute")
    with pytest.raises(KeyError, match="logprobs_reference"):
        ReferenceKL.Config(coef=0.1).build()(tokens)
    with pytest.raises(ValueError, match="kl="):
        ReferenceKL.Config(coef=0.1, estimator="exact").build()(tokens)
    with pytest.raises(ValueError, match="entropy="):
        EntropyBonus.Config(coef=0.1).build()(tokens)
