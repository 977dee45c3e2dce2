"""Mutations: what stacks get wrong, each of which the comparisons of test_invariance.py must see.

The traps are those of docs/inside/objective-tests.md. With a decoder: tests/rl/training/test_packed_update.py.
"""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.objective import (
    Objective,
    Prepared,
    ReferencePenalty,
    aggregation,
    importance,
    regulariser,
    surrogate,
    tokens,
)
from rl.objective.advantage import GroupAdvantage, LeaveOneOutAdvantage, OptimalBaselineAdvantage
from rl.objective.importance import NoImportance
from rl.training import program
from rl.training.batching import Batch
from tests.rl.objective.papers import (
    CASES,
    LENGTHS,
    MOST,
    MU,
    NEW,
    OLD,
    SIZES,
    TOOL,
    by_rollout,
    mean,
    prompts,
    ratio,
)
from tests.rl.objective.papers import tokens as tokens_of
from tests.rl.objective.test_invariance import (
    IDS,
    LAYOUTS,
    TOLERANCE,
    Layout,
    batches,
    error,
    expected,
    read_table,
    summed,
    table,
)

__all__ = ["table"]  # a fixture

Mutation = Callable[[Objective, pytest.MonkeyPatch], tuple[Objective, Callable[[list[Batch]], list[Batch]]]]
PADDED, PACKED = LAYOUTS["padded"], LAYOUTS["packed"]


def config(**changes: Any) -> Mutation:
    """The same objective with other fields."""
    return lambda objective, patch: (_changed(objective, **changes), list)


def edited(edit: Callable[[Batch], object]) -> Mutation:
    """Arrays of each micro-batch, changed in place."""

    def apply(given: list[Batch]) -> list[Batch]:
        for batch in given:
            edit(batch)
        return given

    return lambda objective, patch: (objective, apply)


def patched(place: Any, name: str, replacement: Callable[..., Any]) -> Mutation:
    """A function of the objective, replaced."""

    def mutate(objective: Objective, patch: pytest.MonkeyPatch) -> Any:
        patch.setattr(place, name, replacement)
        return objective, list

    return mutate


def _changed(objective: Objective, **changes: Any) -> Objective:
    for name, value in changes.items():
        setattr(objective, name, value)
    return objective


def _mean_of_means(batch: Batch) -> None:
    batch["weights"] = batch["weights"] / max(batch["weights"].sum(), 1e-9) / 2


def _divided_again(batch: Batch) -> None:
    batch["weights"] = batch["weights"] / 2


def _shift(batch: Batch) -> None:
    batch["logprobs_old"] = np.roll(batch["logprobs_old"], 1, axis=-1)


def _version_before(batch: Batch) -> None:
    """pi_old by the weights of the update before: those that drew the tokens."""
    batch["logprobs_old"] = batch["logprobs_behaviour"]


def _by_token_id(batch: Batch) -> None:
    """The mask of a tokenizer whose padding is its end-of-text token: the last token of a rollout is none."""
    last = IDS[np.arange(len(SIZES))[:, None], np.arange(MOST), LENGTHS - 1]
    batch["weights"] = np.where(np.isin(batch["targets"], last), 0.0, batch["weights"]).astype(np.float32)


def _tools_learned(batch: Batch) -> None:
    tool = np.isin(batch["targets"], [IDS[at] for at in TOOL])
    batch["action_mask"] = batch["action_mask"] | tool
    batch["weights"] = np.where(tool, batch["weights"].max(), batch["weights"])


def _next_completion(batch: Batch) -> None:
    batch["advantages"] = np.roll(batch["advantages"], 1, axis=-1)


