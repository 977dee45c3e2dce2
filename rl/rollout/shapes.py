"""The few shapes of the engine's dispatches: how many rows, tokens of a chunk, keys of a window.

Each combination is one compiled program, so a size is rounded up to the next of a short list.
"""

from collections.abc import Sequence as Items

from axlearn_like.layers.paged_context import KEY_BLOCK
from rl.rollout.sequence import Sequence

_LEAST_ROWS = 8
_LEAST_CHUNK = 32
_KEYS_OF_A_ROW = 256  # whose reading costs as much as all else that a row needs (a policy of millions, on a CPU)


class Shapes:
    """Sizes for an engine of `slots` rows, and which sequences share a dispatch."""

    def __init__(self, *, slots: int, steps: int, prefill_tokens: int, longest: int, ragged: bool):
        """Args:
            steps: of a decoding dispatch.
            longest: tokens that a sequence can have.
            ragged: whether each row reads its own keys alone, so that there is one window for all.
        """
        self._steps, self._prefill_tokens, self._ragged = steps, prefill_tokens, ragged
        self._rows = halvings(slots, _LEAST_ROWS)
        self.chunks = [c for c in (_LEAST_CHUNK << 2 * i for i in range(16)) if c <= prefill_tokens]
        widest = -(-longest // KEY_BLOCK) * KEY_BLOCK
        self._widths = [widest] if ragged else _widths(widest)

    @property
    def widest(self) -> int:
        return self._widths[-1]

    def rows(self, count: int) -> int:
        """Rows of a decoding dispatch of so many sequences."""
        return bucket(count, self._rows)

    def quorum(self, count: int, *, waiting: bool) -> int:
        """Below how many rows a dispatch of `count` sequences ends early: when the rest would fit into a smaller one,
        or, if others could use the rows, when an eighth has ended."""
        smaller = max((rows for rows in self._rows if rows < count), default=0)
        return max(1, smaller + 1, count - count // 8 if waiting else 0)

    def width(self, tokens: int) -> int:
        """Keys of a window that holds so many."""
        return bucket(tokens, self._widths)

    def prefill(self, unfilled: int) -> tuple[int, int]:
        """(most rows, chunk) of the dispatch for a sequence that has so many tokens to prefill."""
        chunk = bucket(unfilled, self.chunks)
        return max(1, self._prefill_tokens // chunk), chunk

    def prefill_rows(self, count: int, chunk: int) -> int:
        """Rows of a prefill of so many sequences."""
        return bucket(count, halvings(max(1, self._prefill_tokens // chunk), 1))

    # ---- who shares a dispatch

    def groups(self, sequences: Items[Sequence]) -> list[list[Sequence]]:
        """Sequences of like length together, for a dispatch each: by XLA every row reads as far as the longest.

        Splits off the longest 8, 16, 32, ... where that makes less of rows x (keys + what a row costs beside them).
        """
        rows = sorted(sequences, key=self.reach, reverse=True)
        found: list[list[Sequence]] = []
        while rows:
            cuts = [len(rows), *(cut for cut in self._rows if cut < len(rows) and not self._ragged)]
            cut = min(cuts, key=lambda cut: self._cost(rows[:cut]) + self._cost(rows[cut:]))
            found.append(rows[:cut])
            rows = rows[cut:]
        return found

    def reach(self, sequence: Sequence) -> int:
        """Tokens of the sequence by the end of a dispatch."""
        return sequence.cached + min(self._steps, sequence.limit - len(sequence.tokens))

    def _cost(self, rows: Items[Sequence]) -> int:
        """Of a step of these rows, the longest first, in keys read."""
        return self.rows(len(rows)) * (self.width(self.reach(rows[0])) + _KEYS_OF_A_ROW) if rows else 0


def bucket(size: int, buckets: Items[int]) -> int:
    """The smallest bucket that holds `size`, or the largest there is."""
    return min((bucket for bucket in buckets if bucket >= size), default=max(buckets))


def halvings(most: int, least: int) -> list[int]:
    """most, most / 2, ... down to `least`, rounded up."""
    sizes = [most]
    while sizes[-1] // 2 >= least:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _widths(widest: int) -> list[int]:
    """1, 1.5, 2, 3, 4, 6, 8, 12, ... blocks of keys."""
    sizes = {KEY_BLOCK << i for i in range(24)} | {3 * KEY_BLOCK // 2 << i for i in range(23)}
    return sorted(size for size in sizes if size < widest) + [widest]
