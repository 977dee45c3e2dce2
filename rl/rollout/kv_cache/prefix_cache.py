"""Pages of finished sequences, cached for the next prompt that begins with the same tokens.

A radix tree for each key (weights version, adapter), whose edges are blocks of `page_size` tokens and whose nodes are
the pages that hold their keys and values. The contents of a page depend on all tokens before it, so a page is found
only along the whole path from the root. Edges are compared token by token: dictionaries of the blocks' bytes.

The cache holds one reference to each of its pages. It can evict a page when it is the only holder and the same is
true of everything below. Pages are evicted least recently used first, from the leaves up. That order needs no search:
idle leaves wait in a heap, and each node counts what blocks its eviction (see `_Node.blockers`).
"""

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mesh import UserError
from rl.rollout.kv_cache.page_pool import PageError, PagePool
from rl.rollout.kv_cache.tiers.page_digests import next_digest, root_digest

# A page that is evicted, its digest, and the routing of its tokens if that is recorded.
OnEvict = Callable[[int, bytes, np.ndarray | None], None]


@dataclass(slots=True, eq=False)
class _Node:
    """One page below its parent; or a root, which has page 0 and no parent."""

    edge: Hashable  # the tokens' bytes in the parent's `children`; a root's key
    page: int
    parent: "_Node | None" = None
    children: dict[Hashable, "_Node"] = field(default_factory=dict)
    used: int = 0  # the time of its last use, in uses of the cache
    # 1 if the page has another holder, plus the number of children that are blocked; at 0 the node is evictable.
    # A change climbs only as far as it changes 0 to 1 or 1 to 0: constant time per page of a path.
    blockers: int = 0
    queued: bool = False  # True if it has its one entry in the heap
    record: np.ndarray | None = None  # routing of its tokens, if that is recorded
    digest: bytes | None = None  # name of its contents, once it was asked for

    @property
    def idle(self) -> bool:
        """An evictable leaf."""
        return not self.blockers and not self.children


