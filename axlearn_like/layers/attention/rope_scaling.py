"""Scalings of rotary frequencies, by which a model serves longer sequences than it was trained on.

A scaling maps the frequencies of a head, highest first, to others. One with an `attention_factor` has cosines and sines
multiplied by it too, so scores grow by its square. That of Llama 3 stands in rope.py.
"""

import dataclasses
import math
from typing import override

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable


class LinearScaling(Configurable):
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): all frequencies are divided by `factor`."""

    class Config(ConfigBase["LinearScaling"]):
        factor: float = 1.0

        @override
        def check_fields(self) -> None:
            self.require("factor", self.factor >= 1, "1 or more")

    def __init__(self, cfg: Config):
        self._factor = cfg.factor

    def __call__(self, freq: np.ndarray) -> np.ndarray:
        """Return the scaled frequencies."""
        return freq / self._factor


class YarnScaling(Configurable):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): low frequencies are divided by `factor`, high ones are kept.

    Between the frequency that turns `beta_fast` times within `original_length` tokens and the one that turns
    `beta_slow` times, they are interpolated linearly by index. Cosines and sines are multiplied by the attention
    factor: 0.1 ln factor + 1, or as `mscale` and `mscale_all_dim` say (DeepSeek).
    """

    class Config(ConfigBase["YarnScaling"]):
        factor: float = 1.0
        original_length: int = 4096
        beta_fast: float = 32.0
        beta_slow: float = 1.0
        attention_factor: float | None = None
        mscale: float | None = None
        mscale_all_dim: float | None = None
        truncate: bool = True  # the ends of the interpolation are whole indices; gpt-oss: they are not

        @override
        def check_fields(self) -> None:
            self.require("factor", self.factor >= 1, "1 or more")
            self.require("beta_fast", self.beta_fast > self.beta_slow > 0, f"above beta_slow={self.beta_slow}")

    def __init__(self, cfg: Config):
        self._cfg = cfg

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines."""
        c = self._cfg
        if c.attention_factor is not None:
            return c.attention_factor
        if c.mscale and c.mscale_all_dim:
            return magnitude(c.factor, c.mscale) / magnitude(c.factor, c.mscale_all_dim)
        return magnitude(c.factor)

    def __call__(self, freq: np.ndarray) -> np.ndarray:
        """Return the scaled frequencies."""
        c, count = self._cfg, len(freq)
        per_index = -math.log(freq[-1]) / (count - 1)  # frequencies are exp(-index * per_index)

        def index(turns: float) -> float:
            return math.log(c.original_length / (2 * math.pi * turns)) / per_index

        low, high = index(c.beta_fast), index(c.beta_slow)
        if c.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        slowed = np.clip((np.arange(count) - low) / max(high - low, 0.001), 0.0, 1.0)
        return freq / c.factor * slowed + freq * (1 - slowed)


class LongRopeScaling(Configurable):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): each frequency is divided by a factor of its own.

    Short factors are for models of sequences up to the original length, long ones for models of longer sequences too:
    `max_length` of the rotary embedding decides for all sequences, in training, scoring and decoding, as vLLM's
    `max_model_len` does (vllm-project/vllm#27431), and longer ones are refused. So keys in a cache stay right.
    (transformers decides in each call, by its last position, and keeps the cached keys of shorter ones.) Cosines and
    sines are multiplied by the attention factor, without one by sqrt(1 + ln factor / ln original_length).
    """

    class Config(ConfigBase["LongRopeScaling"]):
        short_factor: tuple[float, ...] = REQUIRED
        long_factor: tuple[float, ...] = REQUIRED
        factor: float = 1.0
        original_length: int = 4096
        attention_factor: float | None = None

        @override
        def check_fields(self) -> None:
            self.require("factor", self.factor >= 1, "1 or more")
            self.require_least(2, "original_length")
            same = len(self.short_factor) == len(self.long_factor)
            self.require("long_factor", same, f"{len(self.short_factor)} numbers, as short_factor")

    def __init__(self, cfg: Config):
        self._cfg = cfg

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines."""
        c = self._cfg
        if c.attention_factor is not None:
            return c.attention_factor
        return math.sqrt(1 + math.log(c.factor) / math.log(c.original_length))

    def __call__(self, freq: np.ndarray, max_length: int | None) -> np.ndarray:
        """Return the scaled frequencies of a model for sequences up to `max_length`; None: of any length."""
        c = self._cfg
        factors = c.long_factor if max_length is None or max_length > c.original_length else c.short_factor
        c.require("short_factor", len(factors) == len(freq), f"{len(freq)} numbers, half the width of a head")
        return freq / np.asarray(factors)


class DynamicScaling(Configurable):
    """NTK-aware scaling that grows with the sequence: the base of the wavelengths is larger for later tokens.

    A token behind `original_length` has the base that a sequence which ends with it asks for. So keys in a cache stay
    right, and training, scoring and decoding agree. (transformers rotates all tokens of one call by the base of the
    longest: the same as here where tokens behind the original length come one by one, as in decoding.)
    """

    class Config(ConfigBase["DynamicScaling"]):
        factor: float = 1.0
        original_length: int = 2048

        @override
        def check_fields(self) -> None:
            self.require("factor", self.factor >= 1, "1 or more")

    def __init__(self, cfg: Config):
        self.growth = Growth(cfg.factor, cfg.original_length)

    def __call__(self, freq: np.ndarray) -> np.ndarray:
        """Return the frequencies of tokens within the original length: unchanged."""
        return freq


@dataclasses.dataclass(frozen=True)
class Growth:
    """How the frequencies of a token behind the original length change."""

    factor: float
    original_length: int

    def __call__(self, positions_bt: jax.Array, count: int) -> jax.Array:
        """Return float32 [batch, length, count], multiples of the frequencies."""
        lengths = positions_bt.astype(jnp.float32)[..., None] + 1
        base = self.factor * lengths / self.original_length - (self.factor - 1)
        # The base grows by base ** (dim / (dim - 2)), so frequency i falls by base ** (-i / (count - 1)).
        return jnp.maximum(base, 1.0) ** (-jnp.arange(count, dtype=jnp.float32) / max(count - 1, 1))


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's correction of attention for frequencies that are divided by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
