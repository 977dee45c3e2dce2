"""Drawing tokens: the distribution, its log-probabilities, and keys that depend on nothing but the request.

The key of a draw is a function of (seed, prompt id, sample id, position in the completion), not of batch, row or
worker, so a lost rollout can be generated again, anywhere, with the same tokens. For the same to hold of the
distribution, sequences of different parameters share one compiled step (`SamplingMetadata` has a row a sequence), and
each row has the bits it would have alone.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, label
from axlearn_like.kernels.deterministic import no_fuse
from axlearn_like.training.losses import Chosen, chosen_tokens
from mesh import UserError
from rl.protocol.experiment import ExperimentFields
from rl.rollout.decoding.penalties import penalise

NEVER = -1e30
# Within these limits no logit comes near NEVER, so that a dropped token cannot win.
COLDEST = 1e-4
STRONGEST_PENALTY = 1000.0
STRONGEST_BIAS = 100.0


class Sampler(Configurable):
    """Sampling parameters; log-probabilities are those of exactly the distribution drawn from.

    Each parameter works on what the previous one left, in the order of the fields, after `logit_bias` and the
    penalties. Tokens of equal probability stay or go together, so a cut may leave more than `top_k` tokens.

    >>> from rl.rollout.sampling import Sampler
    >>> Sampler.Config(temperature=0.7, top_p=0.95).build().cfg.top_p
    0.95
    >>> Sampler.Config(top_p=95).build()
    Traceback (most recent call last):
    axlearn_like.config.errors.ConfigError: Sampler.top_p: expected a share in (0, 1], 1 for all tokens, got 95.0...
    """

    class Config(ConfigBase["Sampler"]):
        temperature: float = 1.0  # divisor of logits; 0: greedy
        top_k: int | None = None  # a token stays if fewer than top_k tokens are likelier
        top_p: float = 1.0  # a token stays if the likelier ones have a share of less than top_p
        min_p: float = 0.0  # a token stays if it is at least min_p times as likely as the likeliest
        repetition_penalty: float = 1.0  # logits of tokens seen in prompt or completion: / if positive, * if negative
        presence_penalty: float = 0.0  # subtracted from the logits of tokens that the completion has
        frequency_penalty: float = 0.0  # subtracted from a token's logit once per occurrence in the completion
        logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its raw logit); -100 all but bans a token

        @override
        def check_fields(self) -> None:
            # The comparisons are such that NaN fails too.
            warm = self.temperature == 0 or COLDEST <= self.temperature < math.inf
            self.require("temperature", warm, f"0 (greedy), or {COLDEST} or more")
            self.require_least(1, "top_k")
            self.require("top_p", 0 < self.top_p <= 1, "a share in (0, 1], 1 for all tokens")
            self.require("min_p", 0 <= self.min_p <= 1, "a ratio in [0, 1], 0 for all tokens")
            lowest, highest = 1 / STRONGEST_PENALTY, STRONGEST_PENALTY
            fits = lowest <= self.repetition_penalty <= highest
            self.require("repetition_penalty", fits, f"a factor of {lowest:g} to {highest:g}, 1 for no penalty")
            for name in ("presence_penalty", "frequency_penalty"):
                fits = abs(getattr(self, name)) <= STRONGEST_BIAS
                self.require(name, fits, f"an amount of {-STRONGEST_BIAS:g} to {STRONGEST_BIAS:g}, 0 for no penalty")
            tokens = [token for token, _ in self.logit_bias]
            fits = all(token >= 0 for token in tokens) and len(set(tokens)) == len(tokens)
            self.require("logit_bias", fits, "one bias for each token, 0 or more")
            fits = all(abs(bias) <= STRONGEST_BIAS for _, bias in self.logit_bias)
            self.require("logit_bias", fits, f"biases of {-STRONGEST_BIAS:g} to {STRONGEST_BIAS:g}")

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse to draw what is trained on from a truncated distribution that is not recorded."""
            experiment.require(
                "sampler",
                self is not experiment.sampler or plain(self) or recorded_candidates(self) is not None,
                "the whole distribution (temperature > 0, top_k=None, top_p=1, min_p=0, repetition_penalty=1, "
                "logit_bias=()), or RecordedSampler.Config(...): the trainer scores tokens under it, and "
                "candidates that are not recorded would bias every importance ratio",
            )

    def __init__(self, cfg: Config):
        self.cfg = cfg

    @staticmethod
    def check(cfg: Config, vocab: int, where: str) -> None:
        """Refuse parameters that no sampler of `vocab` tokens can follow; `where` is the path of `cfg` in the request.

        Raises:
            UserError: a value out of its range, or a bias on a token that does not exist.
        """
        label(cfg.clone(), where).check_fields()
        for token, _ in cfg.logit_bias:
            if token >= vocab:
                raise UserError(f"{where}.logit_bias names token {token}; expected 0 to {vocab - 1}")


# Parameters by arrays of the vocabulary, and the values that ask for nothing.
_OF_TABLES: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
}


