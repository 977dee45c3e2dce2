"""Paged attention over a cache in rank space: the kernel simulated on a CPU against float64, and compiled for TPUs."""

import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.low_rank.attention import rank_space_attention
from axlearn_like.kernels.low_rank.factors import KeySteps, KeyValueFactors, chunks_of, make_rank_pool
from axlearn_like.kernels.paged_attention.rows import LANES, BlockSizes, PagedRows, RankRows
from tests.axlearn_like.kernels.paged_attention.cases import PAGE, TABLE, Case, ScoreRules

SIZES = BlockSizes(row_keys=2 * PAGE, chunk_keys=2 * PAGE)
FREQUENCIES = (1.0, 0.3, 0.07, 0.002)  # of the first pairs; the others do not rotate


@dataclasses.dataclass
class RankCase(Case):
    """A case whose keys and values are made of ranks, with biases and a norm or without, rotated or not."""

    ranks: tuple[int, int] = (5, 7)
    more: bool = False
    rotated: bool = True

    @override
    def empty_pool(self, rng: np.random.Generator) -> np.ndarray:
        rows, tokens = self.k.shape[:2]
        shape, half = (self.kv_heads, self.head_dim), self.head_dim // 2
        self.low = [rng.standard_normal((rows, tokens, rank)).astype(self.dtype) for rank in self.ranks]
        matrices = [rank**-0.5 * rng.standard_normal((rank, *shape)) for rank in self.ranks]
        bias = [rng.standard_normal(shape) if self.more else None for _ in self.ranks]
        norm = 1 + 0.1 * rng.standard_normal(self.head_dim) if self.more else None
        freq = (*FREQUENCIES, *[0.0] * (half - len(FREQUENCIES))) if self.rotated else ()
        eps = 1e-6 if self.more else None
        steps = KeySteps(freq, 0.9 if self.more else 1.0, eps, self.more, self.head_dim)
        made: Any = *matrices, *bias, norm, steps
        self.factors = KeyValueFactors(*made)
        k, v = (np.einsum("rsl,lkh->rskh", x.astype(np.float64), b) for x, b in zip(self.low, matrices, strict=True))
        if bias[0] is not None and bias[1] is not None:
            k, v = k + bias[0], v + bias[1]
            k = k / np.sqrt(np.mean(k * k, axis=-1, keepdims=True) + 1e-6) * norm
        if freq:
            angles = np.arange(tokens)[:, None, None] * np.array(freq)
            cos, sin = steps.factor * np.cos(angles), steps.factor * np.sin(angles)
            first, second = np.split(k, 2, axis=-1)
            k = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        self.k, self.v = k, v
        empty = make_rank_pool(2, self.pages, PAGE, max(self.ranks), self.dtype)["latent"]
        return np.asarray(rng.normal(size=empty.shape), empty.dtype)

    @override
    def put(self, pool: np.ndarray, row: int, tokens: range) -> None:
        wide = chunks_of(max(self.ranks)) * LANES
        for first, low in enumerate(self.low):
            padded = np.pad(low[row], [(0, 0), (0, wide - low.shape[-1])]).reshape(TABLE * PAGE, -1, LANES)
            for position in tokens:
                pool[self.table[row, position // PAGE], position % PAGE, first::2] = padded[position]

    def attend(self, rows: PagedRows, pool: Any, **options: Any) -> Any:
        taken = np.array(self.starts)[:, None] + np.arange(self.chunk)
        k, v = (jnp.asarray(np.take_along_axis(x, taken[..., None], axis=1)) for x in self.low)
        factors = jax.tree.map(lambda x: jnp.asarray(x, self.dtype), self.factors)
        return rank_space_attention(RankRows(rows.q_rckqh, k, v, *rows[3:]), pool, factors, **options)


SHAPES: dict[str, Any] = {
    "decoding, idle rows": ([0, 5, 7, 16, 3, 1], [1, 1, 1, 1, 0, 1], 1, {}),
    "one kv head, biases, a norm": ([0, 5, 7], [1, 1, 1], 1, {"kv_heads": 1, "more": True}),
    "two items a row, heads of 80, rank 130": (
        [0, 3, 4, 2],
        [9, 20, 0, 2],
        20,
        {"head_dim": 80, "ranks": (130, 9), "per_kv": 2},
    ),
    "values made of rank 300, heads of 64, not rotated": (
        [0, 3],
        [9, 16],
        16,
        {"head_dim": 64, "ranks": (9, 300), "per_kv": 12, "kv_heads": 1, "rotated": False},
    ),
    "a window shorter than a block, cap, scale": (
        [0, 5, 7, 13],
        [4, 1, 4, 4],
        4,
        {"rules": ScoreRules(window=3, soft_cap=2.0, scale=0.1)},
    ),
    "bfloat16": ([6, 0, 2], [5, 1, 0], 5, {"dtype": "bfloat16"}),
}
DEFAULT = ("two items a row, heads of 80, rank 130",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.full] * (one not in DEFAULT)) for one in SHAPES])
def test_against_attention_to_the_keys_and_values_in_float64(name: str):
    starts, counts, chunk, fields = SHAPES[name]
    case = RankCase(starts, counts, chunk, **fields)
    case.check(*case.run(case.attend, sizes=SIZES, tokens_per_item=16), tolerance=3e-6)
