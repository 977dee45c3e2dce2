"""Pages on their way between device and host, in the order that keeps them whole.

Between two dispatches the scheduler chooses pages that leave (evicted, and perhaps handed out again at once), pages
that come back, and pages to copy. The first are read before anything is written; then the others are written.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import jax
import numpy as np

from rl.rollout.kv_cache.manager import KVCacheManager, PageCopy, Spill
from rl.rollout.kv_cache.tiers.page_form import Page, PageForm, split_pages
from rl.rollout.model_runner.executor import Executor
from rl.rollout.sequence import Sequence


class PageMoves:
    """Traffic of pages between the device and the tiers of a KV cache, and on the device."""

    def __init__(self, executor: Executor, kv_cache: KVCacheManager):
        self._executor, self._kv_cache = executor, kv_cache
        if (tiers := kv_cache.tiers) is not None:
            tiers.form = page_form(executor, tiers.form)

    def run(self, copies: Items[PageCopy]) -> None:
        """Read the pages that leave, write those that come back, then copy pages on the device."""
        kv_cache = self._kv_cache
        if kv_cache.leaving:
            leaving, kv_cache.leaving = kv_cache.leaving, []
            assert kv_cache.tiers is not None
            finish = self._executor.read_pages([one.page for one in leaving])
            kv_cache.tiers.put([one.digest for one in leaving], partial(_pages, finish, leaving))
        if kv_cache.arriving:
            arriving, kv_cache.arriving = kv_cache.arriving, []
            targets, contents = zip(*arriving, strict=True)
            self._executor.write_pages(targets, contents)
        self._executor.copy(copies)

    def prefill(self, chosen: Items[tuple[Sequence, int]]) -> tuple[Any, Any]:
        """Prefill (see `Executor.prefill`); with tiers, some dispatches are timed."""
        tiers, executor = self._kv_cache.tiers, self._executor
        if tiers is None or not tiers.costs.time_next():
            return executor.prefill(chosen)
        executor.settle()
        traces, began = executor.runner.steps.traces, time.monotonic()
        recorded = executor.prefill(chosen)
        executor.settle()
        if executor.runner.steps.traces == traces:  # nothing was compiled
            tiers.costs.prefilled(sum(count for _, count in chosen), time.monotonic() - began)
        return recorded


def page_form(executor: Executor, form: PageForm) -> PageForm:
    """Return the form of the pages of this engine, with the codec of `form`."""
    layers, pages = executor.runner.cache.layers, executor.runner.cfg.pool_pages
    arrays = jax.tree.leaves(executor.runner.cache.pool)
    assert all(array.shape[0] == layers * pages for array in arrays)
    return PageForm(tuple(((layers, *array.shape[1:]), np.dtype(array.dtype)) for array in arrays), form.codec)


def _pages(finish: Callable[[], list[np.ndarray]], leaving: Items[Spill]) -> list[Page]:
    return split_pages(finish(), len(leaving), [one.record for one in leaving])
