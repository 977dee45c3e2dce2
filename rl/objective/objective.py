"""The one objective of which GRPO, DAPO, GSPO, CISPO, RLOO, PPO ... are named combinations.

    J = sum_{i,t} sg[aggregation * importance] * (sg[advantage] * surrogate + regulariser)

`prepare` computes on the host, once per global batch, all that depends on the whole batch and
not on the parameters: advantages and aggregation weights. `loss` is then a plain weighted sum on
the device: additive over micro-batches, unmoved by padding and by the order of rollouts.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from rl.objective.advantage import Advantage, GroupAdvantage, Turns, constant_groups
from rl.objective.aggregation import Aggregation, TokenMean
from rl.objective.diagnostics import diagnostics, weighted_mean
from rl.objective.gae import TokenCredit, at_last_token
from rl.objective.importance import Importance, NoImportance
from rl.objective.regulariser import NoRegulariser, Regulariser
from rl.objective.reward_shaping import RewardShaping
from rl.objective.rollouts import PerToken, Rollouts, flatten
from rl.objective.surrogate import ClippedSurrogate, Surrogate
from rl.objective.tokens import OldPolicy, gather_tokens


class Prepared(NamedTuple):
    """Arrays that the host adds to a batch.

    arrays: float32; "advantages" [...], or [..., T] with credit by turn, "weights" [..., T] (the aggregation) and
        "metric_weights" [..., T] (the same, scaled to sum to one over the global batch). If the update learns values,
        "values" and their targets "returns", [..., T].
    stats: floats for the log: counts, fractions and moments over the global batch.
    returns: the critic's targets, float64 [..., T], where there is one.
    """

    arrays: dict[str, np.ndarray]
    stats: dict[str, float]
    returns: np.ndarray | None = None


class Objective(Configurable):
    """Advantage, aggregation, importance, surrogate and regulariser, each swappable.

    zero_variance: "drop" takes groups whose rewards are all equal out of the denominator too, so
        that they do not shrink the step; "keep" counts their tokens. Judged on the reward as
        scored, before shaping.
    truncated: "mask" takes rollouts cut off at the length limit out of the loss and the
        denominator; "keep" trains on them. Their reward enters the group statistics either way:
        being cut off is an outcome of the policy.
    old_policy: what pi_old is. "recompute": batch["logprobs_old"], computed by the trainer at
        the start of the update (where a batch gets one optimiser step, the trainer takes "current",
        which is the same). "behaviour": mu itself; the clip then also absorbs the
        differences between sampler and trainer. "current": sg[pi], exact and free, but only
        where each batch gets exactly one optimiser step.

    >>> import numpy as np
    >>> from rl.objective.presets import grpo
    >>> objective = grpo().build()
    >>> rewards = np.array([[1.0, 0.0], [1.0, 1.0]])  # two prompts, two samples of each
    >>> prepared = objective.prepare(rewards, np.ones((2, 2, 3), bool))  # all three tokens of each were sampled
    >>> prepared.arrays["advantages"].round(2).tolist()
    [[1.0, -1.0], [0.0, 0.0]]
    >>> prepared.arrays["weights"].shape
    (2, 2, 3)
    """

    class Config(ConfigBase["Objective"]):
        advantage: ConfigBase[Advantage] = GroupAdvantage.Config()
        aggregation: ConfigBase[Aggregation] = TokenMean.Config()
        importance: ConfigBase[Importance] = NoImportance.Config()
        surrogate: ConfigBase[Surrogate] = ClippedSurrogate.Config()
        regulariser: ConfigBase[Regulariser] = NoRegulariser.Config()
        reward_shaping: ConfigBase[RewardShaping] | None = None
        zero_variance: Literal["drop", "keep"] = "keep"
        truncated: Literal["mask", "keep"] = "keep"
        old_policy: Literal["recompute", "behaviour", "current"] = "recompute"

        @property
        def corrects(self) -> bool:
            """True if rollouts may be of another policy than the trainer's: ratios are to the one that drew them."""
            return self.old_policy == "behaviour" or not isinstance(self.importance, NoImportance.Config)

        @override
        def check_fields(self) -> None:
            advantage = self.advantage.build()
            self.require(
                "zero_variance",
                self.zero_variance == "keep" or advantage.group_relative,
                f"'keep': with {type(advantage).__name__} a group of equal rewards has a gradient",
            )
            shaped = self.reward_shaping is not None and advantage.needs_positive
            expected = f"None: shaped rewards may be negative, and {type(advantage).__name__} divides by their mean"
            self.require("reward_shaping", not shaped, expected)
            if (shaping := self.reward_shaping) is not None and shaping.build().by_token:
                shaping.require(
                    "level",
                    isinstance(advantage, TokenCredit),
                    f"'rollout': {type(advantage).__name__} has one advantage for all tokens that share a reward; or "
                    "objective.advantage=RewardToGo.Config() or GeneralisedAdvantage.Config(...), which credit tokens",
                )
            owner = type(self.importance).__owner__.__name__
            self.require(
                "old_policy",
                self.old_policy != "behaviour" or isinstance(self.importance, NoImportance.Config),
                f"'recompute', or NoImportance: with 'behaviour' pi_old / mu is one, and {owner} would do nothing",
            )

    def __init__(self, cfg: Config):
        self.advantage: Advantage = cfg.advantage.build()
        self.aggregation: Aggregation = cfg.aggregation.build()
        self.importance: Importance = cfg.importance.build()
        self.surrogate: Surrogate = cfg.surrogate.build()
        self.regulariser: Regulariser = cfg.regulariser.build()
        self.reward_shaping: RewardShaping | None = None if cfg.reward_shaping is None else cfg.reward_shaping.build()
        self.drop_zero_variance = cfg.zero_variance == "drop"
        self.mask_truncated = cfg.truncated == "mask"
        self.old_policy: OldPolicy = cfg.old_policy
        self.needs_old = cfg.old_policy == "recompute"  # the batch must carry "logprobs_old"
        self.needs_reference = self.regulariser.needs_reference  # the batch must carry "logprobs_reference"
        self.needs_exact_kl = self.regulariser.needs_exact_kl  # `loss` needs the KL of whole distributions
        shaping = self.reward_shaping
        self.needs_divergence = shaping is not None and shaping.needs_reference  # `prepare` needs that of tokens
        self.needs_values = self.advantage.needs_values  # `prepare` needs a critic's values of each token
        self.learns_values = self.advantage.learns_values  # the policy's update learns the values too
        self.mixes = self.surrogate.mixes  # the batch must say which tokens are of demonstrations

    def prepare(
        self,
        rewards: np.ndarray,
        action_mask: np.ndarray,
        *,
        groups: np.ndarray | None = None,
        truncated: np.ndarray | None = None,
        scored: np.ndarray | None = None,
        demonstrations: np.ndarray | None = None,
        turns: Turns | None = None,
        per_token: PerToken | None = None,
    ) -> Prepared:
        """Advantages and weights of the global batch.

        Args:
            rewards: [...], any leading shape; [groups, samples] is usual.
            action_mask: bool[..., T], true at tokens that the policy sampled (EOS included).
            groups: int[...], the group of each rollout; rows of a 2-D `rewards` if omitted.
            truncated: bool[...], cut off by the length limit (none if omitted).
            scored: bool[...], rollout and score are usable (all if omitted). Others leave the
                group statistics, the loss and the denominator.
            demonstrations: bool[...], given and not drawn by a policy of the run (none if omitted).
            turns: turns of each rollout, as if `rewards` were flat: (end of its tokens, reward), for credit by turn;
                none: each rollout is one turn.
            per_token: numbers of each token, if `needs_divergence` or `needs_values`.

        Raises:
            ValueError: shapes disagree, a usable reward is not finite, `groups` is omitted and `rewards` is not 2-D, or
                there are demonstrations and the surrogate has no term for them.
        """
        divergence, values = per_token or PerToken()
        every = flatten(rewards, action_mask, groups, truncated, scored, turns)
        rollouts, zero_variance = self._select(every)
        diverged = None
        if self.needs_divergence:
            diverged = np.where(rollouts.mask, _of_tokens("divergence", divergence, rollouts), 0.0)
        shaped = np.where(rollouts.live, self._shaped(rollouts, diverged), 0.0)
        advantages, returns = self._estimated(rollouts._replace(rewards=shaped), diverged, values)
        if self.mask_truncated:
            rollouts = rollouts.only(~rollouts.truncated)
            advantages[~rollouts.live] = 0.0
        tokens = rollouts.live_tokens
        weights = self.aggregation(tokens, rollouts.group)
        token_shape = (*rollouts.shape, tokens.shape[1])
        arrays = {
            "advantages": advantages.reshape(rollouts.shape if advantages.ndim == 1 else token_shape),
            "weights": weights.reshape(token_shape),
            "metric_weights": (weights / (weights.sum() or 1.0)).reshape(token_shape),
        }
        given = np.zeros(rollouts.shape, bool) if demonstrations is None else np.asarray(demonstrations, bool)
        if self.mixes:
            arrays["demonstrations"] = np.broadcast_to(given[..., None], token_shape)
        elif given.any():
            raise ValueError(f"{type(self.surrogate).__name__} has no term for demonstrations; MixedPolicy has")
        if self.learns_values and values is not None and returns is not None:
            arrays |= {"values": values.reshape(token_shape), "returns": returns.reshape(token_shape)}
        counted = advantages[rollouts.live] if advantages.ndim == 1 else advantages[tokens]
        stats = {
            "zero_variance_fraction": zero_variance,
            "truncation_fraction": _mean(every.truncated[every.live]),
            "unscored_fraction": 1.0 - _mean(every.live),
            "live_rollouts": float(rollouts.live.sum()),
            "live_tokens": float(tokens.sum()),
            "advantage_mean": _mean(counted),
            "advantage_std": float(counted.std()) if counted.size else 0.0,
            "advantage_abs_max": float(np.abs(advantages).max(initial=0.0)),
        }
        arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
        return Prepared(arrays, stats, None if returns is None else returns.reshape(token_shape))

    def _select(self, rollouts: Rollouts) -> tuple[Rollouts, float]:
        """Return the rollouts that train, and the fraction of the groups judged that have no spread of rewards."""
        enough = rollouts.live_in_group() >= self.advantage.min_group_size
        rollouts = rollouts.only(enough[rollouts.group])
        constant = self._constant(rollouts)
        zero_variance = _mean(constant[rollouts.live_in_group() > 0])
        if self.drop_zero_variance:
            rollouts = rollouts.only(~constant[rollouts.group])
        return rollouts.only(self.advantage.keeps(rollouts.rewards)), zero_variance

    def _constant(self, rollouts: Rollouts) -> np.ndarray:
        """bool[groups]: without spread; with credit by turn, equal sums are none if their turns differ."""
        constant = constant_groups(rollouts.rewards, rollouts.group, rollouts.live)
        if not self.advantage.by_turn:
            return constant
        known = rollouts._replace(rewards=np.where(rollouts.live, rollouts.rewards, 0.0))
        differs = self._advantages(known).any(axis=1)
        return constant & (np.bincount(rollouts.group, weights=differs, minlength=1) == 0)

    def _shaped(self, rollouts: Rollouts, divergence: np.ndarray | None) -> np.ndarray:
        """Return the rewards after shaping, float64[N]."""
        if self.reward_shaping is None:
            return rollouts.rewards
        by_rollout = None if divergence is None or self.reward_shaping.by_token else divergence.sum(axis=1)
        return self.reward_shaping(rollouts.rewards, rollouts.mask.sum(axis=1), by_rollout)

    def _estimated(
        self, rollouts: Rollouts, divergence: np.ndarray | None, values: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return advantages as `_advantages`, or of tokens [N, T] with the critic's targets."""
        if not isinstance(self.advantage, TokenCredit):
            return self._advantages(rollouts), None
        rewards = at_last_token(rollouts.rewards, rollouts.mask)
        if self.reward_shaping is not None and self.reward_shaping.by_token and divergence is not None:
            rewards += self.reward_shaping.of_tokens(divergence)
        known = _of_tokens("values", values, rollouts) if self.needs_values else np.zeros(rollouts.mask.shape)
        return self.advantage.of_values(rewards, known, rollouts.mask, rollouts.live)

    def _advantages(self, rollouts: Rollouts) -> np.ndarray:
        """float64[N], or [N, T] with credit by turn."""
        rewards, group, live, mask = rollouts.rewards, rollouts.group, rollouts.live, rollouts.mask
        if not self.advantage.by_turn:
            return self.advantage.of_rollouts(rewards, group, live, mask.sum(axis=1))
        return np.where(mask, self.advantage.of_tokens(rewards, group, live, rollouts.turns, mask.shape[1]), 0.0)

    def has_gradient(self, prepared: Prepared) -> bool:
        """Return False if no update is due: nothing is live, or all advantages are zero and nothing else is learned."""
        weights, advantages = prepared.arrays["weights"], prepared.arrays["advantages"]
        others = self.learns_values or not isinstance(self.regulariser, NoRegulariser)
        return bool(weights.any() and (advantages.any() or others))

    def part(self, prepared: Prepared, chosen: np.ndarray) -> Prepared:
        """Return a mini-batch of the `chosen` groups, bool[groups], of prepared inputs [groups, samples, ...]."""
        whole = prepared.arrays["weights"]
        mask = (whole != 0) & chosen[:, None, None]
        groups = np.repeat(np.arange(len(whole)), whole.shape[1])
        weights = self.aggregation(mask.reshape(-1, whole.shape[2]), groups).reshape(whole.shape)
        new = {"weights": weights, "metric_weights": weights / (weights.sum() or 1.0)}
        return prepared._replace(arrays={**prepared.arrays, **{k: x.astype(np.float32) for k, x in new.items()}})

    def loss(
        self,
        logprobs: jax.Array,
        batch: Mapping[str, jax.Array],
        entropy: jax.Array | None = None,
        kl: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """-J of a (micro-)batch and its metrics; pure, float32.

        Args:
            logprobs: log pi of the tokens, [..., T]; the only differentiated argument besides
                `entropy` and `kl`.
            batch: "action_mask", "weights", "logprobs_behaviour" [..., T], "advantages" [...] or
                [..., T]; by configuration "logprobs_old", "logprobs_reference"; optionally
                "metric_weights" (else metrics are weighted by "weights").
            entropy: entropy of pi at each position, [..., T]; for the bonus and the log.
            kl: KL(pi || ref) of whole distributions at each position, [..., T], if a term takes it.

        Returns:
            The loss and a dict of scalars. Both add up over micro-batches, except metrics whose
            name ends in "_max", which combine by max (`combine_metrics`).
        """
        tokens = gather_tokens(logprobs, batch, old_policy=self.old_policy, entropy=entropy, kl=kl)
        importance, importance_limited = self.importance(tokens)
        surrogate, clipped = self.surrogate(tokens)
        weights = jax.lax.stop_gradient(tokens.weights * importance)
        term = tokens.advantages * surrogate + self.regulariser(tokens)
        loss = -jnp.sum(weights * term)
        metrics = {"loss": loss, **diagnostics(tokens, self.old_policy)}
        metrics["clip_fraction"] = weighted_mean(clipped, tokens)
        metrics["importance_mean"] = weighted_mean(importance, tokens)
        metrics["importance_limited_fraction"] = weighted_mean(importance_limited, tokens)
        if self.importance.drops:
            metrics["importance_dropped_fraction"] = weighted_mean(importance == 0, tokens)
        return loss, jax.lax.stop_gradient(metrics)


def _of_tokens(name: str, array: np.ndarray | None, rollouts: Rollouts) -> np.ndarray:
    """Return an argument of `prepare` as float64[N, T] (ValueError: it is missing, or of another shape)."""
    expected = (*rollouts.shape, rollouts.mask.shape[1])
    if array is None or array.shape != expected:
        found = None if array is None else array.shape
        raise ValueError(f"{name} has shape {found}, expected {expected}, that of action_mask")
    return np.asarray(array, np.float64).reshape(rollouts.mask.shape)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0