def uses_tables(cfg: Sampler.Config) -> bool:
    """Return True for a sampler with a bias or a penalty."""
    # Written out, for it is asked of every row in every dispatch.
    penalties = cfg.repetition_penalty != 1 or cfg.presence_penalty != 0 or cfg.frequency_penalty != 0
    return penalties or bool(cfg.logit_bias)


class RecordedSampler(Sampler):
    """A sampler whose candidates are recorded with each token, so that a truncated distribution can be trained on.

    After top_k, top_p and min_p at most `most` tokens are left, the likeliest; of equals those of the smaller ids. An
    engine with this sampler keeps to that for all of its requests.
    """

    class Config(Sampler.Config):
        most: int = 32

        @override
        def check_fields(self) -> None:
            super().check_fields()
            self.require_least(1, "most")
            self.require("temperature", self.temperature > 0, "above 0: greedy draws teach nothing")
            self.require("top_k", self.top_k is None or self.top_k <= self.most, f"at most most={self.most}, or None")
            for name, neutral in _OF_TABLES.items():
                self.require(name, getattr(self, name) == neutral, f"{neutral!r}: the trainer does not know it")

        @override
        def requires(self, experiment: ExperimentFields) -> None:
            super().requires(experiment)
            words = getattr(experiment.policy, "vocab_size", REQUIRED)
            if isinstance(words, int):
                self.require("most", self.most <= words, f"at most policy.vocab_size={words}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampling parameters of a batch as arrays [r], a row a sequence; fields as in `Sampler.Config`."""

    temperature: jax.Array | np.ndarray  # float32
    top_k: jax.Array | np.ndarray  # int32; the size of the vocabulary for "all tokens"
    top_p: jax.Array | np.ndarray  # float32
    min_p: jax.Array | np.ndarray  # float32
    repetition_penalty: jax.Array | np.ndarray  # float32


def plain(cfg: Sampler.Config) -> bool:
    """Return True if a temperature above 0 is all there is: no truncation, no penalty, no bias."""
    whole = cfg.top_k is None and cfg.top_p == 1 and cfg.min_p == 0
    return whole and cfg.temperature > 0 and not uses_tables(cfg)


def recorded_candidates(cfg: Sampler.Config) -> int | None:
    """Return how many candidates of each draw are recorded at most; None: none are."""
    return cfg.most if isinstance(cfg, RecordedSampler.Config) else None


def pack_metadata(configs: Sequence[Sampler.Config], vocab: int) -> SamplingMetadata:
    """Return the arrays of valid configs, one a row, as numpy arrays."""

    def column(name: str) -> np.ndarray:
        return np.array([getattr(cfg, name) for cfg in configs], np.float32)

    return SamplingMetadata(
        temperature=column("temperature"),
        top_k=np.array([min(cfg.top_k or vocab, vocab) for cfg in configs], np.int32),
        top_p=column("top_p"),
        min_p=column("min_p"),
        repetition_penalty=column("repetition_penalty"),
    )


def pack_bias(configs: Sequence[Sampler.Config], vocab: int) -> np.ndarray:
    """Return float32 [r, vocab] to add to the raw logits of each row; with NEVER, a token is never drawn."""
    rows = np.zeros((len(configs), vocab), np.float32)
    for row, cfg in zip(rows, configs, strict=True):
        for token, bias in cfg.logit_bias:
            row[token] = bias
    return rows


def distribution(
    logits_rv: jax.Array,
    metadata: SamplingMetadata,
    *,
    counts_rv: jax.Array | None = None,
    bias_rv: jax.Array | None = None,
    penalties_r2: jax.Array | None = None,
    plain: bool,
) -> jax.Array:
    """Return the logits of the distribution drawn from, float32 [r, vocab]; tokens that are never drawn have NEVER.

    Rows do not affect each other. A row whose own parameters are plain has the same bits on both paths.

    Args:
        logits_rv: the model's, any float dtype.
        metadata: arrays, not constants, where it matters: XLA divides by an array, but multiplies by a constant's
            reciprocal, which is another number.
        counts_rv: int32, tokens of the prompt and of the completion so far (see `penalties.py`); None if no row has a
            penalty.
        bias_rv: float32, see `pack_bias`; None if no row has any.
        penalties_r2: float32, penalties of presence and frequency; None if no row has any.
        plain: static; every row is `plain`, so that dividing by the temperature is all there is to do.
    """
    logits = logits_rv.astype(jnp.float32)
    if plain:
        return logits / metadata.temperature[..., None]
    # Columns [r, 1] that are sharded as the logits are.
    metadata = jax.tree.map(lambda column: column[..., None] + jnp.zeros_like(logits[..., :1], column.dtype), metadata)
    if bias_rv is not None:
        logits = logits + jnp.where(bias_rv == 0, -0.0, bias_rv)  # x + 0.0 is not x where x is -0.0
    if counts_rv is not None:
        logits = penalise(logits, counts_rv, metadata.repetition_penalty, penalties_r2)
    greedy = metadata.temperature == 0
    best = jnp.arange(logits.shape[-1]) == jnp.argmax(logits, axis=-1, keepdims=True)  # the first of equals
    scaled = logits / jnp.where(greedy, 1.0, metadata.temperature)
    dropped = (greedy & ~best) | (~greedy & (scaled < _smallest_kept(scaled, metadata)))
    if bias_rv is not None:
        dropped |= bias_rv <= NEVER
    certain = greedy & ~jnp.isnan(scaled)  # a broken model's tokens must not be scored as certain
    return jnp.where(dropped, NEVER, jnp.where(certain, 0.0, scaled))


def _smallest_kept(logits_rv: jax.Array, metadata: SamplingMetadata) -> jax.Array:
    """Return the smallest logit that top_k, top_p and min_p leave in each row, [r, 1]; metadata is [r, 1] here.

    min_p compares with the likeliest token, which is never dropped, so it needs neither the order of the tokens nor
    the result of the other two. Those need one sort, done only if some row asks for it.
    """

    def by_rank() -> jax.Array:
        ordered = -jnp.sort(-logits_rv, axis=-1)
        rank = jnp.arange(ordered.shape[-1])
        kth = jnp.min(ordered, axis=-1, keepdims=True, where=rank < metadata.top_k, initial=jnp.inf)
        mass = jax.nn.softmax(jnp.where(ordered < kth, NEVER, ordered), axis=-1)
        mass_before = jnp.cumsum(mass, axis=-1) - mass
        # In float32 a tiny top_p is 0, and a sum of masses may reach 1 before the last token.
        nucleus = (mass_before < metadata.top_p) | (rank == 0) | (metadata.top_p == 1)
        last = jnp.min(ordered, axis=-1, keepdims=True, where=nucleus, initial=jnp.inf)
        return jnp.maximum(kth, last)

    ranked = jnp.any((metadata.top_k < logits_rv.shape[-1]) | (metadata.top_p < 1))
    smallest = jax.lax.cond(ranked, by_rank, lambda: jnp.min(logits_rv, axis=-1, keepdims=True))
    return jnp.maximum(smallest, jnp.max(logits_rv, axis=-1, keepdims=True) + jnp.log(metadata.min_p))


def keep_most(logits_rv: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Return a distribution's logits with at most `most` tokens left, and these tokens, int32 [r, most].

    Where fewer are left, -1 follows. `logits_rv`: the result of `distribution`.
    """
    values, tokens = jax.lax.top_k(logits_rv, min(most, logits_rv.shape[-1]))
    left = (values > NEVER / 2) | jnp.isnan(values)  # a broken model's tokens must not be scored as certain
    kept = jnp.where(left, tokens, -1).astype(jnp.int32)
    kept = jnp.pad(kept, ((0, 0), (0, most - kept.shape[-1])), constant_values=-1)
    return among(logits_rv, kept), kept


def among(logits: jax.Array, kept: jax.Array) -> jax.Array:
    """Return the logits [..., v] of the tokens `kept` [..., k], and NEVER for all others; -1 is no token."""
    tokens = jnp.arange(logits.shape[-1], dtype=kept.dtype)
    return jnp.where(jnp.any(kept[..., None] == tokens, axis=-2), logits, NEVER)


def draw(keys_r: jax.Array, logits_rv: jax.Array) -> tuple[jax.Array, Chosen]:
    """Draw a token of each row's distribution, int32 [r]; returns it and its log-probability, in parts.

    Args:
        keys_r: a PRNG key for each row. [r] may be several axes.
        logits_rv: the result of `distribution`.
    """
    # The rest is compiled alike for all distributions. Fused with the computation of the logits, the log-probability
    # would be rounded in other places, and differ in its last bit between the two paths above.
    logits_rv = no_fuse(logits_rv)
    noise = jax.random.gumbel
    for _ in range(keys_r.ndim):
        noise = jax.vmap(noise, in_axes=(0, None))
    # Like `jax.random.categorical`, but not fused: XLA's CPU code takes the logarithms of the noise one by one where it
    # fuses them into the search for the largest, four times as slow.
    scores = no_fuse(noise(keys_r, logits_rv.shape[-1:]) + logits_rv)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    index = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    tokens = jnp.min(jnp.where(scores == largest, index, index[-1]), axis=-1)
    return tokens, chosen_tokens(logits_rv, tokens)


def row_keys(identity: jax.Array) -> jax.Array:
    """Return PRNG keys [r] of samples; folding in the position in the completion gives the key of a draw.

    Args:
        identity: uint32 [r, 4]: seed, high and low half of the prompt's id, sample id.
    """

    def of_row(row: jax.Array) -> jax.Array:
        key = jax.random.key(row[0])
        for part in (row[1], row[2], row[3]):
            key = jax.random.fold_in(key, part)
        return key

    return jax.vmap(of_row)(identity)
