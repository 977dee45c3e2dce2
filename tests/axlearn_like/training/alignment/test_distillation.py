"""Distillation by the teacher's most likely tokens, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.training.alignment.distillation import DistillationLoss, kept_divergence, top_tokens
from axlearn_like.training.alignment.teacher import Teacher
from tests.axlearn_like.layers.small import small_decoder
from tests.axlearn_like.training.alignment.test_preferences import slope

pytestmark = pytest.mark.numerics

WORDS = 7


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def divergence(teacher: np.ndarray, student: np.ndarray, kept: int) -> float:
    """KL of one token's distributions, log-probabilities over all words, with the rest as one event."""
    order = np.argsort(-teacher)
    parts = [np.exp([log[order[i]] for i in range(kept)]) for log in (teacher, student)]
    rests = [np.exp(log[order[kept:]]).sum() for log in (teacher, student)]
    events = [np.append(part, rest if kept < WORDS else 1.0) for part, rest in zip(parts, rests, strict=True)]
    p, q = events if kept < WORDS else (parts[0], parts[1])
    return float(np.sum(p * (np.log(p) - np.log(q))))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1, 3, WORDS, WORDS + 2])
def test_it_is_the_divergence_of_kept_tokens_and_the_rest(kept: int):
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(2, 3, WORDS + 4)).astype(np.float32) * 2  # of a larger vocabulary
    student = rng.normal(size=(2, 3, WORDS)).astype(np.float32)
    ids, logprobs = jax.jit(partial(top_tokens, count=kept, words=WORDS, temperature=2.0))(teacher)
    exact = log_softmax(teacher[..., :WORDS].astype(np.float64) / 2)
    size = min(kept, WORDS)
    np.testing.assert_array_equal(ids[..., :size], np.argsort(-exact, axis=-1)[..., :size])
    np.testing.assert_allclose(logprobs[..., :size], np.sort(exact, axis=-1)[..., ::-1][..., :size], rtol=1e-5)

    def total(logits: np.ndarray) -> float:
        ours = log_softmax(logits)
        return sum(divergence(exact[place], ours[place], size) for place in np.ndindex(2, 3))

    compiled = jax.jit(jax.value_and_grad(lambda x: jnp.sum(kept_divergence(x, ids, logprobs))))
    value, gradient = compiled(student)
    np.testing.assert_allclose(value, total(student), rtol=1e-5)
    np.testing.assert_allclose(gradient, slope(total, student.astype(np.float64)), rtol=1e-4, atol=2e-6)
    same = jax.jit(kept_divergence)(teacher[..., :WORDS] / 2, ids, logprobs)
    np.testing.assert_allclose(same, 0, atol=2e-6)


@pytest.mark.slow
def test_more_tokens_say_more_and_certainty_has_a_gradient():
    """The bound grows with the kept tokens up to the whole divergence; nothing is NaN where a teacher is certain."""
    rng = np.random.default_rng(1)
    teacher, student = (jnp.asarray(rng.normal(size=(1, 4, WORDS)).astype(np.float32) * 3) for _ in range(2))
    found = [
        float(jnp.sum(kept_divergence(student, *top_tokens(teacher, count=k, words=WORDS)))) for k in (1, 3, WORDS)
    ]
    assert 0 < found[0] < found[1] < found[2]
    certain = top_tokens(jnp.eye(WORDS)[None] * 200.0, count=2, words=WORDS)
    for logits in (jnp.eye(WORDS)[None] * 200.0, -jnp.eye(WORDS)[None] * 200.0):
        value, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(kept_divergence(x, *certain))))(logits)
        assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize(("field", "value"), [("temperature", 0.0), ("top_k", 0), ("hard", 1.0)])
def test_numbers_that_mean_nothing_are_refused(field: str, value: float):
    teacher = Teacher.Config(model=small_decoder())
    with pytest.raises(ConfigError, match=rf"{field}: expected"):
        DistillationLoss.Config(teacher=teacher).set(**{field: value}).check()
