"""Losses of preferences, and their gradients, against float64 references; no layout of a batch changes them."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.input import UnpairedInput
from axlearn_like.layers.base import bind
from axlearn_like.training.alignment.kto import KTO
from axlearn_like.training.alignment.preferences import DPO, IPO, ORPO, PairSums, SimPO, log_odds
from axlearn_like.training.alignment.reference import FrozenCopy
from axlearn_like.training.alignment.scoring import Scoring
from tests.axlearn_like.layers.small import initialise, small_decoder
from tests.axlearn_like.training.alignment.judged import COUNT, Batch, Judged, Pairs, batch_of, laid_out

pytestmark = pytest.mark.numerics

Formula = Callable[..., float]


def sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def odds(logprob: float) -> float:
    return logprob - np.log(1 - np.exp(logprob))


# Losses of one pair: sums of log pi and of the reference's, and numbers of tokens, of the chosen and rejected side.
def dpo(c: float, r: float, c0: float, r0: float, nc: int, nr: int) -> float:
    return -np.log(sigmoid(0.3 * ((c - c0) - (r - r0))))


def conservative(*pair: Any) -> float:
    return 0.8 * dpo(*pair) + 0.2 * dpo(pair[1], pair[0], pair[3], pair[2], pair[5], pair[4])


def robust(*pair: Any) -> float:
    return (0.8 * dpo(*pair) - 0.2 * dpo(pair[1], pair[0], pair[3], pair[2], pair[5], pair[4])) / 0.6


def with_sft(c: float, *others: Any) -> float:
    return dpo(c, *others) - 0.7 * c / others[3]


def ipo(c: float, r: float, c0: float, r0: float, nc: int, nr: int) -> float:
    return ((c - c0) / nc - (r - r0) / nr - 1 / 0.6) ** 2


def ipo_of_sums(c: float, r: float, c0: float, r0: float, nc: int, nr: int) -> float:
    return ((c - c0) - (r - r0) - 1 / 0.6) ** 2


def orpo(c: float, r: float, c0: float, r0: float, nc: int, nr: int) -> float:
    return -c / nc - 0.4 * np.log(sigmoid(odds(c / nc) - odds(r / nr)))


def simpo(c: float, r: float, c0: float, r0: float, nc: int, nr: int) -> float:
    return -np.log(sigmoid(2.5 * c / nc - 2.5 * r / nr - 0.8))


PAIRED: dict[str, tuple[Any, Formula]] = {
    "dpo": (DPO.Config(beta=0.3), dpo),
    "conservative": (DPO.Config(beta=0.3, label_smoothing=0.2), conservative),
    "robust": (DPO.Config(beta=0.3, label_smoothing=0.2, robust=True), robust),
    "with_sft": (DPO.Config(beta=0.3, sft=0.7), with_sft),
    "ipo": (IPO.Config(beta=0.3), ipo),
    "ipo_of_sums": (IPO.Config(beta=0.3, length_normalised=False), ipo_of_sums),
    "orpo": (ORPO.Config(weight=0.4), orpo),
    "simpo": (SimPO.Config(beta=2.5, gamma=0.8), simpo),
}


def drawn_logprobs(batch: Batch, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-3, -0.05, batch["tokens"].shape).astype(np.float32)


def total(formula: Formula, logprobs: np.ndarray, reference: np.ndarray, batch: Batch) -> float:
    """The mean of a formula over pairs, each in a row, in float64."""
    losses = []
    for row in range(COUNT):
        sides = [batch["sides"][row] == side for side in (1, -1)]
        sums = [array[row, side].sum() for array in (logprobs, reference) for side in sides]
        losses.append(formula(*sums, *(int(side.sum()) for side in sides)))
    return float(np.mean(losses))


def slope(function: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The gradient of a float64 function by central differences."""
    found = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        found[index] = (function(up) - function(down)) / (2 * step)
    return found


@pytest.fixture(scope="module")
def pairs() -> Batch:
    return batch_of(Pairs.Config())


