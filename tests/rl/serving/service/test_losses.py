"""Named losses: each against its formula in float64, and its gradient, with rows of several losses side by side."""

from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tinker.types.loss_fn_type import LossFnType

from rl.serving.service.losses import LOSSES, NAMES, NUMBERS, loss_arrays, loss_numbers, token_losses
from rl.serving.service.messages import Datum, LossName, ServiceError

pytestmark = pytest.mark.numerics

LENGTH = 24
Row = Mapping[str, np.ndarray]


def clipped(ratio: np.ndarray, advantage: np.ndarray, low: Any, high: Any) -> np.ndarray:
    return -np.minimum(ratio * advantage, np.minimum(np.maximum(ratio, low), high) * advantage)


# Formulas in float64, as the documentation has them: p, row, numbers -> losses of tokens.
FORMULAS: dict[LossName, Callable[[np.ndarray, Row, Mapping[str, float]], np.ndarray]] = {
    "cross_entropy": lambda p, row, n: -p * row["weights"],
    "importance_sampling": lambda p, row, n: -np.exp(p - row["logprobs"]) * row["advantages"],
    "ppo": lambda p, row, n: clipped(
        np.exp(p - row["logprobs"]), row["advantages"], n["clip_low_threshold"], n["clip_high_threshold"]
    ),
    "cispo": lambda p, row, n: (
        -np.clip(np.exp(p - row["logprobs"]), n["clip_low_threshold"], n["clip_high_threshold"]) * p * row["advantages"]
    ),
    "dro": lambda p, row, n: -(p * row["advantages"] - 0.5 * n["beta"] * (p - row["logprobs"]) ** 2),
    "gspo": lambda p, row, n: clipped(
        np.full_like(p, np.exp(np.mean((p - row["logprobs"])[row["advantages"] != 0]))),
        row["advantages"],
        n["clip_low_threshold"],
        n["clip_high_threshold"],
    ),
}
SETTINGS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.97, "clip_high_threshold": 1.02},
}


def make_row(loss: LossName, length: int, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return float64 log-probabilities, and inputs: a prompt of a third, then tokens with advantages of both signs."""
    p = -rng.exponential(1.0, length)
    advantages = rng.standard_normal(length)
    if loss == "gspo":  # one advantage a row, as in its paper
        advantages = np.full(length, rng.standard_normal())
    advantages[: length // 3] = 0.0
    inputs = {
        "weights": rng.standard_normal(length),
        "logprobs": p + 0.3 * rng.standard_normal(length),
        "advantages": advantages,
    }
    return p, {"target_tokens": np.zeros(length, np.int64)} | {name: inputs[name] for name in LOSSES[loss].inputs}


def gradient(loss: LossName, p: np.ndarray, row: Row, numbers: Mapping[str, float]) -> np.ndarray:
    """Return the gradient of the row's sum: closed where part of it is constant, of differences elsewhere."""
    if loss == "cispo":
        ratio = np.clip(np.exp(p - row["logprobs"]), numbers["clip_low_threshold"], numbers["clip_high_threshold"])
        return -ratio * row["advantages"]
    formula, found = FORMULAS[loss], np.zeros_like(p)
    for at in range(len(p)):
        step = np.zeros_like(p)
        step[at] = 1e-6
        found[at] = (np.sum(formula(p + step, row, numbers)) - np.sum(formula(p - step, row, numbers))) / 2e-6
    return found


def packed(
    rows: list[tuple[LossName, np.ndarray, dict[str, np.ndarray]]],
    rng: np.random.Generator,
    configs: Mapping[str, Mapping[str, float]],
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], jax.Array]:
    """Return the arguments of `token_losses`; behind a row's end everything is garbage."""
    shape = (len(rows), LENGTH)
    garbage = rng.choice(np.array([np.nan, np.inf, -np.inf, 1e30, -5.0], np.float32), (len(NAMES) + 1, *shape))
    logprobs, arrays = garbage[0], {str(name): array for name, array in zip(NAMES, garbage[1:], strict=True)}
    live, kinds = np.zeros(shape, bool), np.zeros(len(rows), np.int32)
    for index, (loss, p, inputs) in enumerate(rows):
        datum = Datum(np.zeros(len(p), np.int32), {name: np.asarray(x, np.float32) for name, x in inputs.items()})
        kinds[index], live[index, : len(p)], logprobs[index, : len(p)] = NUMBERS[loss], True, p
        given = loss_arrays(loss, loss_numbers(loss, configs.get(loss, {})), datum, "datum 0")
        for name in NAMES:
            arrays[name][index, : len(p)] = given.get(name, 7e20)  # what a row's loss does not take does not matter
    return jnp.asarray(kinds), jnp.asarray(logprobs), jax.tree.map(jnp.asarray, arrays), jnp.asarray(live)


