"""The verifier: the role that scores answers. A hang or a crash is a status, never a reward."""

from collections.abc import Sequence
from typing import Any, override

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, reach
from axlearn_like.run.closing import Closing
from rl.protocol.messages import Details, Score
from rl.verification.failures import FailureWatch
from rl.verification.pool import WorkerPool
from rl.verification.scorers import Scorer

__all__ = ["Verifier"]


class Verifier(Closing, Configurable):
    """Scores answers in `processes` killable processes; thread-safe. `close` it, or use `with`.

    >>> from rl.tasks.family import TaskFamily
    >>> from rl.tasks.mixture import TaskMixture
    >>> from rl.verification.scorers import ReasoningGymScorer
    >>> from rl.verification.service import Verifier
    >>> tasks = TaskMixture.Config(families=(TaskFamily.Config(name="chain_sum"),), seed=0)
    >>> problem = tasks.build().train(0)
    >>> with Verifier.Config(scorer=ReasoningGymScorer.Config(mixture=tasks), processes=1).build() as verifier:
    ...     [score.reward for score in verifier.score([problem.id, problem.id], [problem.answer, "no idea"])]
    [1.0, 0.0]
    """

    class Config(ConfigBase["Verifier"]):
        scorer: Scorer.Config = REQUIRED
        processes: int = 2
        deadline_s: float = 10.0  # wall-clock seconds that one answer may take before its process is killed
        start_deadline_s: float = 120.0  # wall-clock seconds that a process may take to import and build the scorer
        # Address space of a process, as an answer may ask for 9**9**9; beyond it the scorer gets a MemoryError. 0: no
        # limit.
        memory_mb: int = 4096

        @override
        def reaches(self) -> tuple[str, ...]:
            return tuple(reach(self.scorer)) if isinstance(self.scorer, ConfigBase) else ()

        @override
        def check_fields(self) -> None:
            self.require_least(1, "processes")
            self.require_least(0, "memory_mb")
            for field in ("deadline_s", "start_deadline_s"):
                self.require(field, getattr(self, field) > 0, "seconds, more than 0")

    def __init__(self, cfg: Config):
        self._pool = WorkerPool(
            cfg.scorer,
            processes=cfg.processes,
            deadline_s=cfg.deadline_s,
            start_deadline_s=cfg.start_deadline_s,
            memory_mb=cfg.memory_mb,
            by_group="group" in cfg.scorer.wants(),
        )
        self._failures = FailureWatch()

    def score(
        self, problem_ids: Sequence[int], answers: Sequence[str], details: Sequence[Details] | None = None
    ) -> list[Score]:
        """Return one score per answer, in order; `answers[i]` answers problem `problem_ids[i]`.

        Raises:
            ValueError: the lengths differ. RuntimeError: the verifier is closed, or its scorer cannot be built (with
            what its process said). ScorerFails: none of the last answers, and they were many, could be scored.
        """
        scores = self._pool.score(problem_ids, answers, details)
        self._failures.check(problem_ids, scores)
        return scores

    def stats(self) -> dict[str, Any]:
        """Return counts since the start: "scored", "ok", "error", "timeout", "crash", "restarts".

        "last_error" is the text of the last exception of a scorer, "isolation" what keeps its processes apart.
        """
        return self._pool.stats()

    def describe_wait(self) -> str:
        """Describe, for a log line, what callers of `score` are waiting for."""
        return self._pool.describe_wait()

    def pids(self) -> list[int]:
        """Return the process ids of the pool, for the timeline and for tests that kill them."""
        return self._pool.pids()

    @override
    def close(self) -> None:
        """Kill and reap all processes; callers that wait in `score` get a RuntimeError."""
        self._pool.close()
