"""Packing: the row of each piece of each example, as a pure function of the examples' lengths.

An example of n tokens takes n - 1 positions: its last token is only a target. The rows of a window of consecutive
examples are planned at once; nothing is carried into the next window, so a plan can be recomputed from the beginning of
its window.
"""

from typing import Literal, NamedTuple, Protocol

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input.source import InputError


class Pieces(NamedTuple):
    """Pieces of examples, each to be placed in one row: int64 [p]."""

    example: np.ndarray  # index of the example
    start: np.ndarray  # tokens [start, stop) are inputs, [start + 1, stop + 1) their targets
    stop: np.ndarray

    def take(self, order: np.ndarray) -> "Pieces":
        """Return the pieces at these indices."""
        return Pieces(*(field[order] for field in self))


class RowPlan(NamedTuple):
    """The rows of a window: row i holds the pieces [first[i], first[i + 1]), from left to right."""

    pieces: Pieces
    first: np.ndarray  # int64 [rows + 1]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.first) - 1


class Arrangement(Protocol):
    """A way to put pieces into rows."""

    window: int  # examples planned together

    def rows(self, needs: np.ndarray, seq_len: int) -> np.ndarray:
        """Return the row (from 0, none left out) of each piece, which needs `needs[i]` <= seq_len positions; int64."""
        ...


class FirstFit(Configurable):
    """Each piece goes into the first row that has room for it, else into a new one.

    First fit takes at most 1.7 times the least possible number of rows (Dosa and Sgall, 2013); with pieces much shorter
    than a row, nearly the least. Only the last row of a window lacks candidates.
    """

    class Config(ConfigBase["FirstFit"]):
        window: int = 1024  # examples; more fill rows better, and take longer to plan on a resume

    def __init__(self, cfg: Config):
        self.window = _positive(cfg.window)

    def rows(self, needs: np.ndarray, seq_len: int) -> np.ndarray:
        """Return the row of each piece, see `Arrangement.rows`."""
        smallest = int(needs.min(initial=seq_len))
        free = np.zeros(len(needs), np.int64)  # free positions of each open row
        placed = np.empty(len(needs), np.int64)
        first, end = 0, 0  # rows before `first` are full, from `end` on there are none
        for piece, need in enumerate(needs.tolist()):
            row = end
            if end > first and need < seq_len:
                fits = free[first:end] >= need
                at = int(fits.argmax())
                row = first + at if fits[at] else end
            if row == end:
                free[end] = seq_len
                end += 1
            free[row] -= need
            placed[piece] = row
            while first < end and free[first] < smallest:
                first += 1
        return placed


class OneARow(Configurable):
    """No packing: each piece has its own row."""

    class Config(ConfigBase["OneARow"]):
        window: int = 1024  # examples shuffled together after they are cut into pieces

    def __init__(self, cfg: Config):
        self.window = _positive(cfg.window)

    def rows(self, needs: np.ndarray, seq_len: int) -> np.ndarray:
        """Return the row of each piece, see `Arrangement.rows`."""
        return np.arange(len(needs), dtype=np.int64)


def _positive(window: int) -> int:
    if window < 1:
        raise InputError(f"a window of {window} examples: expected at least 1")
    return window


def split_examples(lengths: np.ndarray, seq_len: int, long: Literal["refuse", "split"]) -> Pieces:
    """Return the pieces of examples of `lengths` (int64 [k], each >= 2) that fit into rows of `seq_len` positions.

    Split pieces overlap by one token, so that every token but the first is a target exactly once.

    Raises:
        TooLong: an example needs more than a row and `long` is "refuse"; its `example` is the index into `lengths`.
    """
    places = lengths - 1
    counts = -(-places // seq_len)
    if long == "refuse" and counts.max(initial=0) > 1:
        raise TooLong(int(np.argmax(counts > 1)))
    example = np.repeat(np.arange(len(lengths)), counts)
    start = (np.arange(len(example)) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    return Pieces(example, start, np.minimum(start + seq_len, places[example]))


class TooLong(Exception):
    """An example that does not fit into a row; callers that know its name report it."""

    def __init__(self, example: int):
        super().__init__(example)
        self.example = example


def plan_rows(pieces: Pieces, rows: np.ndarray, order: np.ndarray) -> RowPlan:
    """Return the plan that puts piece i into row rows[i], and outputs row r (from 0) as number order[r]."""
    out = order[rows]
    first = np.zeros(len(order) + 1, np.int64)
    np.cumsum(np.bincount(out, minlength=len(order)), out=first[1:])
    return RowPlan(pieces.take(np.argsort(out, kind="stable")), first)
