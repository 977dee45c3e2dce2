"""A page is free or has holders, never both, and no reference is lost or made up."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh import UserError
from rl.rollout.kv_cache.page_pool import OutOfPages, PageError, PagePool

PAGES = 7


class PoolMachine(RuleBasedStateMachine):
    """Random holders against a count of what each page was given and gave back."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES)
        self.model: Counter[int] = Counter()
        self.shared: set[int] = set()  # as the watcher was told
        self.pool.watch(self.changed)

    def changed(self, page: int, shared: bool) -> None:
        assert shared != (page in self.shared)
        (self.shared.add if shared else self.shared.remove)(page)

    @rule(count=st.integers(0, PAGES))
    def allocate(self, count: int):
        free = PAGES - 1 - len(+self.model)
        if count > free:
            with pytest.raises(OutOfPages) as raised:
                self.pool.allocate(count)
            assert (raised.value.needed, raised.value.free) == (count, free)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert all(0 < page < PAGES and not self.model[page] for page in pages)  # neither rubbish nor somebody's
        self.model.update(pages)

    @precondition(lambda self: self.pool.used)
    @rule(data=st.data())
    def share(self, data: st.DataObject):
        pages = data.draw(st.lists(st.sampled_from(sorted(+self.model)), max_size=4))
        self.pool.share(pages)
        self.model.update(pages)

    @precondition(lambda self: self.pool.used)
    @rule(data=st.data())
    def release(self, data: st.DataObject):
        held = sorted(self.model.elements())
        pages = data.draw(st.lists(st.sampled_from(range(len(held))), max_size=6, unique=True))
        self.pool.release([held[index] for index in pages])
        self.model.subtract(held[index] for index in pages)

    @precondition(lambda self: self.pool.free)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject):
        free = data.draw(st.sampled_from([page for page in range(PAGES) if not self.model[page]]))
        with pytest.raises(PageError, match=f"page {free} is free"):
            self.pool.share([*sorted(+self.model), free])
        with pytest.raises(PageError, match=f"page {free} is free"):
            self.pool.release([free])

    @invariant()
    def agrees(self):
        assert [self.pool.references(page) for page in range(PAGES)] == [self.model[page] for page in range(PAGES)]
        assert self.pool.used == len(+self.model)
        assert sorted(self.pool.free_pages()) == [page for page in range(1, PAGES) if not self.model[page]]
        assert self.pool.free + self.pool.used == self.pool.total == PAGES - 1
        assert self.shared == {page for page, count in self.model.items() if count > 1}

    def teardown(self):
        """Whatever happened, all pages can be had again, each once."""
        self.pool.release(list(self.model.elements()))
        assert sorted(self.pool.allocate(PAGES - 1)) == list(range(1, PAGES))


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPagePool = PoolMachine.TestCase


def test_the_order_of_pages_is_the_same_in_every_run():
    pool = PagePool(PAGES)
    assert pool.allocate(3) == [1, 2, 3]
    pool.release([2])
    assert pool.allocate(2) == [2, 4]


def test_a_page_released_twice_is_named():
    pool = PagePool(PAGES)
    first, second = pool.allocate(2)
    with pytest.raises(PageError, match=f"page {first} is free and cannot be released"):
        pool.release([second, first, first])
    assert pool.used == 0


@pytest.mark.parametrize("page", [-1, PAGES])
def test_pages_outside_the_pool(page: int):
    pool = PagePool(PAGES)
    pool.allocate(PAGES - 1)  # else -1 would be free by its place in the list
    for use in (pool.share, pool.release):
        with pytest.raises(PageError, match=f"no page {page}; the last is {PAGES - 1}"):
            use([page])


def test_a_pool_needs_a_page_beside_the_null_page():
    with pytest.raises(UserError, match=r"RolloutEngine\.pages is 1; expected 2 or more"):
        PagePool(1)
    with pytest.raises(ValueError, match="-1 pages"):
        PagePool(2).allocate(-1)
