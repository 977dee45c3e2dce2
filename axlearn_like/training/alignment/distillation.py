"""Off-policy distillation: a teacher's most likely tokens at every token of supervised data."""

from collections.abc import Mapping
from functools import partial
from typing import Any, override

import jax
import jax.numpy as jnp

from axlearn_like.config import REQUIRED
from axlearn_like.training.alignment.scoring import ScoredArray, packed_hidden
from axlearn_like.training.alignment.teacher import Teacher
from axlearn_like.training.heads.chunked_head import map_chunks, merge_length, per_device_head
from axlearn_like.training.losses import Batch, Metrics, PackedLoss, head_sums, supervised_loss, with_aux
from mesh.sharding import full_spec, shard_like


class DistillationLoss(PackedLoss):
    """KL(teacher || policy) of the next token, after the data's own tokens (Hinton et al. 2015, arXiv 1503.02531).

    Of the teacher's distribution `top_k` tokens are kept, and the probability of all others as one event. So the loss
    is 0 or more, never above that of whole distributions, and 0 only where these events are alike: unlike tokens whose
    probabilities are renormalised, it does not teach that there are no others. Whole logits never exist.
    """

    class Config(PackedLoss.Config):
        teacher: Teacher.Config = REQUIRED
        top_k: int = 64
        temperature: float = 1.0  # divides logits of both; the loss is multiplied by its square, as the paper does
        hard: float = 0.0  # share of the loss that is the cross entropy of the data's tokens
        chunks: int = 1  # parts into which a row's tokens are cut for the head; logits of one part exist at a time

        @override
        def check_fields(self) -> None:
            self.require_least(1, "chunks", "top_k")
            self.require("temperature", self.temperature > 0, "a number above 0")
            self.require("hard", 0 <= self.hard < 1, "0 or more, and below 1 (SupervisedLoss needs no teacher)")

        @property
        def reference(self) -> Teacher.Config:
            """The policy that is scored before the step."""
            return self.teacher

        @property
        @override
        def scores(self) -> Mapping[str, ScoredArray]:
            kept = (self.top_k,)
            return {"teacher_tokens": ScoredArray("int32", kept), "teacher_logprobs": ScoredArray("float32", kept)}

    def score(self, policy: Any, reference: Any, batch: Batch) -> dict[str, jax.Array]:
        """Return the teacher's most likely tokens, and their log-probabilities, at every token of a batch."""
        x = packed_hidden(reference, batch).x
        fn = partial(top_tokens, count=self.cfg.top_k, words=policy.vocab_size, temperature=self.cfg.temperature)

        def in_parts(output: Any, x: jax.Array) -> Any:
            parts = map_chunks(lambda part: fn(output.logits(part)), self.cfg.chunks, x)
            return jax.tree.map(merge_length, parts)

        ids, logprobs = per_device_head(reference.output, in_parts, x)
        return {"teacher_tokens": ids, "teacher_logprobs": logprobs}

    def __call__(self, model: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Return loss and metrics of a decoder on a scored batch of `SupervisedInput`, additive over slices."""
        hidden = packed_hidden(model, batch)
        names = ("targets", "weights", "teacher_tokens", "teacher_logprobs")
        others = [shard_like(batch[name], hidden.x) for name in names]
        loss, metrics = head_sums(model, self.of_logits, self.cfg.chunks, hidden.x, *others)
        return with_aux(loss, metrics, hidden.aux, jnp.sum(batch["weights"]))

    def of_logits(
        self, logits: jax.Array, targets: jax.Array, weights: jax.Array, ids: jax.Array, logprobs: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the weighted loss, and metrics: `kl` of a token, at the temperature; those of `supervised_loss`."""
        cfg = self.cfg
        kl = jnp.sum(weights * kept_divergence(logits / cfg.temperature, ids, logprobs))
        hard, metrics = supervised_loss(logits, {"targets": targets, "weights": weights})
        loss = (1 - cfg.hard) * cfg.temperature**2 * kl + cfg.hard * hard
        return loss, {**metrics, "loss": loss, "kl": kl, "cross_entropy": metrics["loss"]}


def top_tokens(logits: jax.Array, *, count: int, words: int, temperature: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Return the most likely tokens, int32 [batch, length, count], and their log-probabilities, float32.

    Args:
        logits: [batch, length, vocab].
        count: at most `words`; more are padded by tokens of no probability.
        words: words of the student's vocabulary: the teacher's own has as many or more, and the rest of it is left out.
    """
    spec = full_spec(logits)
    if spec is not None:  # complete words, as they are to be sorted
        logits = jax.sharding.reshard(logits, jax.P(*spec[:2], None))
    logprobs = jax.nn.log_softmax(logits[..., :words].astype(jnp.float32) / temperature, axis=-1)
    kept, ids = jax.lax.top_k(logprobs, min(count, words))
    missing = ((0, 0), (0, 0), (0, count - kept.shape[-1]))
    return jnp.pad(ids, missing, constant_values=-1), jnp.pad(kept, missing, constant_values=-jnp.inf)


def kept_divergence(logits: jax.Array, ids: jax.Array, logprobs: jax.Array) -> jax.Array:
    """Return KL(teacher || policy) of the kept tokens and of the rest as one event, float32 [batch, length].

    Args:
        logits: logits of the policy, [batch, length, vocab].
        ids: tokens of the teacher, [batch, length, kept], different from each other; -1: none.
        logprobs: the teacher's, of these tokens.
    """
    logits = logits.astype(jnp.float32)
    # By comparison, not by a gather: XLA fuses it, and the vocabulary may be spread over the mesh.
    is_kept = ids[..., None] == jnp.arange(logits.shape[-1], dtype=ids.dtype)
    total = jax.nn.logsumexp(logits, axis=-1)
    ours = jnp.sum(jnp.where(is_kept, logits[..., None, :], 0.0), axis=-1) - total[..., None]
    probability = jnp.exp(logprobs)
    kl = jnp.sum(jnp.where(probability > 0, probability * (jnp.maximum(logprobs, -1e30) - ours), 0.0), axis=-1)
    rest = jnp.maximum(1 - jnp.sum(probability, axis=-1), 0.0)
    others = jnp.where(jnp.any(is_kept, axis=-2), -jnp.inf, logits)
    some = jnp.any(jnp.isfinite(others), axis=-1) & (rest > 0)
    left = jax.nn.logsumexp(jnp.where(some[..., None], others, 0.0), axis=-1) - total
    return kl + jnp.where(some, rest * (jnp.log(jnp.where(some, rest, 1.0)) - left), 0.0)
