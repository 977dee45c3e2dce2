"""The cache finds what brute force finds, frees only what nobody holds, oldest first, and loses no reference."""

import itertools
import sys
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh import UserError
from rl.rollout.kv_cache import prefix_cache
from rl.rollout.kv_cache.page_pool import PageError, PagePool
from rl.rollout.kv_cache.prefix_cache import PrefixCache

SIZE = 2  # tokens per page
PAGES = 13
KEYS = ((1, None), (1, "adapter"), (2, None))
Prefix = tuple[tuple[int, str | None], tuple[int, ...]]  # a key and all tokens up to the end of a page

keys = st.sampled_from(KEYS)
texts = st.lists(st.integers(0, 1), max_size=5 * SIZE).map(tuple)


def row(tokens: tuple[int, ...] | list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def prefixes(key: tuple[int, str | None], tokens: tuple[int, ...]) -> list[Prefix]:
    """One for each full page."""
    return [(key, tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]


def evictable(cache: PrefixCache) -> int:
    """Return the pages that `evict` could free, one after another: each node counts what blocks it."""
    return sum(not node.blockers for node in cache._nodes.values())


@dataclass
class Model:
    """The cache as a table of prefixes, every question answered by looking at all of it."""

    pages: dict[Prefix, int] = field(default_factory=dict)
    used: dict[Prefix, int] = field(default_factory=dict)
    uses: int = 0

    def match(self, wanted: list[Prefix]) -> list[Prefix]:
        found = list(itertools.takewhile(lambda prefix: prefix in self.pages, wanted))
        self.touch(found)
        return found

    def touch(self, path: list[Prefix]) -> None:
        self.uses += 1
        self.used.update(dict.fromkeys(path, self.uses))

    def evicted(self, count: int, held: Counter[int]) -> list[Prefix]:
        """Return the prefixes that must be evicted, in order."""
        left, gone = set(self.pages), []
        while len(gone) < count:
            parents = {(key, tokens[:-SIZE]) for key, tokens in left}
            idle = [prefix for prefix in left - parents if not held[self.pages[prefix]]]
            if not idle:
                break
            gone.append(min(idle, key=lambda prefix: self.used[prefix]))
            left.remove(gone[-1])
        return gone

    def forget(self, gone: list[Prefix]) -> None:
        for prefix in gone:
            del self.pages[prefix], self.used[prefix]


@dataclass
class Sequence:
    """A running sequence of the test, with a reference to each of its pages."""

    key: tuple[int, str | None]
    tokens: tuple[int, ...]
    pages: list[int]


class CacheMachine(RuleBasedStateMachine):
    """Sequences start from the cache, finish into it, fork, lose pages and are cancelled, as chance has it."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES)
        self.cache = PrefixCache(self.pool, SIZE)
        self.model = Model()
        self.running: list[Sequence] = []
        self.tails: list[list[int]] = []  # held too, but they no longer start at a root: never inserted
        self.written: dict[int, Prefix] = {}  # what was computed into each page

    @property
    def held(self) -> Counter[int]:
        """References that are not the cache's."""
        holders = [sequence.pages for sequence in self.running] + self.tails
        return Counter(itertools.chain.from_iterable(holders))

    @rule(key=keys, tokens=texts)
    def start(self, key: tuple[int, str | None], tokens: tuple[int, ...]):
        """Match, make room, allocate, as an engine does."""
        wanted = prefixes(key, tokens)
        found = self.model.match(wanted)
        pages = self.cache.match(key, row(tokens))
        assert pages == [self.model.pages[prefix] for prefix in found]
        assert [self.written[page] for page in pages] == found
        self.running.append(Sequence(key, tokens, pages))
        missing = len(wanted) - len(found)
        if missing > self.pool.free + evictable(self.cache):
            self.running.pop()
            self.pool.release(pages)
            return
        self.evict(missing - self.pool.free)
        new = self.pool.allocate(missing)
        self.written.update(zip(new, wanted[len(found) :], strict=True))
        pages.extend(new)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def keep(self, data: st.DataObject):
        """The cache takes some of a sequence's pages while it runs."""
        sequence = data.draw(st.sampled_from(self.running))
        self.insert(sequence, data.draw(st.integers(0, len(sequence.pages))))

    def insert(self, sequence: Sequence, count: int) -> None:
        path = prefixes(sequence.key, sequence.tokens)[:count]
        self.cache.insert(sequence.key, row(sequence.tokens[: count * SIZE]), sequence.pages[:count])
        for prefix, page in zip(path, sequence.pages[:count], strict=True):
            self.model.pages.setdefault(prefix, page)
        self.model.touch(path)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject):
        """End a sequence and keep its pages, as most sequences do."""
        sequence = data.draw(st.sampled_from(self.running))
        self.insert(sequence, len(sequence.pages))
        self.running.remove(sequence)
        self.pool.release(sequence.pages)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject):
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.pool.release(data.draw(st.permutations(sequence.pages)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject):
        sequence = data.draw(st.sampled_from(self.running))
        self.pool.share(sequence.pages)
        self.running.append(Sequence(sequence.key, sequence.tokens, list(sequence.pages)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def trim(self, data: st.DataObject):
        """Only a part of the pages is given back, so that a chain is held in its middle or at its end alone."""
        sequence = data.draw(st.sampled_from(self.running))
        start = data.draw(st.integers(0, len(sequence.pages)))
        head, tail = sequence.pages[:start], sequence.pages[start:]
        self.running.remove(sequence)
        if data.draw(st.booleans()):
            self.running.append(Sequence(sequence.key, sequence.tokens[: start * SIZE], head))
            self.pool.release(tail)
        else:
            self.tails.append(tail)
            self.pool.release(head)

    @precondition(lambda self: self.tails)
    @rule(data=st.data())
    def end_tail(self, data: st.DataObject):
        self.pool.release(self.tails.pop(data.draw(st.integers(0, len(self.tails) - 1))))

    @rule(count=st.integers(-1, 3))
    def evict(self, count: int):
        gone = self.model.evicted(count, self.held)
        free = self.pool.free
        assert self.cache.evict(count) == len(gone)
        assert self.pool.free == free + len(gone)
        self.model.forget(gone)

    @rule(dropped=keys)
    def drop(self, dropped: tuple[int, str | None]):
        asked = set()
        gone = [prefix for prefix in self.model.pages if prefix[0] == dropped]
        assert self.cache.drop(lambda key: asked.add(key) or key != dropped) == len(gone)
        assert asked == {key for key, _ in self.model.pages}  # a tree without pages is not remembered
        self.model.forget(gone)

    @invariant()
    def agrees(self):
        expected = self.held + Counter(self.model.pages.values())
        assert [self.pool.references(page) for page in range(PAGES)] == [expected[page] for page in range(PAGES)]
        assert self.pool.used == len(expected)
        assert self.cache.pages == len(self.model.pages)
        assert evictable(self.cache) == len(self.model.evicted(PAGES, self.held))

    def teardown(self):
        """Whatever happened, everything comes back."""
        self.pool.release(list(self.held.elements()))
        assert evictable(self.cache) == self.cache.pages
        self.cache.drop(lambda key: False)
        assert self.pool.free == self.pool.total
        assert (self.cache.pages, evictable(self.cache)) == (0, 0)


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPrefixCache = CacheMachine.TestCase


def cached(cache: PrefixCache, pool: PagePool, *texts: tuple[int, ...], key: Any = KEYS[0]) -> list[list[int]]:
    """The pages that were offered to the cache for each text; what it did not keep is free again."""
    offered = []
    for tokens in texts:
        full = len(tokens) // SIZE
        pages = pool.allocate(full)
        cache.insert(key, row(tokens[: full * SIZE]), pages)
        pool.release(pages)
        offered.append(pages)
    return offered


@settings(max_examples=100, deadline=None)
@given(inserted=st.lists(st.tuples(keys, texts), max_size=12), key=keys, tokens=texts)
def test_match_is_the_longest_common_prefix_in_full_pages(inserted: Any, key: Any, tokens: tuple[int, ...]):
    pool = PagePool(100)
    cache = PrefixCache(pool, SIZE)
    for its_key, text in inserted:
        cached(cache, pool, text, key=its_key)
    pages = cache.match(key, row(tokens))
    known = {prefix for its_key, text in inserted for prefix in prefixes(its_key, text)}
    assert len(pages) == sum(prefix in known for prefix in prefixes(key, tokens))
    assert cache.pages == pool.used == len(known)
    assert [pool.references(page) for page in pages] == [2] * len(pages)


def test_the_least_recently_used_goes_first_and_a_match_is_a_use():
    pool = PagePool(PAGES)
    cache = PrefixCache(pool, SIZE)
    (a, end), (_, b), (c,) = cached(cache, pool, (0, 0, 0, 1), (0, 0, 1, 1), (1, 1))
    pool.release(cache.match(KEYS[0], row([0, 0, 1, 1])))
    order = []
    while cache.evict(1):
        order += [page for page in (a, end, b, c) if not pool.references(page) and page not in order]
    assert order == [end, c, b, a]  # the shared page last: it is as young as the youngest below it


def test_what_a_drop_leaves_keeps_its_order():
    pool = PagePool(201)
    cache = PrefixCache(pool, SIZE)
    held = [pool.allocate(1) for _ in range(200)]
    for index, pages in enumerate(held):
        cache.insert(KEYS[index % 2], row([index, index]), pages)
    for index in np.random.default_rng(0).permutation(len(held)):  # the order of release is not the order of use
        pool.release(held[index])
    assert cache.drop(lambda key: key == KEYS[1]) == 100
    for (page,) in held[1::2]:
        assert pool.references(page) == 1
        assert cache.evict(1) == 1
        assert pool.references(page) == 0


def test_a_held_page_keeps_all_before_it():
    pool = PagePool(PAGES)
    cache = PrefixCache(pool, SIZE)
    cached(cache, pool, (0,) * 8)
    pages = cache.match(KEYS[0], row([0] * 6))
    pool.release(pages[:2])  # the third stays held, so the first two cannot go though nobody holds them
    assert evictable(cache) == 1
    assert cache.evict(4) == 1
    pool.release(pages[2:])
    assert evictable(cache) == 3
    assert cache.evict(4) == 3
    assert pool.used == 0


def test_a_page_shared_behind_the_caches_back_is_held_too():
    pool = PagePool(PAGES)
    cache = PrefixCache(pool, SIZE)
    (pages,) = cached(cache, pool, (0, 0, 1, 1))
    pool.share(pages[1:])
    assert (evictable(cache), cache.evict(2)) == (0, 0)
    pool.release(pages[1:])
    assert (evictable(cache), cache.evict(2)) == (2, 2)


def test_a_second_copy_is_not_kept():
    pool = PagePool(PAGES)
    cache = PrefixCache(pool, SIZE)
    (old,), (copy, longer) = cached(cache, pool, (0, 1), (0, 1, 1, 1))
    assert pool.references(copy) == 0
    assert cache.match(KEYS[0], row([0, 1, 1, 1, 0])) == [old, longer]


def test_a_dropped_page_stays_with_its_holder():
    pool = PagePool(PAGES)
    cache = PrefixCache(pool, SIZE)
    cached(cache, pool, (0, 0, 1, 1))
    held = cache.match(KEYS[0], row([0, 0]))
    assert cache.drop(lambda key: key[0] == 2) == 2
    assert pool.used == pool.references(held[0]) == 1
    assert cache.match(KEYS[0], row([0, 0])) == []
    pool.release(held)
    assert pool.used == 0


def test_a_mistaken_insert_keeps_nothing():
    pool = PagePool(PAGES)
    cache = PrefixCache(pool, SIZE)
    pages = pool.allocate(2)
    cache.insert(KEYS[0], row([0, 0, 1, 1]), pages)
    (fresh,) = pool.allocate(1)
    for key, wrong, named in [
        (KEYS[1], [fresh, pages[0]], f"page {pages[0]} is cached already"),
        (KEYS[0], [pages[0], fresh, fresh], f"page {fresh} is cached already"),
        (KEYS[0], [pages[0], fresh, PAGES - 1], f"page {PAGES - 1} is free"),
    ]:
        with pytest.raises(PageError, match=named):
            cache.insert(key, row([0, 0, 1, 0, 0, 0][: len(wrong) * SIZE]), wrong)
    with pytest.raises(ValueError, match="3 tokens do not fill 2 pages of 2"):
        cache.insert(KEYS[0], row([0, 0, 1]), pages)
    assert (cache.pages, pool.references(fresh)) == (2, 1)


def test_tokens_are_never_wrapped_or_rounded_into_others():
    pool = PagePool(PAGES)
    cache = PrefixCache(pool, SIZE)
    (pages,) = cached(cache, pool, (0, 1))
    assert cache.match(KEYS[0], np.array([0, 1], np.int64)) == pages
    for tokens in (np.array([0, 2**32 + 1]), np.array([0, 1.5]), row([0, 1])[None]):
        with pytest.raises(ValueError, match="not a vector of int32"):
            cache.match(KEYS[0], tokens)


def test_a_page_has_at_least_one_token():
    with pytest.raises(UserError, match=r"RolloutEngine\.page_size is 0; expected 1 token or more"):
        PrefixCache(PagePool(PAGES), 0)


def lines_run(work: Any) -> int:
    """Lines of prefix_cache.py that this call executes, loops counted each time around."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != prefix_cache.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("holders", ["nobody", "all but one"])
def test_the_work_of_one_eviction_does_not_grow_with_the_tree(holders: str):
    counts = []
    for width in (10, 1000):
        pool = PagePool(3 * width + 1)
        cache = PrefixCache(pool, SIZE)
        chains = [(i, i, i, i, i, i) for i in range(width)]
        cached(cache, pool, *chains)
        if holders == "all but one":
            for chain in chains[:-1]:
                cache.match(KEYS[0], row(chain))
        freed: list[int] = []
        cache.evict(2)  # entries of the heap that were out of date are paid for by the matches
        counts.append(lines_run(lambda cache=cache, freed=freed: freed.append(cache.evict(1))))
        assert freed == [1]
        assert evictable(cache) == (3 * width - 3 if holders == "nobody" else 0)
    assert counts[0] == counts[1] > 0
