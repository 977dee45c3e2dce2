"""Reference for answers of the tests' server: numpy over the logits of a plain forward pass."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.paged import RowContext
from tests.rl.serving.running import TOKENIZER, make_params
from tests.rl.tiny import tiny_policy

LENGTH = 64
TOLERANCE = 3e-5


@cache
def _forward() -> Any:
    graphdef, _ = split(build_abstract(tiny_policy(TOKENIZER.vocab_size)))

    def logits(weights: Any, tokens: jax.Array) -> jax.Array:
        model: Any = bind(graphdef, weights)
        context = RowContext(jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape))
        return model.logits(model.hidden(tokens, context).x)

    return partial(jax.jit(logits), make_params(0))


def logits_of(tokens: list[int]) -> np.ndarray:
    """float64 [tokens, vocab], those for the token behind each."""
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(_forward()(row))[0, : len(tokens)].astype(np.float64)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def logprobs_of(tokens: list[int]) -> np.ndarray:
    """float64 [tokens - 1, vocab]: log-probabilities in the place of each token but the first."""
    return log_softmax(logits_of(tokens))[:-1]