@pytest.mark.slow
@pytest.mark.parametrize("configs", [{}, SETTINGS], ids=["defaults", "settings"])
def test_losses_and_gradients_are_those_of_the_formulas(configs: dict[str, dict[str, float]]):
    rng = np.random.default_rng(0)
    rows: list[tuple[LossName, Any, Any]] = [
        (loss, *make_row(loss, length, rng)) for loss in LOSSES for length in (1, 3, 16, LENGTH, 17)
    ]
    kinds, logprobs, arrays, live = packed(rows, rng, configs)

    def total(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses = token_losses(kinds, logprobs, arrays, live)
        return jnp.sum(losses), losses

    (_, losses), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(logprobs)
    moved = dict.fromkeys(LOSSES, 0)
    for index, (loss, p, inputs) in enumerate(rows):
        numbers, length = loss_numbers(loss, configs.get(loss, {})), len(p)
        np.testing.assert_allclose(losses[index, :length], FORMULAS[loss](p, inputs, numbers), rtol=2e-4, atol=1e-5)
        expected = gradient(loss, p, inputs, numbers)
        np.testing.assert_allclose(gradients[index, :length], expected, rtol=2e-4, atol=2e-5, err_msg=loss)
        assert not np.any(losses[index, length:]) and not np.any(gradients[index, length:])
        moved[loss] += int(np.any(expected != 0))
    assert all(moved.values()), "each loss has rows with a gradient"


@pytest.mark.slow
def test_thresholds_and_masks_of_tokens_take_the_place_of_numbers():
    rng = np.random.default_rng(1)
    p, inputs = make_row("ppo", 12, rng)
    low, high = rng.uniform(0.7, 0.99, 12), rng.uniform(1.01, 1.4, 12)
    rows: list[tuple[LossName, np.ndarray, dict[str, np.ndarray]]] = [
        ("ppo", p, inputs | {"clip_low_threshold": low, "clip_high_threshold": high})
    ]
    found = token_losses(*packed(rows, rng, {}))[0, :12]
    ratio = np.exp(p - inputs["logprobs"])
    np.testing.assert_allclose(found, clipped(ratio, inputs["advantages"], low, high), rtol=1e-4, atol=1e-6)

    p, inputs = make_row("gspo", 12, rng)
    mask = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0.0])
    found = token_losses(*packed([("gspo", p, inputs | {"sequence_ratio_mask": mask})], rng, SETTINGS))[0, :12]
    ratio = np.exp(np.mean((p - inputs["logprobs"])[4:9]))
    np.testing.assert_allclose(found, clipped(np.full(12, ratio), inputs["advantages"], 0.97, 1.02), rtol=1e-4)


@pytest.mark.slow
def test_the_gradient_of_gspo_is_that_of_the_sequence():
    """Compare with n times the gradient of s A, where n tokens have one advantage and s is the row's geometric mean."""
    rng = np.random.default_rng(2)
    p, inputs = make_row("gspo", 10, rng)
    kinds, logprobs, arrays, live = packed(
        [("gspo", p, inputs)], rng, {"gspo": {"clip_high_threshold": 1e9, "clip_low_threshold": 0.0}}
    )
    found = jax.grad(lambda x: jnp.sum(token_losses(kinds, x, arrays, live)))(logprobs)
    drawn = inputs["advantages"] != 0
    s = np.exp(np.mean((p - inputs["logprobs"])[drawn]))
    np.testing.assert_allclose(found[0, :10], -s * inputs["advantages"], rtol=1e-4)


def test_names_are_those_of_the_client():
    theirs = set(get_args(LossFnType))
    assert set(LOSSES) < theirs and theirs - set(LOSSES) == {"stable_reinforce", "custom"}


def datum(**inputs: object) -> Datum:
    whole = {"target_tokens": [1, 2, 3], **inputs}
    return Datum(np.zeros(3, np.int32), {name: np.asarray(value) for name, value in whole.items() if value is not None})


REFUSED: list[tuple[LossName, dict[str, object], str]] = [
    ("cross_entropy", {}, "datum 4: cross_entropy needs weights; got target_tokens"),
    ("cross_entropy", {"target_tokens": None, "weights": [1.0] * 3}, "needs target_tokens; got weights"),
    ("cross_entropy", {"weights": [1.0] * 3, "advantages": [0.0] * 3}, "takes no input 'advantages'"),
    ("ppo", {"logprobs": [0.0] * 3, "advantage": [0.0] * 3}, "needs advantages"),
    ("ppo", {"logprobs": [0.0] * 3, "advantages": [0.0] * 3, "clip_hi_threshold": [0.0] * 3}, "did you mean"),
    ("dro", {"logprobs": [0.0] * 2, "advantages": [0.0] * 3}, r"logprobs has shape \(2,\); expected \(3,\)"),
    ("gspo", {"logprobs": [0.0, np.nan, 0], "advantages": [0.0] * 3}, r"logprobs\[1\] is nan"),
]


@pytest.mark.parametrize(("loss", "inputs", "message"), REFUSED)
def test_wrong_inputs_are_refused_by_name(loss: LossName, inputs: dict[str, object], message: str):
    with pytest.raises(ServiceError, match=message) as caught:
        loss_arrays(loss, loss_numbers(loss, {}), datum(**inputs), "datum 4")
    assert caught.value.category == "user"


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("pppo", {}, "no loss 'pppo'; did you mean 'ppo'"),
        ("custom", {}, "known: cispo, cross_entropy"),
        ("ppo", {"clip_low": 0.9}, "no setting 'clip_low'; did you mean 'clip_low_threshold'"),
        ("cross_entropy", {"beta": 1.0}, "no setting 'beta'; it has none"),
        ("dro", {"beta": float("nan")}, "dro.beta: got nan"),
        ("dro", {"beta": "much"}, "dro.beta: got 'much'"),
        ("ppo", {"clip_low_threshold": 1.3}, r"clip_low_threshold=1.3 is above clip_high_threshold=1.2"),
    ],
)
def test_wrong_settings_are_refused_by_name(loss: str, config: dict[str, float | str], message: str):
    with pytest.raises(ServiceError, match=message):
        loss_numbers(loss, config)
