"""The record of a sequence's routing: the experts of each token in each layer that has some.

For each position it is that of the keys and values that the sequence has there, or had last: a token that is computed
again under other weights is recorded again. In a cached prefix it is kept with the pages.
"""

from collections.abc import Sequence as Items

import numpy as np


class RoutingRecord:
    """Experts [tokens, layers with experts, top_k] of a sequence, from its first token on."""

    def __init__(self, experts: np.ndarray | None = None):
        self._room = experts  # room of the record's length or more
        self._size = 0 if experts is None else len(experts)

    def write(self, start: int, experts: np.ndarray) -> None:
        """Record the experts of tokens from this position on, which is at most the end of the record."""
        if start > self._size:
            raise ValueError(f"routing of tokens from {start} on, where {self._size} are recorded")
        end = start + len(experts)
        if self._room is None or end > len(self._room):
            room = np.empty((max(end, 2 * self._size), *experts.shape[1:]), experts.dtype)
            if self._room is not None:
                room[: self._size] = self._room[: self._size]
            self._room = room
        self._room[start:end] = experts
        self._size = max(self._size, end)

    def copy(self) -> "RoutingRecord":
        """Return a copy that is written by itself."""
        return RoutingRecord(None if self._room is None else self._room[: self._size].copy())

    def first(self, tokens: int) -> np.ndarray | None:
        """Return a copy of the record of the first tokens, or of as many as there are; None: nothing was recorded."""
        return None if self._room is None else self._room[: min(tokens, self._size)].copy()

    def pages(self, count: int, page_size: int) -> list[np.ndarray]:
        """Return copies of the record of the first full pages; none if nothing was recorded."""
        if self._room is None:
            return []
        assert count * page_size <= self._size
        return [self._room[at : at + page_size].copy() for at in range(0, count * page_size, page_size)]

    def adopt(self, pages: Items[np.ndarray]) -> None:
        """Take over the record of the first pages."""
        if pages:
            self.write(0, np.concatenate(pages))
