"""Reference counts of the pages of the device's pool.

A page is room for the keys and values of `page_size` tokens of all layers; here it is only a number. Page 0 is the
null page: padding is written to it, nothing reads it, and it is never handed out. Each holder of a page (a running
sequence, the prefix cache) has one reference to it and releases that reference once.
"""

from collections.abc import Callable, Sequence

from mesh import UserError


class OutOfPages(Exception):
    """More pages were requested than are free. Nothing was taken."""

    def __init__(self, needed: int, free: int):
        super().__init__(f"{needed} pages are needed and {free} are free")
        self.needed = needed
        self.free = free


class PageError(RuntimeError):
    """A page was used without a reference to it: a bug of the caller."""


class PagePool:
    """Reference counts of pages 1 to pages - 1. Not safe for use from several threads."""

    def __init__(self, pages: int):
        """Make a pool of so many pages, the null page included (UserError: there is no other)."""
        if pages < 2:
            raise UserError(f"RolloutEngine.pages is {pages}; expected 2 or more, since page 0 never holds a sequence")
        self._references = [0] * pages
        self._free = list(range(pages - 1, 0, -1))  # a stack: the page released last is handed out first
        self._watchers: list[Callable[[int, bool], None]] = []

    @property
    def total(self) -> int:
        """Pages that can be handed out."""
        return len(self._references) - 1

    @property
    def free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    def free_pages(self) -> list[int]:
        """Return the pages without a holder."""
        return list(self._free)

    @property
    def used(self) -> int:
        """Pages with a holder."""
        return self.total - self.free

    def references(self, page: int) -> int:
        """Return the number of holders of this page; 0 if it is free."""
        if not 0 <= page < len(self._references):
            raise PageError(f"there is no page {page}; the last is {self.total}")
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` free pages with one reference each, all or none (OutOfPages: fewer are free)."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self.free:
            raise OutOfPages(count, self.free)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to each page, two if it is named twice (PageError: one is free; none was added)."""
        for page in pages:
            if self.references(page) == 0:
                raise PageError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._references[page] += 1
            if self._references[page] == 2:
                self._notify(page, True)

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page (PageError: one is free already; those before it were released)."""
        for page in pages:
            if self.references(page) == 0:
                raise PageError(f"page {page} is free and cannot be released")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
            elif self._references[page] == 1:
                self._notify(page, False)

    def watch(self, changed: Callable[[int, bool], None]) -> None:
        """Call changed(page, True) when a page gets a second holder, changed(page, False) when one is left.

        The prefix cache thus knows at any moment what it could free, without a query for each of its pages. The
        callback must not change the pool.
        """
        self._watchers.append(changed)

    def _notify(self, page: int, shared: bool) -> None:
        for changed in self._watchers:
            changed(page, shared)
