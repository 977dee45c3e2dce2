"""Records of a completion's tokens, one entry each: log-probability, version of the weights, drawn or given, scores."""

from typing import Any

import numpy as np

from rl.protocol.messages import Rollout
from rl.rollout.decoding.scores import TokenScores
from rl.rollout.kv_cache.candidate_record import CandidateRecord


class CompletionRecords:
    """Everything that a rollout says of its tokens beside their ids and their routing."""

    def __init__(self):
        self.logprobs: list[float] = []
        self.scores: TokenScores | None = None
        self._versions: list[int] = []
        self._actions: list[bool] = []
        self._candidates = CandidateRecord()

    @classmethod
    def of(cls, rollout: Rollout) -> "CompletionRecords":
        """Return the records of a rollout."""
        found = cls()
        found.logprobs, found._versions = rollout.logprobs.tolist(), rollout.versions.tolist()
        found._actions, found._candidates = rollout.action_mask.tolist(), CandidateRecord.of(rollout.candidate_tokens)
        return found

    def copy(self) -> "CompletionRecords":
        """Return a copy that is written by itself."""
        found = CompletionRecords()
        found.logprobs, found._versions = list(self.logprobs), list(self._versions)
        found._actions, found._candidates, found.scores = list(self._actions), self._candidates.copy(), self.scores
        return found

    def drawn(
        self, logprobs: list[float], version: int, kept: np.ndarray | None = None, scores: TokenScores | None = None
    ) -> None:
        """Append draws; `kept`: the tokens that each was drawn from."""
        self._append(logprobs, version, action=True)
        self._candidates.drawn(kept)
        if scores is not None:
            self.scores = scores if self.scores is None else self.scores + scores

    def given(self, count: int, version: int) -> None:
        """Append tokens that were not drawn."""
        self._append([0.0] * count, version, action=False)
        self._candidates.given(count)

    def _append(self, logprobs: list[float], version: int, *, action: bool) -> None:
        self.logprobs += logprobs
        self._versions += [version] * len(logprobs)
        self._actions += [action] * len(logprobs)

    def cut(self, kept: int) -> None:
        """Drop all but the first."""
        for records in (self.logprobs, self._versions, self._actions):
            del records[kept:]
        self._candidates.cut(kept)
        self.scores = None if self.scores is None else self.scores[:kept]

    def fields(self) -> dict[str, Any]:
        """Return the fields of a rollout."""
        return {
            "logprobs": np.asarray(self.logprobs, np.float32),
            "versions": np.asarray(self._versions, np.int32),
            "action_mask": np.asarray(self._actions, bool),
            "candidate_tokens": self._candidates.array(),
        }
