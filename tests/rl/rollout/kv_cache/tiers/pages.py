"""Pages of random numbers, and tiers that hold them."""

from typing import Any

import numpy as np

from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.kv_cache.tiers.page_form import Page, PageForm

ARRAYS = (((2, 3, 4, 8), np.dtype(np.float32)), ((2, 3, 8, 4), np.dtype(np.float32)))
NBYTES = 2 * 2 * 3 * 4 * 8 * 4


def page(seed: int, *, record: bool = False) -> Page:
    rng = np.random.default_rng(seed)
    arrays = tuple(rng.normal(size=shape).astype(dtype) for shape, dtype in ARRAYS)
    return Page(arrays, rng.integers(0, 8, (8, 2, 2)).astype(np.uint8) if record else None)


def name(seed: int) -> bytes:
    return seed.to_bytes(16, "big")


def make_tiers(**fields: Any) -> HostTiers:
    tiers = HostTiers.Config(**fields).build()
    tiers.form = PageForm(ARRAYS, tiers.codec)
    return tiers


def fill(tiers: HostTiers, seeds: range) -> list[int]:
    """Put pages one after the other; return the seeds of those that were wanted."""
    wanted = []
    for seed in seeds:
        if tiers.wants(name(seed)):
            wanted.append(seed)
            tiers.put([name(seed)], lambda seed=seed: [page(seed)])
        tiers.settle()
    return wanted


def assert_equal(found: Page, expected: Page) -> None:
    for a, b in zip(found.arrays, expected.arrays, strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    assert (found.record is None) == (expected.record is None)
    if found.record is not None and expected.record is not None:
        assert found.record.dtype == expected.record.dtype
        np.testing.assert_array_equal(found.record, expected.record)
