"""The KV-cache manager: pages of sequences, of forks that share them, and of prefixes cached for later requests."""

import dataclasses
from collections.abc import Hashable
from collections.abc import Sequence as Items
from itertools import islice

import numpy as np

from rl.rollout.kv_cache.kvcomm.anchors import KVComm
from rl.rollout.kv_cache.page_pool import PagePool
from rl.rollout.kv_cache.prefix_cache import PrefixCache
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.kv_cache.tiers.page_digests import chain
from rl.rollout.kv_cache.tiers.page_form import Page
from rl.rollout.sequence import Sequence

PageCopy = tuple[int, int]  # source, destination


@dataclasses.dataclass(frozen=True, slots=True)
class Spill:
    """A page that was evicted, to be read before anything is written to the device; record: routing of its tokens."""

    page: int
    digest: bytes
    record: np.ndarray | None


class KVCacheManager:
    """Pages of sequences. Full pages can be shared by sequences; a page being written has one holder.

    Attributes:
        tiers: host memory and disk, for pages that are evicted; None: those are dropped.
        kvcomm: bases and anchors of segments; None: only what begins alike is shared.
        leaving: pages to copy from the device before its next dispatch.
        arriving: pages to write to the device after that, with their contents.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        enable_prefix_caching: bool,
        tiers: HostTiers | None = None,
        kvcomm: KVComm | None = None,
    ):
        self.page_size, self._enable_prefix_caching, self.tiers = page_size, enable_prefix_caching, tiers
        self.kvcomm = kvcomm
        self._start(pages)

    def _start(self, pages: int) -> None:
        self.leaving: list[Spill] = []
        self.arriving: list[tuple[int, Page]] = []
        self.pool = PagePool(pages)
        on_evict = None if self.tiers is None else self._spill
        self._prefixes = PrefixCache(self.pool, self.page_size, on_evict) if self._enable_prefix_caching else None

    def clear(self) -> None:
        """Take all pages from all sequences, and drop all cached prefixes."""
        self._start(self.pool.total + 1)
        if self.tiers is not None:
            self.tiers.clear()
        if self.kvcomm is not None:
            self.kvcomm.forget()

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
        """Give pages for `length` tokens; returns the copies to make before a write (OutOfPages: `missing` > free)."""
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
        """Drop all cached prefixes, those on the host too: the weights have changed."""
        if self._prefixes is not None:
            self._prefixes.drop(lambda key: False)
        if self.tiers is not None:
            self.tiers.clear()
        if self.kvcomm is not None:
            self.kvcomm.forget()

    def forget_adapter(self, adapter: Hashable) -> None:
        """Drop the cached prefixes of an adapter; keys are (version of the weights, adapter)."""
        if self._prefixes is not None:
            self._prefixes.drop(lambda key: key[1] != adapter)
        if self.kvcomm is not None:
            self.kvcomm.forget(lambda key: key[1] != adapter)

    def moved(self, sequence: Sequence) -> list[bytes]:
        """Return the digests of pages on the host that continue those of a sequence, as far as it can use them."""
        full = (len(sequence.tokens) - 1) // self.page_size  # the last token is fed, so it is never cached
        own, rest = divmod(sequence.cached, self.page_size)
        if self.tiers is None or sequence.cache_key is None or rest or own >= full or own != len(sequence.pages):
            return []
        tokens = np.asarray(sequence.tokens[: full * self.page_size], np.int32)
        return self.tiers.known(islice(chain(sequence.cache_key, tokens, self.page_size), own, None))

    def bring(self, sequence: Sequence, digests: Items[bytes]) -> int:
        """Give a sequence the pages of these digests, for which there is room; returns the number of their tokens.

        They are written to the device before its next dispatch. Fewer come where some are lost, or cost more to bring
        than to compute again.
        """
        assert self.tiers is not None
        pages = self.tiers.fetch(digests, self.page_size)
        tokens = len(pages) * self.page_size
        assert not self.reserve(sequence, sequence.cached + tokens)
        if pages:
            self.arriving += zip(sequence.pages[-len(pages) :], pages, strict=True)
            records = [page.record for page in pages if page.record is not None]
            sequence.prefilled(tokens, np.concatenate(records) if records else None)
        return tokens

    def hold(self, key: Hashable, tokens: np.ndarray) -> tuple[list[int], list[np.ndarray | None]]:
        """Return the cached pages of these tokens, int32 [n], with the routing of each; the caller releases them."""
        if self._prefixes is None:
            return [], []
        pages = self._prefixes.match(key, tokens)
        return pages, list(self._prefixes.routing(pages)) or [None] * len(pages)

    def prefetch(self, sequence: Sequence) -> None:
        """Begin to read pages of a sequence that waits for a row again, if they are on the disk."""
        if self.tiers is not None and not sequence.pages and (digests := self.moved(sequence)):
            self.tiers.prefetch(digests)

    def _spill(self, page: int, digest: bytes, record: np.ndarray | None) -> None:
        assert self.tiers is not None
        if self.tiers.wants(digest):
            self.leaving.append(Spill(page, digest, record))

    @property
    def prefix_pages(self) -> int:
        """Pages of cached prefixes."""
        return 0 if self._prefixes is None else self._prefixes.pages

    def _writes_shared(self, sequence: Sequence) -> bool:
        """Return True if the page that the next token goes to has other holders."""
        index = sequence.cached // self.page_size
        return index < len(sequence.pages) and self.pool.references(sequence.pages[index]) > 1
