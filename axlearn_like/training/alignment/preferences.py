"""Losses of pairs of completions: DPO, IPO, ORPO, SimPO, on the batches of `PreferenceInput`.

A sequence's log-probability is the sum over the tokens of its completion: prompts are given, whatever the two share.
The loss is a mean over the pairs of the global batch. Where a loss divides by a completion's length, it says so.
"""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp

from axlearn_like.training.alignment.reference import FrozenCopy, Reference
from axlearn_like.training.alignment.scoring import ScoredArray, running_sums, target_logprobs
from axlearn_like.training.losses import Batch, Metrics, PackedLoss, with_aux
from mesh.sharding import shard_like


class PairSums(NamedTuple):
    """Sums over the completion of one side of each pair, float32 [batch, length], true at the ends of pairs."""

    policy: jax.Array  # log pi
    reference: jax.Array  # log pi of the reference policy; zero for losses without one
    tokens: jax.Array  # number of tokens, at least 1

    @property
    def ratio(self) -> jax.Array:
        """Log-ratio of policy to reference."""
        return self.policy - self.reference

    @property
    def mean(self) -> jax.Array:
        """Mean log pi of a token."""
        return self.policy / self.tokens


class Judged(NamedTuple):
    """Losses of pairs, and the implicit rewards of both sides; float32 [batch, length]."""

    loss: jax.Array
    chosen: jax.Array
    rejected: jax.Array


