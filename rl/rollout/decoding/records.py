"""Records of a completion's tokens, one entry each: log-probability, version of the weights, drawn or given, scores."""

from collections.abc import Sequence
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from rl.protocol.messages import Rollout
from rl.rollout.decoding.scores import TokenScores

_NONE = np.zeros(0, np.int32)


class CompletionRecords:
    """Everything that a rollout says of its tokens beside their ids and their routing."""

    def __init__(self):
        self.logprobs: list[float] = []
        self.scores: TokenScores | None = None
        self._versions: list[int] = []
        self._actions: list[bool] = []
        self._candidates: list[np.ndarray] = []  # ids of the tokens that each was drawn from
        self._recorded = False  # the candidates are recorded

    @classmethod
    def of(cls, rollout: Rollout) -> "CompletionRecords":
        """Return the records of a rollout."""
        found, packed = cls(), rollout.candidate_tokens
        found.logprobs, found._versions = rollout.logprobs.tolist(), rollout.versions.tolist()
        found._actions, found._recorded = rollout.action_mask.tolist(), packed is not None
        found._candidates = (
            [_NONE] * len(rollout.tokens)
            if packed is None
            else [row[row != np.iinfo(packed.dtype).max].astype(np.int32) for row in packed]
        )
        return found

    def copy(self) -> "CompletionRecords":
        """Return a copy that is written by itself."""
        found = CompletionRecords()
        found.logprobs, found._versions = list(self.logprobs), list(self._versions)
        found._actions, found.scores = list(self._actions), self.scores
        found._candidates, found._recorded = list(self._candidates), self._recorded
        return found

    def drawn(
        self, logprobs: list[float], version: int, kept: np.ndarray | None = None, scores: TokenScores | None = None
    ) -> None:
        """Append draws; `kept`: the tokens that each was drawn from, int32 [tokens, k] with -1 behind the last."""
        self._recorded = self._recorded or kept is not None
        candidates = [_NONE] * len(logprobs) if kept is None else [row[row >= 0] for row in kept]
        self._append(logprobs, version, candidates, action=True)
        if scores is not None:
            self.scores = scores if self.scores is None else self.scores + scores

    def given(self, count: int, version: int) -> None:
        """Append tokens that were not drawn."""
        self._append([0.0] * count, version, [_NONE] * count, action=False)

    def _append(self, logprobs: list[float], version: int, candidates: list[np.ndarray], *, action: bool) -> None:
        self.logprobs += logprobs
        self._versions += [version] * len(logprobs)
        self._actions += [action] * len(logprobs)
        self._candidates += candidates

    def cut(self, kept: int) -> None:
        """Drop all but the first."""
        for records in (self.logprobs, self._versions, self._actions, self._candidates):
            del records[kept:]
        self.scores = None if self.scores is None else self.scores[:kept]

    def fields(self) -> dict[str, Any]:
        """Return the fields of a rollout."""
        return {
            "logprobs": np.asarray(self.logprobs, np.float32),
            "versions": np.asarray(self._versions, np.int32),
            "action_mask": np.asarray(self._actions, bool),
            "candidate_tokens": packed_candidates(self._candidates) if self._recorded else None,
        }


def packed_candidates(candidates: Sequence[np.ndarray]) -> np.ndarray:
    """Return the tokens that each token was drawn from, [tokens, most that one had], in the smallest unsigned type.

    The type's largest number stands where a token had fewer: 2 bytes each with up to 65,535 tokens of vocabulary, 4
    with more.
    """
    largest = max((int(row.max(initial=0)) for row in candidates), default=0)
    dtype = np.dtype(np.uint16 if largest < np.iinfo(np.uint16).max else np.uint32)
    found = np.full((len(candidates), max(map(len, candidates), default=0)), np.iinfo(dtype).max, dtype)
    for row, kept in zip(found, candidates, strict=True):
        row[: len(kept)] = kept
    return found


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
