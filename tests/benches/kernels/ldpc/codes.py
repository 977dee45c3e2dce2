"""Quasi-cyclic LDPC codes of the form of IEEE 802.11n: a base graph of shifts, and encoding in linear time.

The information columns of a base graph are drawn by a seed, three checks each, with shifts that leave no cycle of four
edges. The parity columns are those of 802.11n: one of weight three with shifts 1, 0, 1, then a double diagonal of 0.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from mesh.errors import UserError

Array = np.ndarray[Any, Any]
_WEIGHT = 3  # checks of an information column
_TRIES = 2000


@dataclasses.dataclass(frozen=True)
class QuasiCyclicCode:
    """A code of `columns` * `lift` bits.

    Attributes:
        shifts: a row for each group of checks; -1 where it has no edge to a group of bits.
        lift: bits of a group, and checks; an edge of shift s joins check i to bit (i + s) % lift.
    """

    shifts: tuple[tuple[int, ...], ...]
    lift: int

    def __post_init__(self):
        """Refuse what is no LDPC code (UserError)."""
        name = f"a base graph of {len(self.shifts)} rows"
        widths = {len(row) for row in self.shifts}
        if len(widths) != 1 or not 0 < len(self.shifts) < max(widths):
            raise UserError(f"{name} of {sorted(widths)} columns; expected rows of one length, and fewer than columns")
        graph = np.asarray(self.shifts)
        if self.lift < 2 or graph.min() < -1 or graph.max() >= self.lift:
            raise UserError(f"{name}: shifts {graph.min()} to {graph.max()}; expected -1 to {self.lift - 1} (lift - 1)")
        if len(few := np.flatnonzero((graph >= 0).sum(axis=1) < 2)):
            raise UserError(f"{name}: row {few[0]} has fewer than two edges, which checks nothing")
        if len(none := np.flatnonzero((graph >= 0).sum(axis=0) < 1)):
            raise UserError(f"{name}: column {none[0]} has no edge, so its bits are in no check")
        if square := _cycle_of_four(graph, self.lift):
            raise UserError(f"{name}: rows {square[0]} and columns {square[1]} make a cycle of four edges")

    @property
    def columns(self) -> int:
        """Return the number of groups of bits."""
        return len(self.shifts[0])

    @functools.cached_property
    def rows(self) -> list[list[tuple[int, int, int]]]:
        """Return the edges of each group of checks: number of the edge, column and shift."""
        numbers = itertools.count()
        return [[(next(numbers), c, s) for c, s in enumerate(row) if s >= 0] for row in self.shifts]

    @property
    def edges(self) -> int:
        """Return the number of edges of the base graph."""
        return sum(map(len, self.rows))

    def syndrome(self, bits: Array) -> Array:
        """Return the parities of all checks, [rows, batch, lift], for bits [columns, batch, lift]."""
        return np.stack([_sum(np.roll(bits[c], -s, axis=-1) for _, c, s in row) for row in self.rows])

    def encode(self, information: Array) -> Array:
        """Return code words [columns, batch, lift] of information bits [columns - rows, batch, lift], uint8.

        The sum of all checks leaves the first parity group alone; each check then gives the next group.
        """
        count = len(self.shifts)
        empty = np.zeros((count, *information.shape[1:]), np.uint8)
        sums = self.syndrome(np.concatenate([information.astype(np.uint8), empty]))
        parity = [_sum(iter(sums))]
        for row in range(count - 1):
            shift = self.shifts[row][self.columns - count]
            known = sums[row] if shift < 0 else sums[row] ^ np.roll(parity[0], -shift, axis=-1)
            parity.append(known ^ parity[row] if row else known)
        return np.concatenate([information.astype(np.uint8), np.stack(parity)])


def make_code(lift: int, *, rows: int = 12, columns: int = 24, seed: int = 0) -> QuasiCyclicCode:
    """Return the code of a seed.

    Args:
        lift: bits of a group.
        rows: groups of checks.
        columns: groups of bits.
        seed: seed of the checks and shifts of information columns.

    Raises:
        UserError: no shifts without a cycle of four were found; a larger lift has more.
    """
    rng = np.random.default_rng(seed)
    graph = np.full((rows, columns), -1)
    first = columns - rows
    graph[[0, rows // 2, rows - 1], first] = (1, 0, 1)
    for row in range(rows - 1):
        graph[row : row + 2, first + 1 + row] = 0
    for column in range(first):
        for _ in range(_TRIES):
            few = np.argsort((graph >= 0).sum(axis=1) + rng.random(rows))[:_WEIGHT]
            graph[:, column] = -1
            graph[few, column] = rng.integers(0, lift, _WEIGHT)
            if not _cycle_of_four(graph, lift):
                break
        else:
            raise UserError(
                f"lift {lift}: no shifts without a cycle of four for column {column}; expected a larger one"
            )
    return QuasiCyclicCode(tuple(tuple(map(int, row)) for row in graph), lift)


def _cycle_of_four(graph: Array, lift: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return two rows and two columns whose four edges close a cycle in the lifted graph: equal shift differences."""
    for one, other in itertools.combinations(range(len(graph)), 2):
        both = np.flatnonzero((graph[one] >= 0) & (graph[other] >= 0))
        differences = (graph[one, both] - graph[other, both]) % lift
        seen: dict[int, int] = {}
        for column, difference in zip(both.tolist(), differences.tolist(), strict=True):
            if difference in seen:
                return (one, other), (seen[difference], column)
            seen[difference] = column
    return None


def _sum(parts: Any) -> Array:
    return functools.reduce(np.bitwise_xor, parts)
