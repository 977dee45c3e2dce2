"""Tiles: rows of a decoding dispatch that read the keys they have in common once (contexts/cascade.py). Host code.

What two sequences have in common is known from their tokens: keys and values of a position depend on the tokens up to
it, the weights and the adapter, and on nothing else. So samples of a request share their prompt, forked episodes all
turns before the fork, and requests that begin alike their beginning, whether or not they hold the same pages. Where
keys were computed with other weights than the next ones will be, only what lies in the same pages is shared.
"""

import dataclasses
import itertools
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from axlearn_like.layers.contexts.cascade import tile_rows
from rl.rollout.sequence import Sequence


class KeysRead(NamedTuple):
    """Keys of one layer and head that a step reads, in whole blocks, idle rows included."""

    read: int
    alone: int  # reads if each row read all of its own keys


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """The rows of a dispatch."""

    rows: list[Sequence | None]  # the sequence of each row, None in idle ones; tiles of `tile_rows` one after the other
    shared: np.ndarray  # int32 [tiles], blocks of keys that all sequences of a tile have in common
    sources: np.ndarray  # int32 [tiles], the row whose pages hold them

    def keys(self, ends: Items[int], steps: int) -> KeysRead:
        """Return the keys that a step reads; `ends`: of the blocks, `steps`: that a row draws at most."""
        read = alone = first = 0
        for shared, size in zip(self.shared, tile_rows(len(self.rows), _size(self)), strict=True):
            some, first = self.rows[first : first + size], first + size
            reach = max((one.cached + min(steps, one.remaining) for one in some if one), default=0)
            needed = next((end for end in ends if end >= reach), ends[-1]) if reach else 0
            common = ends[shared - 1] if shared else 0
            read += common + size * (needed - common)
            alone += size * needed
        return KeysRead(read, alone)


def _size(tiles: Tiles) -> int:
    return -(-len(tiles.rows) // len(tiles.shared))


def make_tiles(sequences: Items[Sequence], rows: int, size: int, ends: Items[int], page_size: int) -> Tiles:
    """Arrange sequences in rows, those of a request side by side.

    Args:
        sequences: at most `rows`.
        rows: rows of the dispatch.
        size: rows of a tile.
        ends: the end of each block of keys.
        page_size: tokens of a page.
    """
    placed: list[Sequence | None] = []
    sizes, shared, sources = tile_rows(rows, min(size, rows)), [], []
    for size, some in zip(sizes, _bins(sequences, sizes), strict=True):
        longest = max(some, key=lambda one: one.cached, default=None)
        sources.append(len(placed) + some.index(longest) if longest is not None else 0)
        shared.append(blocks_in_common(some, ends, page_size) if len(some) > 1 else 0)
        placed += [*some, *[None] * (size - len(some))]
    return Tiles(placed, np.array(shared, np.int32), np.array(sources, np.int32))


def _bins(sequences: Items[Sequence], sizes: Items[int]) -> list[list[Sequence]]:
    """Return the sequences of each tile: those of a request together, in as few tiles as can be."""
    ordered = sorted(sequences, key=lambda one: (one.group.number, one.sample))
    parts: list[list[Sequence]] = []
    for _, group in itertools.groupby(ordered, key=lambda one: one.group.number):
        parts += [list(part) for part in itertools.batched(group, sizes[0])]
    parts.sort(key=len, reverse=True)
    bins: list[list[Sequence]] = [[] for _ in sizes]
    for part in parts:
        rest = part
        # First those that hold nothing, then those whose loss is least: what they share ends where others join.
        for index in sorted(range(len(sizes)), key=lambda index: len(bins[index])):
            room = sizes[index] - len(bins[index])
            bins[index] += rest[:room]
            if not (rest := rest[room:]):
                break
    return bins


def blocks_in_common(sequences: Items[Sequence], ends: Items[int], page_size: int) -> int:
    """Return how many blocks of keys, from the first, are the same for all sequences.

    The last key of a block may be that of the token that is fed next, which is in no page yet.
    """
    first, *others = sequences
    if any(one.cache_key != first.cache_key for one in others) or first.cache_key is None:
        return _pages_in_common(sequences, ends, page_size)
    known = len(first.prompt) if all(one.group is first.group for one in others) else 0
    shortest, start, count = min(len(one.tokens) for one in sequences), 0, 0
    for end in ends:
        if end > shortest:
            break
        if end > known:
            part = first.tokens[start:end]
            if any(one.tokens[start:end] != part for one in others):
                break
        start, count = end, count + 1
    return count


def _pages_in_common(sequences: Items[Sequence], ends: Items[int], page_size: int) -> int:
    first, *others = sequences
    shortest, start, count = min(one.cached for one in sequences), 0, 0
    for end in ends:
        part = slice(start // page_size, end // page_size)
        if end > shortest or any(one.pages[part] != first.pages[part] for one in others):
            break
        start, count = end, count + 1
    return count
