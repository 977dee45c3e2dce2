"""The KV-cache manager: pages of sequences, of forks that share them, and of prefixes cached for later requests."""

from collections.abc import Hashable

import numpy as np

from rl.rollout.kv_cache.page_pool import PagePool
from rl.rollout.kv_cache.prefix_cache import PrefixCache
from rl.rollout.sequence import Sequence

PageCopy = tuple[int, int]  # source, destination


class KVCacheManager:
    """Pages of sequences. Full pages can be shared by sequences; a page being written has one holder."""

    def __init__(self, pages: int, page_size: int, enable_prefix_caching: bool):
        self.page_size, self._enable_prefix_caching = page_size, enable_prefix_caching
        self._start(pages)

    def _start(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self._prefixes = PrefixCache(self.pool, self.page_size) if self._enable_prefix_caching else None

    def clear(self) -> None:
        """Take all pages from all sequences, and drop all cached prefixes."""
        self._start(self.pool.total + 1)

    @property
    def tokens(self) -> int:
        """Tokens that all pages together have room for."""
        return self.pool.total * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def adopt(self, sequence: Sequence) -> int:
        """Give a sequence without pages the cached prefix of its tokens; returns the number of tokens it saves."""
        if self._prefixes is not None and not sequence.pages and sequence.cache_key is not None:
            known = np.asarray(sequence.tokens[:-1], np.int32)  # the last token is fed, so it is never cached
            pages = self._prefixes.match(sequence.cache_key, known)
            sequence.adopt(pages, len(pages) * self.page_size, self._prefixes.routing(pages))
        return sequence.cached

    def missing(self, sequence: Sequence, length: int) -> int:
        """Return the number of free pages needed so that the sequence can write up to `length` tokens."""
        return max(0, self.pages_for(length) - len(sequence.pages)) + self._writes_shared(sequence)

    def make_room(self, count: int) -> bool:
        """Evict cached prefixes until `count` pages are free; returns False if there are too few."""
        lacking = count - self.pool.free
        if lacking > 0 and self._prefixes is not None:
            self._prefixes.evict(lacking)
        return self.pool.free >= count

    def reserve(self, sequence: Sequence, length: int) -> list[PageCopy]:
        """Give pages for all tokens up to `length`; returns the copies to make before the sequence writes.

        Raises:
            OutOfPages: fewer than `missing` pages are free.
        """
        fresh = self.pool.allocate(self.missing(sequence, length))
        copies: list[PageCopy] = []
        if self._writes_shared(sequence):
            page = fresh.pop()
            shared = sequence.replace_page(sequence.cached // self.page_size, page)
            copies.append((shared, page))
            self.pool.release([shared])
        sequence.add_pages(fresh)
        return copies

    def reserve_free(self, sequence: Sequence, length: int) -> None:
        """Give free pages for tokens up to `length`, as far as there are any: nothing is evicted for drafts.

        The sequence has pages of its own for the next token.
        """
        lacking = self.pages_for(length) - len(sequence.pages)
        sequence.add_pages(self.pool.allocate(max(0, min(lacking, self.pool.free))))

    def trim(self, sequence: Sequence) -> None:
        """Take back the pages behind the sequence's last token, which were for drafted ones."""
        self.pool.release(sequence.drop_pages_behind(self.pages_for(len(sequence.tokens))))

    def share(self, source: Sequence, target: Sequence) -> None:
        """Fork: give `target`, which has no pages yet, those that `source` has."""
        used = source.pages[: self.pages_for(source.cached)]
        self.pool.share(used)
        target.adopt(list(used), source.cached)

    def release(self, sequence: Sequence) -> None:
        """Take all pages of a sequence, which keeps its tokens."""
        self.pool.release(sequence.drop_pages())

    def remember(self, sequence: Sequence) -> None:
        """Cache the sequence's full pages as a prefix for others."""
        if self._prefixes is not None and sequence.cache_key is not None:
            full = sequence.cached // self.page_size
            tokens = np.asarray(sequence.tokens[: full * self.page_size], np.int32)
            routing = sequence.routing.pages(full, self.page_size)
            self._prefixes.insert(sequence.cache_key, tokens, sequence.pages[:full], routing)

    def forget(self) -> None:
        """Drop all cached prefixes: the weights have changed."""
        if self._prefixes is not None:
            self._prefixes.drop(lambda key: False)

    def forget_adapter(self, adapter: Hashable) -> None:
        """Drop the cached prefixes of an adapter; keys are (version of the weights, adapter)."""
        if self._prefixes is not None:
            self._prefixes.drop(lambda key: key[1] != adapter)

    @property
    def prefix_pages(self) -> int:
        """Pages of cached prefixes."""
        return 0 if self._prefixes is None else self._prefixes.pages

    def _writes_shared(self, sequence: Sequence) -> bool:
        """Return True if the page that the next token goes to has other holders."""
        index = sequence.cached // self.page_size
        return index < len(sequence.pages) and self.pool.references(sequence.pages[index]) > 1
