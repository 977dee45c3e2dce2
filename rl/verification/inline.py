"""Scoring in the caller's own process: for rewards that are trusted functions, in benchmarks and notebooks."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from rl.roles.messages import Score
from rl.verification.scorers import Scorer


class InlineVerifier(Configurable):
    """The verifier's interface without processes. A scorer that hangs hangs the caller; one that raises is an error."""

    class Config(ConfigBase["InlineVerifier"]):
        scorer: Scorer.Config = REQUIRED

    def __init__(self, cfg: Config):
        self._scorer: Scorer = cfg.scorer.build()

    def score(self, problem_ids: Sequence[int], answers: Sequence[str]) -> list[Score]:
        """Return one score per answer, in order."""
        return [self._one(i, answer) for i, answer in zip(problem_ids, answers, strict=True)]

    def _one(self, problem_id: int, answer: str) -> Score:
        began = time.monotonic()
        try:
            reward = float(self._scorer.score(problem_id, answer))
        except (ValueError, TypeError, ArithmeticError, LookupError):  # what a malformed answer can cause
            return Score(0.0, "error", time.monotonic() - began)
        return Score(reward, "ok", time.monotonic() - began)

    def close(self) -> None:
        """Do nothing: there are no processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