class PreferenceLoss(PackedLoss, abc.ABC):
    """Base of losses of pairs: subclasses compute `of_pairs`."""

    class Config(PackedLoss.Config):
        chunks: int = 1  # parts into which a row's tokens are cut for the head; logits of one part exist at a time

        @override
        def check_fields(self) -> None:
            self.require_least(1, "chunks")

        @property
        @override
        def contents(self) -> str:
            return "pairs"

    def __call__(self, model: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Return loss and metrics of a decoder, additive over slices.

        Args:
            batch: batch of `PreferenceInput`, with the `reference`'s log-probabilities of the targets if the loss needs
                them.
        """
        scored = target_logprobs(model, batch, self.cfg.chunks)
        sides, weights = (shard_like(batch[name], scored.logprobs) for name in ("sides", "weights"))
        reference = batch.get("reference", jnp.zeros_like(scored.logprobs))
        loss, metrics = self.of_tokens(scored.logprobs, reference, sides, weights)
        return with_aux(loss, metrics, scored.aux, jnp.sum(weights))

    def of_tokens(
        self, logprobs: jax.Array, reference: jax.Array, sides: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the weighted loss, and metrics, from log-probabilities of the targets; all [batch, length]."""
        ends = weights > 0
        chosen, rejected = (_sums(logprobs, reference, sides == side, ends) for side in (1, -1))
        judged = self.of_pairs(chosen, rejected)

        def mean(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(ends, x, 0.0) * weights)

        loss = mean(judged.loss)
        metrics = {
            "loss": loss,
            "accuracy": mean((judged.chosen > judged.rejected).astype(jnp.float32)),
            "margin": mean(judged.chosen - judged.rejected),
            "reward_chosen": mean(judged.chosen),
            "reward_rejected": mean(judged.rejected),
            "logprob_chosen": mean(chosen.policy),
            "logprob_rejected": mean(rejected.policy),
            "tokens": jnp.sum(sides != 0, dtype=jnp.int32),
        }
        return loss, {**metrics, **(divergence(logprobs, reference, sides, weights) if self.cfg.scores else {})}

    @abc.abstractmethod
    def of_pairs(self, chosen: PairSums, rejected: PairSums) -> Judged:
        """Return the loss of each pair, and the implicit rewards of its sides."""


class ReferenceLoss(PreferenceLoss):
    """Base of losses that compare with a reference policy."""

    class Config(PreferenceLoss.Config):
        beta: float = 0.1  # strength of the pull to the reference: a smaller one lets the policy go further
        reference: Reference.Config = FrozenCopy.Config()

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("beta", self.beta > 0, "a number above 0")

        @property
        @override
        def scores(self) -> Mapping[str, ScoredArray]:
            return {"reference": ScoredArray()}

    def score(self, policy: Any, reference: Any, batch: Batch) -> dict[str, jax.Array]:
        """Return the reference's log-probabilities of a batch's targets."""
        return {"reference": target_logprobs(reference, batch, self.cfg.chunks).logprobs}


class DPO(ReferenceLoss):
    """Direct preference optimisation: -log sigmoid(beta (difference of the log-ratios)) (arXiv 2305.18290, 7).

    With `label_smoothing` e, labels are taken to be wrong with that probability: (1 - e) of the loss plus e of that of
    the pair turned around. `robust` subtracts e of that instead, and divides by 1 - 2 e: unbiased (arXiv 2403.00409).
    """

    class Config(ReferenceLoss.Config):
        label_smoothing: float = 0.0
        robust: bool = False
        sft: float = 0.0  # weight of the chosen completion's mean -log pi of a token (arXiv 2404.19733, 1)

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("label_smoothing", 0 <= self.label_smoothing < 0.5, "0 or more, and below 0.5")
            self.require("robust", not self.robust or self.label_smoothing > 0, "False without label_smoothing")
            self.require_least(0, "sft")

    @override
    def of_pairs(self, chosen: PairSums, rejected: PairSums) -> Judged:
        """Return the loss of each pair, and beta times the log-ratios."""
        cfg = self.cfg
        rewards = cfg.beta * chosen.ratio, cfg.beta * rejected.ratio
        loss = smoothed(rewards[0] - rewards[1], cfg.label_smoothing, robust=cfg.robust)
        return Judged(loss - cfg.sft * chosen.mean, *rewards)


class IPO(ReferenceLoss):
    """Identity preference optimisation: (difference of the log-ratios - 1 / (2 beta))^2 (arXiv 2310.12036, 17).

    The difference has a target, so it does not grow without bound on data that are never contradicted. `beta` is the
    paper's tau.
    """

    class Config(ReferenceLoss.Config):
        # Log-ratios are means over the tokens of a completion, so that the target suits any length (as in TRL); the
        # paper's are sums.
        length_normalised: bool = True

    @override
    def of_pairs(self, chosen: PairSums, rejected: PairSums) -> Judged:
        """Return the loss of each pair, and beta times the log-ratios."""
        cfg = self.cfg
        ratios = [side.ratio / side.tokens if cfg.length_normalised else side.ratio for side in (chosen, rejected)]
        loss = (ratios[0] - ratios[1] - 1 / (2 * cfg.beta)) ** 2
        return Judged(loss, *(cfg.beta * ratio for ratio in ratios))


class ORPO(PreferenceLoss):
    """Odds-ratio preference optimisation, without a reference (arXiv 2403.07691, 6 and 7).

    The mean -log pi of the chosen completion's tokens, and `weight` times -log sigmoid of the log odds ratio, of which
    the odds are those of the geometric mean of a completion's token probabilities.
    """

    class Config(PreferenceLoss.Config):
        weight: float = 0.1  # lambda of the paper

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("weight", self.weight > 0, "a number above 0")

    @override
    def of_pairs(self, chosen: PairSums, rejected: PairSums) -> Judged:
        """Return the loss of each pair, and `weight` times the mean log-probabilities."""
        weight = self.cfg.weight
        loss = jax.nn.softplus(log_odds(rejected.mean) - log_odds(chosen.mean))
        return Judged(weight * loss - chosen.mean, weight * chosen.mean, weight * rejected.mean)


class SimPO(PreferenceLoss):
    """Simple preference optimisation, without a reference (arXiv 2405.14734, 6).

    Loss: -log sigmoid(beta (chosen - rejected) - gamma), of mean log-probabilities of a token.
    """

    class Config(PreferenceLoss.Config):
        beta: float = 2.0
        gamma: float = 1.0  # target margin of the chosen completion; the paper's gamma / beta is about 0.5
        label_smoothing: float = 0.0

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require("beta", self.beta > 0, "a number above 0")
            self.require("label_smoothing", 0 <= self.label_smoothing < 0.5, "0 or more, and below 0.5")
            self.require_least(0, "gamma")

    @override
    def of_pairs(self, chosen: PairSums, rejected: PairSums) -> Judged:
        """Return the loss of each pair, and beta times the mean log-probabilities."""
        rewards = self.cfg.beta * chosen.mean, self.cfg.beta * rejected.mean
        return Judged(smoothed(rewards[0] - rewards[1] - self.cfg.gamma, self.cfg.label_smoothing), *rewards)


def smoothed(margin: jax.Array, wrong: float, *, robust: bool = False) -> jax.Array:
    """Return -log sigmoid of a margin, if labels are wrong with this probability (see `DPO`)."""
    if not wrong:
        return jax.nn.softplus(-margin)
    if robust:
        return ((1 - wrong) * jax.nn.softplus(-margin) - wrong * jax.nn.softplus(margin)) / (1 - 2 * wrong)
    return (1 - wrong) * jax.nn.softplus(-margin) + wrong * jax.nn.softplus(margin)


def log_odds(logprob: jax.Array) -> jax.Array:
    """Return log(p / (1 - p)) of p = exp(logprob).

    1 - p is -expm1(logprob), which keeps its digits near p = 1. A p within a millionth of 1 counts as that: its odds,
    and their gradient 1 / (1 - p), have no bound.
    """
    logprob = jnp.minimum(logprob, -1e-6)
    return logprob - jnp.log(-jnp.expm1(logprob))


def divergence(logprobs: jax.Array, reference: jax.Array, sides: jax.Array, weights: jax.Array) -> Metrics:
    """Return `divergence`: how far the policy is from the reference on the completions, without gradient.

    Half the squared log-ratio (k2 of Schulman 2020), as a mean over the tokens of an example, then over examples. The
    policy did not draw the completions, so this is no estimate of its KL divergence; k3's exponential of the log-ratio
    would be that of a few tokens which the policy has come to avoid.
    """
    ratio, ends = jax.lax.stop_gradient(logprobs - reference), weights > 0
    parts = [jnp.where(sides != 0, 0.5 * ratio * ratio, 0.0), (sides != 0).astype(jnp.float32)]
    sums = running_sums(jnp.stack(parts, axis=-1), ends)
    return {"divergence": jnp.sum(jnp.where(ends, sums[..., 0] / jnp.maximum(sums[..., 1], 1.0), 0.0) * weights)}


def _sums(logprobs: jax.Array, reference: jax.Array, live: jax.Array, ends: jax.Array) -> PairSums:
    """Return the sums over one side of every pair; of no token, as everywhere but at the ends, they count 1 token."""
    mask = live.astype(jnp.float32)
    # Not by the mask: what a model makes of padding may be no number.
    parts = [jnp.where(live, x, 0.0) for x in (logprobs, reference)]
    sums = jnp.where(ends[..., None], running_sums(jnp.stack([*parts, mask], axis=-1), ends), 0.0)
    return PairSums(sums[..., 0], sums[..., 1], jnp.maximum(sums[..., 2], 1.0))
