"""KTO: completions that are good or bad, without pairs (Ethayarajh et al. 2024, arXiv 2402.01306)."""

from collections.abc import Mapping
from typing import Any, override

import jax
import jax.numpy as jnp

from axlearn_like.training.alignment.preferences import divergence
from axlearn_like.training.alignment.reference import FrozenCopy, Reference
from axlearn_like.training.alignment.scoring import ScoredArray, running_sums, target_logprobs
from axlearn_like.training.losses import Batch, Metrics, PackedLoss, with_aux
from mesh.sharding import shard_like


class KTO(PackedLoss):
    """weight * (1 - sigmoid(beta (log-ratio - kl))) of a good completion, with the opposite sign of a bad one (eq. 8).

    `kl`, without gradient, is the reference point: the mean log-ratio of completions that belong to other prompts, over
    the whole batch, and 0 where that is below. It is scored before the step, so it is one number for all microbatches.
    """

    class Config(PackedLoss.Config):
        beta: float = 0.1
        # Weights of good and bad completions. The paper keeps good x (number of good ones) between 1 and 4/3 of
        # bad x (number of bad ones).
        good: float = 1.0
        bad: float = 1.0
        chunks: int = 1  # parts into which a row's tokens are cut for the head; logits of one part exist at a time
        reference: Reference.Config = FrozenCopy.Config()

        @override
        def check_fields(self) -> None:
            self.require_least(1, "chunks")
            self.require("beta", self.beta > 0, "a number above 0")
            self.require("good", self.good > 0, "a number above 0")
            self.require("bad", self.bad > 0, "a number above 0")

        @property
        @override
        def contents(self) -> str:
            return "judgements"

        @property
        @override
        def scores(self) -> Mapping[str, ScoredArray]:
            return {"reference": ScoredArray(), "mismatched": ScoredArray(axes=None)}

    def __call__(self, model: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Return loss and metrics of a decoder, additive over slices.

        Args:
            batch: batch of `UnpairedInput`, with `reference` [batch, length] and `mismatched` [] of `score`.
        """
        scored = target_logprobs(model, batch, self.cfg.chunks)
        sides, weights = (shard_like(batch[name], scored.logprobs) for name in ("sides", "weights"))
        loss, metrics = self.of_tokens(scored.logprobs, batch["reference"], sides, weights, batch["mismatched"])
        return with_aux(loss, metrics, scored.aux, jnp.sum(weights))

    def score(self, policy: Any, reference: Any, batch: Batch) -> dict[str, jax.Array]:
        """Return the reference's log-probabilities of the targets, and the mean log-ratio of mismatched completions."""
        found = target_logprobs(reference, batch, self.cfg.chunks).logprobs
        ours, theirs = (target_logprobs(p, batch, self.cfg.chunks, "other_").logprobs for p in (policy, reference))
        live, weights = (shard_like(batch[name], ours) for name in ("other_sides", "weights"))
        ratios = jnp.where(live != 0, ours - theirs, 0.0)
        # The largest weight is 1 / (examples of the whole batch), in every part of it.
        return {"reference": found, "mismatched": jnp.sum(ratios) * jnp.max(weights)}

    def of_tokens(
        self, logprobs: jax.Array, reference: jax.Array, sides: jax.Array, weights: jax.Array, mismatched: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the weighted loss, and metrics, from log-probabilities of the targets [batch, length].

        Args:
            reference: log-probabilities of the reference policy.
            sides: 1 on good completions, -1 on bad ones.
            weights: at the end of each example.
            mismatched: mean log-ratio of mismatched completions.
        """
        cfg, ends = self.cfg, weights > 0
        parts = [jnp.where(sides != 0, logprobs - reference, 0.0), (sides > 0) * 1.0, (sides < 0) * 1.0]
        ratio, good, bad = jnp.moveaxis(running_sums(jnp.stack(parts, axis=-1), ends), -1, 0)
        is_good, is_bad = (ends & (count > 0) for count in (good, bad))
        kl = jnp.maximum(jax.lax.stop_gradient(mismatched), 0.0)
        reward = cfg.beta * jnp.where(ends, ratio, 0.0)
        ahead = reward - cfg.beta * kl
        loss = jnp.sum(weights * jnp.where(is_good, cfg.good * jax.nn.sigmoid(-ahead), 0.0))
        loss += jnp.sum(weights * jnp.where(is_bad, cfg.bad * jax.nn.sigmoid(ahead), 0.0))
        right = (is_good & (ahead > 0)) | (is_bad & (ahead < 0))
        metrics = {
            "loss": loss,
            "accuracy": jnp.sum(weights * right),
            "good": jnp.sum(weights * is_good),
            "margin": jnp.sum(weights * jnp.where(is_good, reward, -reward)),
            "reward_good": jnp.sum(weights * jnp.where(is_good, reward, 0.0)),
            "reward_bad": jnp.sum(weights * jnp.where(is_bad, reward, 0.0)),
            "kl": kl * jnp.sum(weights),
            "tokens": jnp.sum(sides != 0, dtype=jnp.int32),
        }
        return loss, {**metrics, **divergence(logprobs, reference, sides, weights)}
