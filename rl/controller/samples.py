"""Answers of a run as it trains, for people to read: the first of some updates, not chosen."""

from collections.abc import Callable, Sequence
from pathlib import Path

from axlearn_like.run.clock import REAL
from axlearn_like.run.events import EventLog
from axlearn_like.tokenizers.protocol import Tokenizer, answer_text
from rl.evaluation.evaluator import sample_row
from rl.protocol.messages import Group, Problem

_GROUPS = 2  # answers of an update, each to another problem
_EVERY = 5.0  # seconds between updates that are sampled
_SHARE = 100  # later a hundredth of the time so far: a long run has hundreds of samples, not a file without end
_MOST = 4000  # characters of a question or an answer


class SampleLog:
    """Appender to `rollouts/rl.jsonl` of a run directory."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, clock: Callable[[], float] = REAL):
        """`folder`: the run's folder of samples; the first update is sampled in any case."""
        self._log, self._tokenizer, self._clock = EventLog(folder / "rl.jsonl"), tokenizer, clock
        self._began, self._next = clock(), clock()

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Append answers of the groups of update `step`, unless others were sampled just before."""
        if (now := self._clock()) < self._next:
            return
        self._next = now + max(_EVERY, (now - self._began) / _SHARE)
        for group in groups[:_GROUPS]:
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                if not rollout.demonstration:
                    question = self._text(group.prompt.tokens.tolist())
                    problem = Problem(group.prompt.id, group.prompt.family, question, "", {})
                    row = sample_row(problem, rollout, self._text(rollout.tokens.tolist()), score)
                    self._log.append("controller", "sample", phase="rl", step=step, **row)
                    break

    def _text(self, tokens: list[int]) -> str:
        text = answer_text(self._tokenizer, tokens)
        return text if len(text) <= _MOST else f"{text[:_MOST]} ({len(text) - _MOST} more characters)"
