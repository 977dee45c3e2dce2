"""The few shapes of the engine's dispatches: rows, tokens of a chunk, keys of a prefill's window.

Each combination is one compiled program, so a size is rounded up to the next of a short list.
"""

import itertools
from collections.abc import Sequence as Items

from axlearn_like.layers.contexts.blocks import KEY_BLOCK
from rl.rollout.sequence import Sequence

_LEAST_ROWS = 8
_LEAST_CHUNK = 32


class Buckets:
    """Sizes for an engine of `max_num_seqs` rows."""

    def __init__(
        self, *, max_num_seqs: int, steps: int, prefill_tokens: int, longest: int, ragged: bool, grouped: bool = True
    ):
        """Choose the sizes.

        Args:
            max_num_seqs: the most rows.
            steps: steps of a decoding dispatch.
            prefill_tokens: the most tokens of a prefill, in all rows.
            longest: tokens that a sequence can have.
            ragged: a prefill too reads each row's own keys alone, so one window serves all.
            grouped: rows decode in groups that read as far as each needs. On CPUs; elsewhere small groups would leave
                the device idle, and each group has to be compiled for each layer and width.
        """
        self._grouped = grouped
        self._steps, self._prefill_tokens = steps, prefill_tokens
        self.all_rows = decode_rows(max_num_seqs)  # rows of dispatches without drafts, the most first
        self.few_rows = halvings(max_num_seqs, 1)  # rows of dispatches with drafts, the most first
        self.chunks = [c for c in (_LEAST_CHUNK << 2 * i for i in range(16)) if c <= prefill_tokens]
        widest = -(-longest // KEY_BLOCK) * KEY_BLOCK
        self._widths = [widest] if ragged else _widths(widest)

    @property
    def widest(self) -> int:
        """Keys of the widest window."""
        return self._widths[-1]

    def rows(self, count: int, *, with_drafts: bool = False) -> int:
        """Return the rows of a decoding dispatch of so many sequences.

        With drafts there are sizes below the least one too: the fewer rows, the more tokens of each are verified.
        """
        return bucket(count, self.few_rows if with_drafts else self.all_rows)

    def groups(self, rows: int) -> list[int]:
        """Return the rows of each window of a dispatch (see contexts/window.py).

        8, 8, 16, 32, ...: the longest rows differ most in length. The groups of fewer rows are the first of those of
        more, so that all dispatches work in the same memory. Where windows are narrow, groups cost more than they save.
        """
        if not self._grouped or self.widest <= 2 * KEY_BLOCK:
            return [rows]
        sizes = [size for size in reversed(self.all_rows) if size <= rows] or [rows]
        return [sizes[0], *(after - before for before, after in itertools.pairwise(sizes))]

    def min_alive_rows(
        self, count: int, *, waiting: bool, with_drafts: bool = False, sizes: Items[int] | None = None
    ) -> int:
        """Return the least rows with which a dispatch of `count` sequences goes on.

        It ends early when the rest would fit into a smaller one or, if others could use the rows, when an eighth has
        ended. `sizes`: rows of the dispatches that there are, unless all are.
        """
        if sizes is None:
            sizes = self.few_rows if with_drafts else self.all_rows
        smaller = max((rows for rows in sizes if rows < count), default=0)
        return max(1, smaller + 1, count - count // 8 if waiting else 0)

    def width(self, tokens: int) -> int:
        """Return the keys of a prefill's window that holds so many tokens."""
        return bucket(tokens, self._widths)

    def prefill(self, unfilled: int) -> tuple[int, int]:
        """Return (most rows, chunk) of the dispatch for a sequence that has so many tokens to prefill."""
        chunk = bucket(unfilled, self.chunks)
        return max(1, self._prefill_tokens // chunk), chunk

    def prefill_rows(self, count: int, chunk: int) -> int:
        """Return the rows of a prefill of so many sequences."""
        return bucket(count, halvings(max(1, self._prefill_tokens // chunk), 1))

    def reach(self, sequence: Sequence) -> int:
        """Return the tokens of the sequence at the end of a dispatch."""
        return sequence.cached + min(self._steps, sequence.remaining)


def decode_rows(max_num_seqs: int) -> list[int]:
    """Return the rows of decoding dispatches without drafts, the most first."""
    return halvings(max_num_seqs, _LEAST_ROWS)


def bucket(size: int, buckets: Items[int]) -> int:
    """Return the smallest bucket that holds `size`, or the largest there is."""
    return min((bucket for bucket in buckets if bucket >= size), default=max(buckets))


def halvings(most: int, least: int) -> list[int]:
    """Return most, most / 2, ... down to `least`, rounded up."""
    sizes = [most]
    while sizes[-1] // 2 >= least:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _widths(widest: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... blocks of keys: half a block has another order of sums on CPUs."""
    sizes = {KEY_BLOCK << i for i in range(24)} | {3 * KEY_BLOCK << i for i in range(22)}
    return sorted(size for size in sizes if size < widest) + [widest]
