"""Scorers: what a verification worker calls for each answer. They may raise, hang or crash."""

import abc
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, override

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, walk_configs
from rl.protocol.experiment import ExperimentFields
from rl.protocol.messages import Details, Problem, Score
from rl.tasks.mixture import TaskMixture
from rl.verification.rewards import check_rewards, error_text


class ScoringConfig[T](ConfigBase[T]):
    """Config of a scorer or of a part of one: what it needs of rollouts, of problems and of its process."""

    def parts(self) -> list["ScoringConfig[Any]"]:
        """Return the configs of scoring within this one."""
        return [node for path, node in walk_configs(self) if path and isinstance(node, ScoringConfig)]

    def wants(self) -> frozenset[str]:
        """Return what it wants beside answers: "tokens", "finish_reason"; "group": a prompt's samples at once."""
        return frozenset().union(*(part.wants() for part in self.parts()))

    def confined(self) -> bool:
        """Return True if it needs neither network nor files but those of packages: its processes get no others."""
        return False

    def environment(self) -> tuple[str, ...]:
        """Return the names of the environment variables that its processes inherit beside those of a locale."""
        of_tasks: Callable[[], Iterable[str]] = getattr(getattr(self, "mixture", None), "environment", tuple)
        return tuple(dict.fromkeys((*of_tasks(), *(name for part in self.parts() for name in part.environment()))))

    def negative(self) -> str | None:
        """Return the field by which rewards may fall below 0; None: none does, as far as the config says."""
        return None

    def requires(self, experiment: ExperimentFields) -> None:
        """Refuse rewards that may be negative where the advantage divides by their mean."""
        advantage = experiment.objective.advantage
        if (field := self.negative()) is not None and advantage.build().needs_positive:
            why = f"objective.advantage={type(advantage).__owner__.__name__} divides by their mean (MaxRL)"
            why += "; GroupAdvantage.Config() takes any"
            self.require(field, False, f"a value with which no reward is below 0: {why}")

    def check_problem(self, problem: Problem) -> None:
        """Refuse problems without what it compares answers with (ConfigError); called before a run begins."""


class Scorer(Configurable, abc.ABC):
    """Function of a problem and an answer, built in every worker process from its config alone."""

    # Raised when the class scores otherwise than before, so that `Cached` does not find older results.
    VERSION: ClassVar[int] = 1

    class Config(ScoringConfig["Scorer"]):
        pass

    @abc.abstractmethod
    def score(self, problem_id: int, answer: str) -> float:
        """Return the reward of `answer`; an exception counts as status "error" and is no reward."""

    def score_samples(self, problem_id: int, answers: Sequence[str], details: Sequence[Details]) -> Sequence[Any]:
        """Return a number for each answer to one problem, or a mapping of named terms with their sum as "reward"."""
        return [self.score(problem_id, answer) for answer in answers]


def score_answers(
    scorer: Scorer,
    problem_id: int,
    answers: Sequence[str],
    details: Sequence[Details],
    failures: type[BaseException] = Exception,
) -> list[Score]:
    """Return the scores of answers to one problem, in this process; `failures` that are raised are status "error"."""
    start = time.monotonic()
    try:
        checked = check_rewards(scorer.score_samples(problem_id, answers, details), len(answers))
    except failures as error:
        checked = [error] * len(answers)
    seconds = (time.monotonic() - start) / len(answers)
    return [
        Score(0.0, "error", seconds, error_text(one))
        if isinstance(one, BaseException)
        else Score(one[0], "ok", seconds, terms=tuple(one[1].items()))
        for one in checked
    ]


class TaskScorer(Scorer, abc.ABC):
    """A scorer that knows the problems."""

    class Config(Scorer.Config):
        mixture: ConfigBase[Any] = REQUIRED  # equal to the tasks that drew the problems

    def __init__(self, cfg: Config):
        self.mixture: TaskMixture = cfg.mixture.build()
        # The samples of one problem arrive together, so it is made once.
        self.problem: Callable[[int], Problem] = functools.lru_cache(maxsize=1024)(self.mixture.problem)


def check_problems(verifier: ConfigBase[Any], problems: Iterable[Problem]) -> None:
    """Refuse a verifier with a scorer that needs what these problems do not have (ConfigError)."""
    scorers = [cfg for _, cfg in walk_configs(verifier) if isinstance(cfg, ScoringConfig)]
    for problem in problems:
        for cfg in scorers:
            cfg.check_problem(problem)


class ReasoningGymScorer(TaskScorer):
    """reasoning-gym's own `score_answer`; the problem is rebuilt from its id."""

    class Config(TaskScorer.Config):
        # Least score that counts: the reward is 1 from there and 0 below; None: the reward is the score. Many of the
        # package's scorers give some credit for an answer that merely resembles the right one.
        pass_mark: float | None = None

        @override
        def confined(self) -> bool:
            return True

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._pass_mark = cfg.pass_mark

    @override
    def score(self, problem_id: int, answer: str) -> float:
        score = self.mixture.score(self.problem(problem_id), answer)
        return score if self._pass_mark is None else float(score >= self._pass_mark)


class FunctionScorer(Scorer):
    """A top-level function `(problem_id, answer) -> float`: for rewards that need no task."""

    class Config(Scorer.Config):
        function: Callable[[int, str], float] = REQUIRED

    def __init__(self, cfg: Config):
        self._function = cfg.function

    @override
    def score(self, problem_id: int, answer: str) -> float:
        return self._function(problem_id, answer)
