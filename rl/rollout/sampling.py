"""Samplers: the parameters by which a request draws its tokens, and their arrays for a batch."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, override

import jax
import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, label
from mesh import UserError
from rl.protocol.experiment import ExperimentFields

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
        """Refuse parameters that no sampler of `vocab` tokens can follow (UserError); `where`: path of `cfg`."""
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
