"""The record of what a sequence's tokens were drawn from: the few tokens that a truncated distribution had left.

In a rollout it is [tokens, w] in the smallest unsigned type, w being the most that a draw of this rollout had, and the
type's largest number where a draw had fewer: 2 w bytes a token with up to 65,535 tokens of vocabulary, 4 w with more.
"""

import numpy as np

_SMALL, _LARGE = np.dtype(np.uint16), np.dtype(np.uint32)


class CandidateRecord:
    """Ids of the tokens that each token of a completion was drawn from; none for tokens that were given."""

    def __init__(self, kept: list[np.ndarray] | None = None, recorded: bool = False):
        """Begin with these, one array a token."""
        self._kept: list[np.ndarray] = kept or []
        self._recorded = recorded

    @classmethod
    def of(cls, record: np.ndarray | None) -> "CandidateRecord":
        """Return the record of a rollout."""
        if record is None:
            return cls()
        return cls([row[row != np.iinfo(record.dtype).max].astype(np.int32) for row in record], recorded=True)

    def drawn(self, kept: np.ndarray | None) -> None:
        """Append draws, int32 [tokens, k] with -1 behind the last; None: nothing is recorded."""
        if kept is not None:
            self._recorded = True
            self._kept += [row[row >= 0] for row in kept]

    def given(self, tokens: int) -> None:
        """Append tokens that were not drawn."""
        self._kept += [np.zeros(0, np.int32)] * tokens

    def cut(self, tokens: int) -> None:
        """Drop all but the first."""
        del self._kept[tokens:]

    def copy(self) -> "CandidateRecord":
        """Return a copy that is written by itself."""
        return CandidateRecord(list(self._kept), self._recorded)

    def array(self) -> np.ndarray | None:
        """Return the record of a rollout; None: nothing was recorded."""
        if not self._recorded:
            return None
        largest = max((int(row.max(initial=0)) for row in self._kept), default=0)
        dtype = _SMALL if largest < np.iinfo(_SMALL).max else _LARGE
        found = np.full((len(self._kept), max(map(len, self._kept), default=0)), np.iinfo(dtype).max, dtype)
        for row, kept in zip(found, self._kept, strict=True):
            row[: len(kept)] = kept
        return found