@pytest.fixture(scope="module")
def of_pairs() -> dict[str, Any]:
    """Losses of a pair for each column, and their gradients by (chosen, rejected), of every loss in one program."""
    rng = np.random.default_rng(3)
    sums, tokens = rng.uniform(-9, -0.05, (4, 12)).astype(np.float32), rng.integers(1, 6, (2, 12))

    def losses(cfg: Any, chosen: jax.Array, rejected: jax.Array) -> tuple[jax.Array, jax.Array]:
        counts = tokens.astype(np.float32)
        sides = PairSums(chosen, sums[2], counts[0]), PairSums(rejected, sums[3], counts[1])
        judged = cfg.build().of_pairs(*sides)
        return jnp.sum(judged.loss), judged.loss

    def all_of(chosen: jax.Array, rejected: jax.Array) -> dict[str, Any]:
        grads = {
            name: jax.grad(partial(losses, cfg), argnums=(0, 1), has_aux=True) for name, (cfg, _) in PAIRED.items()
        }
        return {name: grad(chosen, rejected) for name, grad in grads.items()}

    return {"": [*sums.astype(np.float64), *tokens], **jax.device_get(jax.jit(all_of)(*sums[:2]))}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRED)
def test_loss_and_gradient_of_a_pair_are_the_formula_in_float64(name, of_pairs):
    gradient, losses = of_pairs[name]
    for column, arguments in enumerate(zip(*of_pairs[""], strict=True)):
        # A margin of simpo's is a difference of numbers up to 22: as much more is lost of its small losses.
        np.testing.assert_allclose(losses[column], PAIRED[name][1](*arguments), rtol=1e-5)
        exact = slope(lambda x, rest=arguments[2:]: PAIRED[name][1](*x, *rest), np.array(arguments[:2]))
        np.testing.assert_allclose([side[column] for side in gradient], exact, rtol=2e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_sft", "orpo"])
def test_a_batch_is_the_mean_over_its_pairs_and_prompts_have_no_gradient(name, pairs):
    cfg, formula = PAIRED[name]
    rows = [(0, 3), (7, 1), (), (2, 4), (5, 6)]
    policy, reference = drawn_logprobs(pairs, 1), drawn_logprobs(pairs, 2)
    packed = laid_out({**pairs, "policy": policy, "reference": reference}, rows)
    arrays = [jnp.asarray(packed[each]) for each in ("policy", "reference", "sides", "weights")]
    value_and_grad: Any = jax.jit(jax.value_and_grad(cfg.build().of_tokens, has_aux=True))
    (loss, metrics), gradient = value_and_grad(*arrays)
    exact = policy.astype(np.float64), reference.astype(np.float64)
    np.testing.assert_allclose(loss, total(formula, *exact, pairs), rtol=2e-6)
    assert loss == metrics["loss"] and metrics["tokens"] == np.sum(pairs["sides"] != 0)
    expected = slope(lambda x: total(formula, x, exact[1], pairs), exact[0])
    expected = laid_out({**pairs, "gradient": expected}, rows)["gradient"]
    assert np.abs(expected).max() > 0.01 and np.abs(gradient[packed["sides"] == 0]).max() == 0
    np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=1e-8)
    check_metrics(name, metrics, pairs, *exact)


def check_metrics(name: str, metrics: Any, pairs: Batch, policy: np.ndarray, reference: np.ndarray) -> None:
    """Compare the metrics with those of the pairs, in float64."""
    masks = [pairs["sides"] == side for side in (1, -1)]
    chosen, rejected = (np.sum(policy * mask, axis=1) for mask in masks)
    assert 0 < metrics["accuracy"] < 1
    np.testing.assert_allclose(metrics["logprob_chosen"], chosen.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["logprob_rejected"], rejected.mean(), rtol=1e-5)
    if name == "orpo":
        assert "divergence" not in metrics
        return
    rewards = [0.3 * np.sum((policy - reference) * mask, axis=1) for mask in masks]
    np.testing.assert_allclose(metrics["accuracy"], np.mean(rewards[0] > rewards[1]), rtol=1e-6)
    np.testing.assert_allclose(metrics["margin"], np.mean(rewards[0] - rewards[1]), rtol=1e-5)
    np.testing.assert_allclose(metrics["reward_rejected"], np.mean(rewards[1]), rtol=1e-5)
    live, k2 = pairs["sides"] != 0, 0.5 * (policy - reference) ** 2
    np.testing.assert_allclose(metrics["divergence"], np.mean([k2[r, live[r]].mean() for r in range(COUNT)]), rtol=1e-5)