def _flat_rollouts(mask: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A mean over all rollouts of the batch, whatever their prompts."""
    return np.full((len(mask), 1), max(int(mask.any(axis=1).sum()), 1))


def _padded_rollouts(mask: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Rows without a live token counted too."""
    sizes = np.bincount(groups)
    return (len(sizes) * sizes)[groups][:, None]


def _scored_as_zero(objective: Objective, patch: pytest.MonkeyPatch) -> Any:
    """Rollouts on which the verifier failed count as wrong answers."""
    whole = Objective.prepare

    def prepare(self: Objective, rewards: np.ndarray, *args: Any, **options: Any) -> Prepared:
        zeroed = np.where(options["scored"], rewards, 0.0)
        return whole(self, zeroed, *args, **{**options, "scored": None})

    patch.setattr(Objective, "prepare", prepare)
    return objective, list


def _truncated_late(objective: Objective, patch: pytest.MonkeyPatch) -> Any:
    whole = Objective.prepare

    def prepare(self: Objective, *args: Any, **options: Any) -> Prepared:
        self.mask_truncated = False
        found = whole(self, *args, **options)
        weights = np.where(options["truncated"][:, None], 0.0, found.arrays["weights"])
        return found._replace(arrays={**found.arrays, "weights": weights.astype(np.float32)})

    patch.setattr(Objective, "prepare", prepare)
    return objective, list


def _shaped_late(objective: Objective, patch: pytest.MonkeyPatch) -> Any:
    """The overlong penalty behind the normalisation of the groups."""
    whole, shaping = Objective.prepare, objective.reward_shaping

    def prepare(self: Objective, rewards: np.ndarray, mask: np.ndarray, **options: Any) -> Prepared:
        self.reward_shaping = None
        found = whole(self, rewards, mask, **options)
        assert shaping is not None
        penalty = shaping(np.zeros(len(mask)), mask.sum(axis=1))
        live = found.arrays["weights"].any(axis=1)
        shaped = np.where(live, found.arrays["advantages"] + penalty, 0.0)
        return found._replace(arrays={**found.arrays, "advantages": shaped.astype(np.float32)})

    patch.setattr(Objective, "prepare", prepare)
    return objective, list


def _normalised_early(objective: Objective, patch: pytest.MonkeyPatch) -> Any:
    """Deviation of the batch over groups of equal rewards too, which are left out afterwards."""
    whole = Objective.prepare

    def prepare(self: Objective, *args: Any, **options: Any) -> Prepared:
        kept = whole(self, *args, **options)
        self.drop_zero_variance = False
        early = whole(self, *args, **options).arrays["advantages"]
        return kept._replace(arrays={**kept.arrays, "advantages": early})

    patch.setattr(Objective, "prepare", prepare)
    return objective, list


def _noisy(self: Any, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray) -> np.ndarray:
    """GRPO's advantages in float32, without the rule for equal rewards: their mean is off by a rounding, over eps."""
    found = np.zeros(len(rewards), np.float32)
    for group in np.unique(groups[live]):
        own = live & (groups == group)
        values = rewards[own].astype(np.float32)
        centred = values - values.sum(dtype=np.float32) / np.float32(len(values))
        found[own] = centred / (np.sqrt(np.mean(centred**2)) + np.float32(1e-6))
    return found.astype(np.float64)


def _scored_otherwise(change: Callable[[jax.Array], jax.Array]) -> Callable[..., program.Scored]:
    def score(*args: Any) -> program.Scored:
        found = read_table(*args)
        return found._replace(logprobs=change(found.logprobs))

    return score


def _at_temperature(logprobs: jax.Array) -> jax.Array:
    """The token against all others, as two words, at temperature 1 where the sampler drew at 0.7."""
    return jax.nn.log_sigmoid(0.7 * (logprobs - jnp.log1p(-jnp.exp(logprobs))))


def _with_cut_words(logprobs: jax.Array) -> jax.Array:
    """A tenth of the mass is that of words which top-p had cut off when the token was drawn."""
    return logprobs + jnp.log(0.9)


def _product(x: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask, x, 0.0), axis=-1, keepdims=True)


def _unmasked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=-1, keepdims=True)


def _own_baseline(self: Any, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray, *_: np.ndarray) -> np.ndarray:
    """The plain mean of the group, which is also that weighted by lengths that are all padded."""
    return GroupAdvantage.Config(normalise_std=False).build()(rewards, groups, live)


def _ratio_of_one(self: Any, drawn_tokens: tokens.Tokens) -> tuple[jax.Array, jax.Array]:
    """Pi / 1 at the tokens of demonstrations, without the shaping."""
    assert drawn_tokens.demonstrations is not None
    value, limited = self._drawn(drawn_tokens)
    return jnp.where(drawn_tokens.demonstrations, jnp.exp(drawn_tokens.new), value), limited


def _weighed_by_one(drawn_tokens: tokens.Tokens, level: importance.Level) -> jax.Array:
    """pi_old / 1 at the tokens of demonstrations, too."""
    assert drawn_tokens.demonstrations is not None
    behaviour = jnp.where(drawn_tokens.demonstrations, 0.0, drawn_tokens.behaviour)
    return jnp.exp(jax.lax.stop_gradient(drawn_tokens.old - behaviour))


