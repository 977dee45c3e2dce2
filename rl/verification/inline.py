"""Scoring in the caller's own process: for rewards that are trusted functions, in benchmarks and notebooks."""

from collections.abc import Sequence
from typing import override

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.run.closing import Closing
from rl.protocol.messages import Details, Score
from rl.verification.failures import FailureWatch
from rl.verification.job_queue import split
from rl.verification.scorers import Scorer, score_answers


class InlineVerifier(Closing, Configurable):
    """The verifier's interface without processes. A scorer that hangs hangs the caller; one that raises is an error."""

    class Config(ConfigBase["InlineVerifier"]):
        scorer: Scorer.Config = REQUIRED

    def __init__(self, cfg: Config):
        self._scorer: Scorer = cfg.scorer.build()
        self._by_group = "group" in cfg.scorer.wants()
        self._failures = FailureWatch()

    def score(
        self, problem_ids: Sequence[int], answers: Sequence[str], details: Sequence[Details] | None = None
    ) -> list[Score]:
        """Return one score per answer, in order (ScorerFails: none of many answers could be scored)."""
        scores: list[Score] = []
        for problem_id, part in split(problem_ids, answers, self._by_group):
            scores += score_answers(self._scorer, problem_id, answers[part], [] if details is None else details[part])
        self._failures.check(problem_ids, scores)
        return scores

    @override
    def close(self) -> None:
        """Do nothing: there are no processes."""
