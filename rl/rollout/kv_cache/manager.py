"""Whose keys and values lie on which pages: sequences, forks that share them, and prefixes kept for later."""

from collections.abc import Hashable
from typing import Protocol

import numpy as np

from rl.rollout.kv_cache.page_pool import PagePool
from rl.rollout.kv_cache.prefix_cache import PrefixCache

PageCopy = tuple[int, int]  # from, to


class Holder(Protocol):
    """A sequence, as the memory sees it: `cached` of its tokens lie on `pages`."""

    tokens: list[int]
    pages: list[int]
    cached: int
    cache_key: Hashable  # what its keys and values depend on beside its tokens; None: on a mixture


class KVCacheManager:
    """Gives pages to sequences. Full pages can be shared by sequences; a page being written has one holder."""

    def __init__(self, pages: int, page_size: int, keep_prefixes: bool):
        self.pool, self.page_size = PagePool(pages), page_size
        self._prefixes = PrefixCache(self.pool, page_size) if keep_prefixes else None

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def adopt(self, holder: Holder) -> int:
        """Give a sequence without pages the cached prefix of its tokens; how many tokens that saves it."""
        if self._prefixes is not None and not holder.pages and holder.cache_key is not None:
            known = np.asarray(holder.tokens[:-1], np.int32)  # the last token is fed, so it is never cached
            holder.pages = self._prefixes.match(holder.cache_key, known)
            holder.cached = len(holder.pages) * self.page_size
        return holder.cached

    def missing(self, holder: Holder, length: int) -> int:
        """Free pages needed so that the sequence can write up to `length` tokens."""
        return max(0, self.pages_for(length) - len(holder.pages)) + self._writes_shared(holder)

    def make_room(self, count: int) -> bool:
        """Whether `count` pages are free, after forgetting prefixes if need be."""
        lacking = count - self.pool.free
        if lacking > 0 and self._prefixes is not None:
            self._prefixes.evict(lacking)
        return self.pool.free >= count

    def reserve(self, holder: Holder, length: int) -> list[PageCopy]:
        """Pages for all tokens up to `length`; returns the copies to make before the sequence writes.

        Raises:
            OutOfPages: fewer than `missing` pages are free.
        """
        fresh = self.pool.allocate(self.missing(holder, length))
        copies: list[PageCopy] = []
        if self._writes_shared(holder):
            index, page = holder.cached // self.page_size, fresh.pop()
            copies.append((holder.pages[index], page))
            self.pool.release([holder.pages[index]])
            holder.pages[index] = page
        holder.pages.extend(fresh)
        return copies

    def share(self, source: Holder, target: Holder) -> None:
        """A fork: `target` begins as `source` does and has no pages yet."""
        used = source.pages[: self.pages_for(source.cached)]
        self.pool.share(used)
        target.pages, target.cached = list(used), source.cached

    def release(self, holder: Holder) -> None:
        """The sequence keeps its tokens and loses its pages."""
        self.pool.release(holder.pages)
        holder.pages, holder.cached = [], 0

    def remember(self, holder: Holder) -> None:
        """Keep the sequence's full pages as a prefix for others."""
        if self._prefixes is not None and holder.cache_key is not None:
            full = holder.cached // self.page_size
            tokens = np.asarray(holder.tokens[: full * self.page_size], np.int32)
            self._prefixes.insert(holder.cache_key, tokens, holder.pages[:full])

    def forget(self) -> None:
        """No prefix computed so far is of use any more."""
        if self._prefixes is not None:
            self._prefixes.drop(lambda key: False)

    @property
    def prefix_pages(self) -> int:
        return 0 if self._prefixes is None else self._prefixes.pages

    def _writes_shared(self, holder: Holder) -> bool:
        """Whether the page that the next token goes to has other holders."""
        index = holder.cached // self.page_size
        return index < len(holder.pages) and self.pool.references(holder.pages[index]) > 1