def _baseline_of_drawn(objective: Objective, patch: pytest.MonkeyPatch) -> Any:
    """Means of groups over what the policy drew alone."""
    whole = Objective.prepare

    def prepare(self: Objective, rewards: np.ndarray, *args: Any, **options: Any) -> Prepared:
        found = whole(self, rewards, *args, **options)
        own = options["scored"] & ~options["demonstrations"]
        of_group = [own & (options["groups"] == g) for g in options["groups"]]
        means = np.asarray([rewards[mask].sum() / max(mask.sum(), 1) for mask in of_group])
        live = found.arrays["weights"].any(axis=1)
        advantages = np.where(live, rewards - means, 0.0).astype(np.float32)
        return found._replace(arrays={**found.arrays, "advantages": advantages})

    patch.setattr(Objective, "prepare", prepare)
    return objective, list


# Trap of docs/inside/objective-tests.md: (preset, layout, what is done wrong).
MUTATIONS: dict[str, tuple[str, Layout, Mutation]] = {
    "mean of the micro-batches' means": ("dapo", PADDED, edited(_mean_of_means)),
    "divided again by the accumulated micro-batches": (
        "grpo",
        PADDED,
        edited(lambda b: b.update(weights=b["weights"] / 3)),
    ),
    "mean over all rollouts, not prompts": ("grpo", PADDED, patched(aggregation, "_rollouts_in_mean", _flat_rollouts)),
    "rows without tokens in the denominator": (
        "rloo",
        PADDED,
        patched(aggregation, "_rollouts_in_mean", _padded_rollouts),
    ),
    "pi_old follows pi": ("grpo", PADDED, config(old_policy="current")),
    "clip on pi / mu": ("grpo on stale rollouts", PADDED, config(old_policy="behaviour")),
    "no importance weight": ("grpo on stale rollouts", PADDED, config(importance=NoImportance.Config().build())),
    "ratio with a gradient in CISPO": ("cispo", PADDED, patched(surrogate.jax.lax, "stop_gradient", lambda x: x)),
    "log-probabilities shifted by a token": ("grpo", PADDED, edited(_shift)),
    "k1 in the loss": ("grpo with KL", PADDED, lambda o, p: (_estimator(o, regulariser.kl_k1), list)),
    "k2 for k3": ("grpo with KL", PADDED, lambda o, p: (_estimator(o, regulariser.kl_k2), list)),
    "mask by the padding's token id": ("grpo", PADDED, edited(_by_token_id)),
    "tokens of a tool are learned": ("dapo", PADDED, edited(_tools_learned)),
    "ddof 1": ("grpo", PADDED, config(advantage=GroupAdvantage.Config(ddof=1).build())),
    "baseline with the rollout itself": ("rloo", PADDED, patched(LeaveOneOutAdvantage, "__call__", _own_baseline)),
    "baseline weighted by padded lengths": (
        "opo",
        PADDED,
        patched(OptimalBaselineAdvantage, "of_rollouts", _own_baseline),
    ),
    "failed verifications as reward 0": ("grpo", PADDED, _scored_as_zero),
    "advantages of the completion beside it": ("grpo", PACKED, edited(_next_completion)),
    "truncated rollouts in the denominator": ("grpo on stale rollouts", PADDED, _truncated_late),
    "equal rewards in the denominator": ("dapo", PADDED, config(drop_zero_variance=False)),
    "penalty behind the normalisation": ("dapo with its penalty", PADDED, _shaped_late),
    "a token pays for the divergence before it": (
        "reinforce_pp with KL by token",
        PADDED,
        config(reward_shaping=ReferencePenalty.Config(coef=0.3).build()),
    ),
    "pi at another temperature than mu": (
        "scale_rl",
        PADDED,
        patched(program, "policy_logprobs", _scored_otherwise(_at_temperature)),
    ),
    "pi over words that the sampler had cut off": (
        "scale_rl",
        PADDED,
        patched(program, "policy_logprobs", _scored_otherwise(_with_cut_words)),
    ),
    "pi_old of a version before": ("grpo", PADDED, edited(_version_before)),
    "normalised before equal rewards are left out": ("scale_rl", PADDED, _normalised_early),
    "rounding over eps in a group of equal rewards": ("grpo", PADDED, patched(GroupAdvantage, "__call__", _noisy)),
    "demonstrations clipped as if drawn": (
        "luffy",
        PADDED,
        edited(lambda b: b.update(demonstrations=b["weights"] * 0)),
    ),
    "demonstrations of another completion": (
        "luffy",
        PACKED,
        edited(lambda b: b.update(demonstrations=np.roll(b["demonstrations"], 1, axis=-1))),
    ),
    "demonstrations by pi alone": ("luffy", PADDED, patched(surrogate.MixedPolicy, "__call__", _ratio_of_one)),
    "demonstrations outside the group's mean": ("luffy", PADDED, _baseline_of_drawn),
    "demonstrations weighed by pi_old / 1": (
        "luffy on stale rollouts",
        PADDED,
        patched(importance, "_ratio", _weighed_by_one),
    ),
    "product of ratios for their geometric mean": ("gspo", PADDED, patched(surrogate, "masked_mean", _product)),
    "mean over padding": ("gspo", PADDED, patched(surrogate, "masked_mean", _unmasked_mean)),
    "rejected rollouts in the denominator": ("rejection_sampling", PADDED, lambda o, p: _keep_all(o, p)),
}


