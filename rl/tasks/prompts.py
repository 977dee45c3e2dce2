"""Prompts of problems: within the length and the time that a run allows, or left out by a rule; and their check."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, override

import numpy as np

from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError
from rl.protocol.messages import Problem, Prompt
from rl.tasks.admission import Admission
from rl.tasks.encoding import encode_problem
from rl.tasks.mixture import TaskMixture
from rl.tasks.skipped import SkippedProblems
from rl.tasks.time_limit import TookTooLong, limited

LongPrompts = Literal["skip", "truncate", "refuse"]
_KEPT = 0.25  # share of the time limit from which a used problem is recorded, so that it is always used
_MOST = 0.5  # share of examined problems that may be left out for their length


class PromptMaker(Admission):
    """Maker of problems within a time limit, and of prompts within a length. Not thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_prompt_tokens: int | None = None,
        long_prompts: LongPrompts = "skip",
        seconds: float = 0.0,
        skipped: SkippedProblems | None = None,
    ):
        """Store the rules.

        Args:
            max_prompt_tokens: tokens; None: any length.
            long_prompts: leave longer ones out, keep their last `max_prompt_tokens` tokens, or raise.
            seconds: seconds that a problem may take to make; 0: no limit.
            skipped: where what is left out is recorded.
        """
        self.skipped = SkippedProblems() if skipped is None else skipped
        self._tokenizer, self._max_prompt_tokens, self._long = tokenizer, max_prompt_tokens, long_prompts
        self._seconds = seconds
        self._longest: dict[str, int] = {}  # family -> tokens of its longest prompt beyond max_prompt_tokens

    @override
    def make(self, problem_id: int, family: str, make: Callable[[], Problem]) -> Problem | None:
        known = self.skipped.verdict(problem_id)
        if known == "slow":
            return None
        began = time.monotonic()
        try:
            problem = limited(make, 0.0 if known == "kept" else self._seconds)
            if (took := time.monotonic() - began) > _KEPT * self._seconds > 0:
                self.skipped.add(problem_id, family, "kept", f"{took:.1f} s")
            return problem
        except TookTooLong:
            self.skipped.add(problem_id, family, "slow", f"more than {self._seconds:g} s")
        except Exception as error:  # any library that makes problems may raise
            self.skipped.add(problem_id, family, "raised", f"{type(error).__name__}: {error}")
        return None

    @override
    def fits(self, problem: Problem) -> bool:
        length = len(encode_problem(problem, self._tokenizer))
        if self._max_prompt_tokens is None or length <= self._max_prompt_tokens:
            return True
        if self._long == "refuse":
            raise self._too_long(problem, length)
        self._longest[problem.family] = max(length, self._longest.get(problem.family, 0))
        reason = "long" if self._long == "skip" else "truncated"
        self.skipped.add(problem.id, problem.family, reason, f"{length} tokens")
        return self._long == "truncate"

    @override
    def too_few(self, family: str) -> str:
        count = self.skipped.counts().get(family, {}).get("long", 0)
        if not count:
            return ""
        longest = self._longest.get(family, 0)
        limit = f"max_prompt_tokens={self._max_prompt_tokens}"
        return f"prompts of {count} are longer than {limit} (the longest has {longest} tokens)"

    def prompt(self, problem: Problem) -> Prompt:
        """Return the prompt of a problem, of one to truncate its end, which holds the opening of the answer.

        Raises:
            UserError: it is too long, of tasks that know no admission.
        """
        tokens: np.ndarray = encode_problem(problem, self._tokenizer)
        if self._max_prompt_tokens is not None and len(tokens) > self._max_prompt_tokens:
            if self._long != "truncate":
                raise self._too_long(problem, len(tokens))
            tokens = tokens[-self._max_prompt_tokens :]
        return Prompt(problem.id, problem.family, tokens)

    def _too_long(self, problem: Problem, length: int) -> UserError:
        return UserError(
            f"problem {problem.id} of family {problem.family!r} has {length} prompt tokens; max_prompt_tokens is "
            f"{self._max_prompt_tokens} (controller.long_prompts may skip or truncate such)"
        )


def check_prompts(
    tasks: TaskMixture, maker: PromptMaker, *, max_prompt_tokens: int, num_train: int, per_family: int
) -> None:
    """Refuse problems of which most are too long, and held-out questions that are trained on.

    Args:
        maker: function that makes one of prompts; knows what is left out.
        max_prompt_tokens: tokens that a prompt may have.
        num_train: the first training problems, which are looked at.
        per_family: held-out problems of each family; 0: there is no evaluation.

    Raises:
        UserError: names the family and the lengths.
    """
    tasks.admission = maker
    _check_lengths((tasks.train(index) for index in range(num_train)), maker, max_prompt_tokens)
    if per_family:
        tasks.check_disjoint(num_train, per_family)
        _check_lengths(iter(tasks.heldout(per_family)), maker, max_prompt_tokens)


def _check_lengths(problems: Iterator[Problem], maker: PromptMaker, max_prompt_tokens: int) -> None:
    looked: Counter[str] = Counter()
    try:
        looked.update(maker.prompt(problem).family for problem in problems)
    except UserError:
        _check_shares(looked, maker, max_prompt_tokens)  # says more
        raise
    _check_shares(looked, maker, max_prompt_tokens)


def _check_shares(looked: Mapping[str, int], maker: PromptMaker, max_prompt_tokens: int) -> None:
    for family, reasons in maker.skipped.counts().items():
        long, fit = reasons.get("long", 0), looked.get(family, 0)
        if long > _MOST * (long + fit):
            raise UserError(
                f"of {long + fit} problems of family {family!r}, {long} have more than "
                f"max_prompt_tokens={max_prompt_tokens} prompt tokens and would be left out; "
                "raise max_prompt_tokens, or set controller.long_prompts='truncate'"
            )