@pytest.mark.slow
def test_kto_is_its_formula_and_its_reference_point_has_no_gradient():
    batch = batch_of(Judged.Config(), UnpairedInput)
    policy, reference = drawn_logprobs(batch, 1), drawn_logprobs(batch, 2)
    cfg = KTO.Config(beta=0.3, good=1.2, bad=0.7)

    def formula(policy: np.ndarray, kl: float) -> float:
        losses = []
        for row in range(COUNT):
            live = batch["sides"][row] != 0
            ahead = 0.3 * ((policy[row] - reference[row].astype(np.float64))[live].sum() - max(kl, 0.0))
            is_good = batch["sides"][row].max() == 1
            losses.append(1.2 * (1 - sigmoid(ahead)) if is_good else 0.7 * (1 - sigmoid(-ahead)))
        return float(np.mean(losses))

    arrays = [jnp.asarray(array) for array in (reference, batch["sides"], batch["weights"])]
    of_tokens = cast(KTO, cfg.build()).of_tokens
    value_and_grad: Any = jax.jit(jax.value_and_grad(of_tokens, argnums=(0, 4), has_aux=True))
    for kl in (0.6, -0.6):  # an estimate below zero counts as zero
        (loss, metrics), (gradient, none) = value_and_grad(jnp.asarray(policy), *arrays, jnp.float32(kl))
        exact = policy.astype(np.float64)
        np.testing.assert_allclose(loss, formula(exact, kl), rtol=1e-6)
        np.testing.assert_allclose(gradient, slope(lambda x, kl=kl: formula(x, kl), exact), rtol=2e-5, atol=1e-8)
        assert none == 0 and metrics["kl"] == pytest.approx(max(kl, 0.0))
        assert metrics["good"] == pytest.approx(3 / COUNT)


@pytest.mark.slow
def test_odds_keep_their_digits_where_a_completion_is_almost_certain():
    for logprob in (-1e-5, -1e-3, -0.1, -5.0, -60.0):
        value, gradient = jax.value_and_grad(log_odds)(jnp.float32(logprob))
        exact = np.float64(np.float32(logprob))
        np.testing.assert_allclose(value, exact - np.log(-np.expm1(exact)), rtol=1e-6)
        np.testing.assert_allclose(gradient, 1 / -np.expm1(exact), rtol=1e-5)
    value, gradient = jax.value_and_grad(log_odds)(jnp.float32(0.0))
    assert np.isfinite(value) and gradient == 0


# ---- of a model


def scored(cfg: Any, batch: Batch, graphdef: Any, params: Any, reference: Any, microbatches: int = 1) -> Any:
    held = FrozenCopy.Config().build(frozen=())
    held.start(reference)
    scoring = Scoring(cfg.build(), held, graphdef, microbatches)
    return scoring.scored(params, {name: jnp.asarray(array) for name, array in batch.items()})


@pytest.fixture(scope="module")
def policies() -> tuple[Any, Any, Any]:
    graphdef, params = initialise(small_decoder(num_layers=1), seed=1)
    return graphdef, params, initialise(small_decoder(num_layers=1))[1]


@pytest.mark.full
def test_no_layout_of_a_batch_changes_the_gradient(policies):
    """KTO, whose reference point is of the whole batch: rows, order, packing, padding, microbatches."""
    graphdef, params, reference = policies
    loss = KTO.Config(chunks=3)
    plain = batch_of(Judged.Config(), UnpairedInput)
    grad = jax.jit(jax.grad(lambda params, batch: loss.build()(bind(graphdef, params), batch), has_aux=True))
    whole = scored(loss, plain, graphdef, params, reference)
    expected, metrics = grad(params, whole)
    assert whole["mismatched"] > 0 and not any(name.startswith("other_") for name in whole)
    order = [(6, 1), (3,), (), (0, 2, 5), (7, 4)]
    packed = scored(loss, laid_out(plain, order, garbage=39), graphdef, params, reference)
    np.testing.assert_allclose(packed["mismatched"], whole["mismatched"], rtol=1e-5)
    found, again = grad(params, packed)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert scale > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), expected, found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), metrics, again)

    in_parts = scored(loss, plain, graphdef, params, reference, microbatches=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, in_parts)
    parts = [
        {name: jnp.where(np.arange(COUNT)[:, None] % 3 == part, x, 0) if x.ndim else x for name, x in whole.items()}
        for part in range(3)
    ]
    added = jax.tree.map(lambda *gs: sum(gs), *(grad(params, part)[0] for part in parts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), expected, added)


@pytest.mark.parametrize(
    ("cfg", "field"),
    [
        (DPO.Config(beta=0.0), "beta"),
        (DPO.Config(label_smoothing=0.5), "label_smoothing"),
        (DPO.Config(robust=True), "robust"),
        (IPO.Config(beta=-1.0), "beta"),
        (ORPO.Config(weight=0.0), "weight"),
        (SimPO.Config(gamma=-0.1), "gamma"),
        (KTO.Config(good=0.0), "good"),
        (KTO.Config(chunks=0), "chunks"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_by_field(cfg, field):
    with pytest.raises(ConfigError, match=rf"{field}: expected"):
        cfg.check()
