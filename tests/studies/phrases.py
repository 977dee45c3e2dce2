"""A language of phrases, and the benchmark's policy trained on it: samples of one prompt have long parts in common.

A text is a chain of phrases, each followed by one of a few others. A policy that has learnt it is nearly certain within
a phrase and draws where one ends, as a policy in training is on the words of its own solutions. A random policy has no
such text: nothing that it draws can be foreseen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from axlearn_like.layers.base import Params, bind, build_abstract, split
from axlearn_like.training.losses import SupervisedLoss
from tests.studies.bed import Bed


@dataclasses.dataclass(frozen=True)
class Language:
    """Phrases of ASCII letters with a number of successors each, by a fixed seed."""

    phrases: int = 24
    shortest: int = 6
    longest: int = 18  # tokens of a phrase
    successors: int = 3
    seed: int = 0

    def texts(self, count: int, length: int, seed: int) -> np.ndarray:
        """Return int32 [count, length], texts that begin anywhere."""
        rng = np.random.default_rng(self.seed)
        sizes = rng.integers(self.shortest, self.longest + 1, self.phrases)
        phrases = [rng.integers(33, 97, size, np.int32) for size in sizes]
        after = [rng.choice(self.phrases, self.successors, replace=False) for _ in phrases]
        rng, texts = np.random.default_rng((self.seed, seed)), np.zeros((count, length), np.int32)
        for text in texts:
            parts, current, size = [], int(rng.integers(self.phrases)), 0
            while size < length:
                parts.append(phrases[current])
                size += len(parts[-1])
                current = int(rng.choice(after[current]))
            text[:] = np.concatenate(parts)[:length]
        return texts


def trained(bed: Bed, language: Language, *, steps: int, rows: int = 3, length: int = 384) -> tuple[Params, float]:
    """Return the policy after so many updates on texts behind random prompts, and its last loss in nats per token."""
    graphdef, params = split(build_abstract(bed.policy))[0], bed.params()
    warm = max(1, steps // 10)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, warm, steps + 1), b2=0.98)
    state, loss_of, prompt = optimizer.init(params), SupervisedLoss.Config().build(), bed.job.prompt_tokens

    def update(params: Params, state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        def loss(params: Params) -> jax.Array:
            return loss_of(bind(graphdef, params), batch)[0]

        value, gradient = jax.value_and_grad(loss)(params)
        changes, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, changes), state, value

    step, values = jax.jit(update, donate_argnums=(0, 1)), []
    for index in range(steps):
        letters = np.random.default_rng((1, index)).integers(97, 123, (rows, prompt), np.int32)
        tokens = np.concatenate([letters, language.texts(rows, length + 1, index)], axis=1)
        size = tokens.shape[1] - 1
        weights = np.zeros((rows, size), np.float32)
        weights[:, prompt:] = 1 / (rows * length)  # the first token of a text cannot be foreseen
        positions = np.broadcast_to(np.arange(size, dtype=np.int32), (rows, size))
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights, "positions": positions}
        params, state, value = step(params, state, {**batch, "segment_ids": np.ones((rows, size), np.int32)})
        values.append(float(value))
    return params, values[-1]