def _estimator(objective: Objective, estimate: Any) -> Objective:
    objective.regulariser.estimate = estimate  # pyright: ignore[reportAttributeAccessIssue]
    return objective


def _keep_all(objective: Objective, patch: pytest.MonkeyPatch) -> Any:
    """Advantage 0 for what is rejected, as by REINFORCE with a baseline of 0: the step is smaller."""
    accepted = objective.advantage
    patch.setattr(accepted, "keeps", lambda rewards: np.ones(len(rewards), bool))
    patch.setattr(type(accepted), "__call__", lambda self, rewards, groups, live: np.where(live, rewards >= 1, 0.0))
    return objective, list


@pytest.mark.slow
@pytest.mark.parametrize("trap", MUTATIONS)
def test_the_comparison_sees_what_stacks_get_wrong(trap: str, monkeypatch: pytest.MonkeyPatch):
    name, layout, mutate = MUTATIONS[trap]
    objective, change = mutate(CASES[name][0].build(), monkeypatch)
    _, gradient, _ = summed(objective, change(batches(objective, layout)), layout)
    wrong = error(gradient, expected(name)[1])
    assert not wrong < 100 * TOLERANCE, f"{trap} changes the gradient by {wrong:.1e} of its largest entry only"


@pytest.mark.slow
def test_padding_that_is_multiplied_away_is_not_finite(monkeypatch: pytest.MonkeyPatch):
    """NaN behind a rollout: the layouts above hold it, so that a mask by multiplication is seen."""
    multiplying = types.SimpleNamespace(**{**vars(jnp), "where": lambda mask, value, other: value * mask})
    monkeypatch.setattr(tokens, "jnp", multiplying)
    objective = CASES["grpo"][0].build()
    assert np.isnan(summed(objective, batches(objective, PADDED), PADDED)[0])


# ---- metrics

METRICS = {"grpo on stale rollouts", "dapo"}


def weighted(name: str, value: Callable[[tuple[int, int, int]], float]) -> float:
    """Return the mean of a value under the weights of the loss."""
    if name == "dapo":
        return mean(value(t) for t in tokens_of(prompts(spread=True)))
    return by_rollout(prompts(spread=True, whole=True), value)


def metrics_of(name: str) -> dict[str, float]:
    """Return metrics as docs/concepts/objective.md defines them, in float64."""
    move = lambda t: NEW[t] - OLD[t]  # noqa: E731
    return {
        "entropy": weighted(name, lambda t: float(IDS[t] % 7)),
        "ratio_mean": weighted(name, lambda t: ratio(NEW, t)),
        "kl_old_new": weighted(name, lambda t: float(np.expm1(move(t)) - move(t))),
        "drift_mean": weighted(name, lambda t: abs(OLD[t] - MU[t])),
    }


def _under_all_tokens(given: list[Batch]) -> list[Batch]:
    """Metrics as means over all sampled tokens of the rows, with those that the loss leaves out."""
    total = sum(int(batch["action_mask"].sum()) for batch in given)
    for batch in given:
        batch["metric_weights"] = (batch["action_mask"] / total).astype(np.float32)
    return given


def _under_rows(given: list[Batch]) -> list[Batch]:
    """Means of each micro-batch, added up."""
    for batch in given:
        batch["metric_weights"] = batch["metric_weights"] / max(batch["metric_weights"].sum(), 1e-9)
    return given


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("name", sorted(METRICS))
def test_metrics_have_the_mask_of_the_loss(name: str):
    objective, wanted = CASES[name][0].build(), metrics_of(name)
    for layout in (PADDED, PACKED):
        found = summed(objective, batches(objective, layout), layout)[2]
        assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)
    for wrong in (_under_all_tokens, _under_rows):
        found = summed(objective, wrong(batches(objective, PADDED)), PADDED)[2]
        assert all(abs(found[key] / wanted[key] - 1) > 1e-2 for key in wanted), f"{wrong.__name__} is not seen"