class PrefixCache:
    """A radix tree over blocks of page_size tokens. One thread, as the pool."""

    def __init__(self, pool: PagePool, page_size: int, on_evict: OnEvict | None = None):
        """Make an empty cache; `on_evict`: called with each page evicted, before it is free (UserError: size)."""
        if page_size < 1:
            raise UserError(f"RolloutEngine.page_size is {page_size}; expected 1 token or more")
        self._pool = pool
        self._page_size, self._on_evict = page_size, on_evict
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # page -> node
        self._idle: list[tuple[int, int]] = []  # heap of (used, page); holds every evictable leaf, maybe others too
        self._uses = 0
        pool.watch(self._shared_changed)

    @property
    def pages(self) -> int:
        """Pages held."""
        return len(self._nodes)

    def match(self, key: Hashable, tokens: np.ndarray) -> list[int]:
        """Return the pages of the longest cached prefix of full pages.

        Each gets one more reference, which the caller owns and must release.

        Args:
            key: (weights version, adapter).
            tokens: int32 [n].
        """
        path = self._walk(key, self._blocks(tokens))
        self._touch(path)
        pages = [node.page for node in path]
        self._pool.share(pages)
        return pages

    def routing(self, pages: Sequence[int]) -> list[np.ndarray]:
        """Return what was recorded of the tokens of cached pages; nothing if that is not recorded."""
        found = [self._nodes[page].record for page in pages]
        return [one for one in found if one is not None]

    def insert(
        self, key: Hashable, tokens: np.ndarray, pages: Sequence[int], routing: Sequence[np.ndarray] = ()
    ) -> None:
        """Cache pages that the caller holds; the caller keeps its own references.

        Where the same tokens are cached already, the old page stays and the new one is not kept.

        Args:
            key: (weights version, adapter) of all of them.
            tokens: int32 [len(pages) * page_size], from the start of the sequence.
            pages: the pages that hold them, in order.
            routing: what is recorded of the tokens of each page; empty: nothing is.

        Raises:
            ValueError: the tokens do not fill the pages exactly.
            PageError: a page is free, or cached for other tokens. Nothing was kept.
        """
        if len(tokens) != len(pages) * self._page_size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(pages)} pages of {self._page_size}")
        blocks = list(self._blocks(tokens))
        path = self._walk(key, iter(blocks))
        new = list(pages[len(path) :])
        if new:
            self._keep(new)
            parent = path[-1] if path else self._roots.setdefault(key, _Node(key, 0))
            records = routing[len(path) :] or [None] * len(new)
            for block, page, record in zip(blocks[len(path) :], new, records, strict=True):
                parent = self._add(parent, block, page)
                parent.record = record
                path.append(parent)
        self._touch(path)

    def evict(self, count: int) -> int:
        """Free up to `count` pages without another holder, least recently used leaves first; returns their number."""
        freed = 0
        while freed < count and self._idle:
            used, page = heapq.heappop(self._idle)
            node = self._nodes[page]
            node.queued = False
            if node.used == used and node.idle:
                self._evict(node)
                freed += 1
            else:
                self._queue(node)  # idle nodes were used since they were queued, and wait again
        return freed

    def drop(self, keep: Callable[[Any], bool]) -> int:
        """Drop trees whose keys keep(key) rejects; returns their pages, free once no running sequence has them."""
        dropped: list[int] = []
        for key in [key for key in self._roots if not keep(key)]:
            below = list(self._roots.pop(key).children.values())
            while below:
                node = below.pop()
                below.extend(node.children.values())
                del self._nodes[node.page]
                dropped.append(node.page)
        self._idle = [entry for entry in self._idle if entry[1] in self._nodes]
        heapq.heapify(self._idle)
        self._pool.release(dropped)
        return len(dropped)

    def _blocks(self, tokens: np.ndarray) -> Iterator[bytes]:
        ids = np.ascontiguousarray(tokens, dtype=np.int32)
        if ids.ndim != 1 or (ids is not tokens and not np.array_equal(ids, tokens)):
            raise ValueError("tokens are not a vector of int32")
        data, step = ids.tobytes(), self._page_size * ids.itemsize
        return (data[start : start + step] for start in range(0, len(data) - step + 1, step))

    def _walk(self, key: Hashable, blocks: Iterator[bytes]) -> list[_Node]:
        """Return the nodes along these blocks, as far as there are any."""
        path: list[_Node] = []
        node = self._roots.get(key)
        for block in blocks:
            node = node and node.children.get(block)
            if node is None:
                break
            path.append(node)
        return path

    def _touch(self, path: list[_Node]) -> None:
        """Record a use: a use of a page is a use of all before it, so no node is older than one below it."""
        self._uses += 1
        for node in path:
            node.used = self._uses

    def _keep(self, pages: list[int]) -> None:
        """Take a reference to each, or raise and take none."""
        seen: set[int] = set()
        for page in pages:
            if page in self._nodes or page in seen:
                raise PageError(f"page {page} is cached already, for other tokens")
            seen.add(page)
        self._pool.share(pages)

    def _add(self, parent: _Node, block: bytes, page: int) -> _Node:
        node = _Node(block, page, parent)
        parent.children[block] = node
        self._nodes[page] = node
        self._block(node)  # the caller of `insert` holds it
        return node

    def _evict(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        if self._on_evict is not None:
            self._on_evict(leaf.page, _digest(leaf), leaf.record)
        del parent.children[leaf.edge]
        del self._nodes[leaf.page]
        self._pool.release([leaf.page])
        if parent.parent is not None:
            self._queue(parent)
        elif not parent.children:
            del self._roots[parent.edge]

    def _queue(self, node: _Node) -> None:
        """Push the node onto the heap if it is idle and not there already."""
        if node.idle and not node.queued:
            node.queued = True
            heapq.heappush(self._idle, (node.used, node.page))

    def _shared_changed(self, page: int, shared: bool) -> None:
        """Handle the pool's notice that a page got its second holder, or that one holder is left."""
        node = self._nodes.get(page)
        if node is not None:
            (self._block if shared else self._unblock)(node)

    def _block(self, node: _Node) -> None:
        """Count one more blocker of this node, and of its ancestors up to the first that had one already."""
        while node.parent is not None:
            node.blockers += 1
            if node.blockers > 1:
                return
            node = node.parent

    def _unblock(self, node: _Node) -> None:
        while node.parent is not None:
            node.blockers -= 1
            if node.blockers:
                return
            self._queue(node)
            node = node.parent


def _digest(node: _Node) -> bytes:
    """Return the digest of a node's page (tiers/page_digests.py), and keep those of all nodes on its path."""
    path: list[_Node] = []
    above: _Node | None = node
    while above is not None and above.digest is None:
        path.append(above)
        above = above.parent
    for one in reversed(path):
        if one.parent is None:
            one.digest = root_digest(one.edge)
        else:
            assert one.parent.digest is not None and isinstance(one.edge, bytes)
            one.digest = next_digest(one.parent.digest, one.edge)
    assert node.digest is not None
    return node.digest
