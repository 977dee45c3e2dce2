"""Values of the kernels for TPUs, simulated on this CPU, against float64: at shapes that have broken other kernels.

Each case returns what a kernel gives and what is right; its error is the largest difference, relative to the largest
right value.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from axlearn_like.kernels.attention.interface import ScoreRules
from tests.axlearn_like.kernels.head_values import head
from tests.axlearn_like.kernels.paged_attention.values import PLAIN, Pairs, int8_paged, paged, rank_space, written
from tests.axlearn_like.kernels.training_values import (
    exact_product,
    grouped,
    grouped_in_stack,
    low_rank_ffn,
    quantised,
    quantised_weights,
    splash,
)
from tests.bounds import within

pytestmark = pytest.mark.numerics


def error_of(name: str) -> float:
    """Return the error of a case."""
    return max(_error(found, right) for found, right in CASES[name]())


def _error(found: Any, right: Any) -> float:
    found, right = np.asarray(found, np.float64), np.asarray(right, np.float64)
    return float(np.max(np.abs(found - right)) / max(1e-30, np.max(np.abs(right))))


CASES: dict[str, Callable[[], Pairs]] = {
    "paged attention: one kv head, an idle row, a row of one token": lambda: paged(
        lengths=[17, 0, 1], heads=1, width=128
    ),
    "paged attention: heads of 64, a full table": lambda: paged(lengths=[24, 24], heads=2, width=64),
    "paged attention: heads of 80": lambda: paged(lengths=[9, 20], heads=2, width=80),
    "paged attention: a window shorter than a page": lambda: paged(
        lengths=[9, 20], heads=2, width=128, rules=ScoreRules(window=3)
    ),
    "paged attention in fixed blocks: one kv head, an idle row, a row of one token": lambda: paged(
        lengths=[17, 0, 1], heads=1, width=128, page=64, exact=True
    ),
    "paged attention in fixed blocks: heads of 80, a window": lambda: paged(
        lengths=[9, 20], heads=2, width=80, page=64, rules=ScoreRules(window=3), exact=True
    ),
    "product in fixed order: one row, blocks that are not full": lambda: exact_product(rows=1, depth=600, columns=1100),
    "product in fixed order: rows of two tiles": lambda: exact_product(rows=130, depth=96, columns=24),
    "cascade attention: one kv head, an idle row": lambda: paged(lengths=[17, 0, 20], heads=1, width=128, shared=16),
    "cascade attention: heads of 64, all but one key shared": lambda: paged(
        lengths=[17, 17], heads=2, width=64, shared=16
    ),
    "cascade attention: heads of 80": lambda: paged(lengths=[19, 24], heads=2, width=80, shared=8),
    "int8 paged attention: two kv heads, an idle row, a row of one token": lambda: int8_paged(
        lengths=[17, 0, 1], heads=2, width=128
    ),
    "int8 paged attention: heads of 80, a full table": lambda: int8_paged(lengths=[24, 24], heads=4, width=80),
    "int8 paged attention: a window shorter than a page": lambda: int8_paged(
        lengths=[9, 20], heads=2, width=128, rules=ScoreRules(window=3)
    ),
    "rank-space attention: one kv head, rank 5, an idle row, a row of one token": lambda: rank_space(
        lengths=[17, 0, 1], heads=1, width=128, rank=5
    ),
    "rank-space attention: heads of 80, rank 130, a full table": lambda: rank_space(
        lengths=[24, 24], heads=2, width=80, rank=130
    ),
    "rank-space attention: heads of 64, a window shorter than a page": lambda: rank_space(
        lengths=[9, 20], heads=2, width=64, rank=9, rules=ScoreRules(window=3)
    ),
    "page writer: one kv head, idle and whole pages, ends within pages": lambda: written(
        starts=[5, 0, 8, 15], counts=[14, 0, 16, 1], heads=1, width=128, page=8
    ),
    "page writer: heads of 80, a page larger than the chunk": lambda: written(
        starts=[3, 62, 0], counts=[5, 5, 2], heads=2, width=80, page=64
    ),
    "splash: heads of 64": lambda: splash(width=64, rules=PLAIN),
    "splash: heads of 80, a window": lambda: splash(width=80, rules=ScoreRules(window=40)),
    "grouped products: an empty expert, experts of one row": lambda: grouped(
        sizes=[70, 0, 1, 64, 1], width=12, units=20
    ),
    "grouped products in a stack: empty experts, a row without one, matrices held transposed": lambda: grouped_in_stack(
        sizes=[17, 0, 1, 20, 0], width=128, units=24
    ),
    "int8 product: blocks that are not full": lambda: quantised(numbers="int8", rows=5, depth=80, columns=24),
    "int4 weights: groups of 16 inputs": lambda: quantised_weights(
        numbers="int4", group=16, rows=5, depth=80, columns=24
    ),
    "fp8 product": lambda: quantised(numbers="fp8", rows=5, depth=80, columns=24),
    "low-rank feed-forward: three ranks, a block that is not full, five tiles": lambda: low_rank_ffn(
        tokens=520, units=640, ranks=(24, 40, 16)
    ),
    "policy head: the last tile not full, soft cap": lambda: head(words=300, soft_cap=5.0),
    "policy head: 151,936 words": lambda: head(words=151_936, tokens=8, width=8),
    "policy head by XLA: the KL to a reference of another width, soft cap, one token": lambda: head(
        words=300, soft_cap=5.0, other=24, tokens=1
    ),
    "policy head by XLA: words of four devices, with a KL": lambda: head(words=1200, soft_cap=5.0, other=24, shards=4),
    "policy head by XLA: supports of seven words, and of one": lambda: head(words=300, kept=7, other=24),
    "policy head by XLA: supports on four devices": lambda: head(words=1200, kept=7, shards=4),
}
QUICK = ("page writer: heads of 80, a page larger than the chunk", "fp8 product")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in CASES]
)
def test_kernels_agree_with_float64(name: str):
    assert within(error_of(name), 1e-6)


def test_a_wrong_value_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CASES, "wrong", lambda: [([0.0], [0.0]), ([2.0, 4.5], [2.0, 4.0])])
    assert error_of("wrong") == 0.125
