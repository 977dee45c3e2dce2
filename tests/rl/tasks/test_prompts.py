"""Problems that raise, take too long or are too long are left out by rule and counted, and by a resumed run too."""

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from axlearn_like.run.metrics import read_rows
from axlearn_like.tokenizers.bytes import ByteTokenizer
from mesh.errors import UserError
from rl.tasks import prompts
from rl.tasks.mixture import TaskMixture
from rl.tasks.prompts import PromptMaker, check_prompts
from rl.tasks.skipped import SkippedProblems, skipped_text
from rl.tasks.time_limit import TookTooLong, limited
from tests.rl.tasks.numbers import Numbers

TOKENIZER = ByteTokenizer.Config().build()


def mixture(maker: PromptMaker | None = None, **fields: Any) -> TaskMixture:
    tasks = TaskMixture.Config(families=(Numbers.Config(label="numbers", **fields),)).build()
    if maker is not None:
        tasks.admission = maker
    return tasks


def plan(tasks: TaskMixture, count: int = 5) -> list[int]:
    return [tasks.train(index).id for index in range(count)]


PLAIN = plan(mixture())  # one of 0..3, one of 4..7, ...


def test_the_next_candidate_takes_the_place_of_one_that_is_left_out_and_no_other_place_changes(tmp_path: Path):
    first, second, third, *others = PLAIN
    fields: dict[str, Any] = {"bad": (first,), "long": (second,), "endless": (third,)}
    log = SkippedProblems(tmp_path / "skipped.jsonl")
    maker = PromptMaker(TOKENIZER, skipped=log, max_prompt_tokens=20, seconds=0.5)
    found = plan(mixture(maker, **fields))
    assert found[3:] == others and all(a != b for a, b in zip(found[:3], PLAIN, strict=False))
    assert [number // 4 for number in found] == [0, 1, 2, 3, 4]
    assert log.counts() == {"numbers": {"long": 1, "raised": 1, "slow": 1}}
    assert log.figures() == {"problems_long": 1.0, "problems_raised": 1.0, "problems_slow": 1.0}
    rows = {row["problem"]: (row["event"], row["what"]) for row in read_rows(tmp_path / "skipped.jsonl")}
    assert rows == {
        first: ("raised", f"AssertionError: {first} is bad"),
        second: ("long", "103 tokens"),
        third: ("slow", "more than 0.5 s"),
    }
    assert skipped_text(log.counts())[1] == "1 problem of numbers left out: raised when they were made"
    # Resumed, the slow one is not tried again, and nothing is counted twice.
    resumed = SkippedProblems(tmp_path / "skipped.jsonl")
    tasks = mixture(PromptMaker(TOKENIZER, skipped=resumed, max_prompt_tokens=20, seconds=1e6), **fields)
    assert plan(tasks) == found and resumed.counts() == log.counts()


def test_a_slow_problem_that_was_used_is_used_by_a_slower_machine_too(tmp_path: Path, monkeypatch: Any):
    clock = iter([0.0, 6.0, 100.0, 101.0])  # seconds at the beginnings and ends of problems
    monkeypatch.setattr(prompts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    log = SkippedProblems(tmp_path / "skipped.jsonl")
    maker = PromptMaker(TOKENIZER, seconds=20.0, skipped=log)
    problem = mixture().train(0)
    assert maker.make(7, "f", lambda: problem) is problem and maker.make(8, "f", lambda: problem) is problem
    assert log.counts() == {} and (log.verdict(7), log.verdict(8)) == ("kept", None)  # nothing is left out
    monkeypatch.undo()

    def slow() -> Any:
        time.sleep(0.05)
        return problem

    again = PromptMaker(TOKENIZER, seconds=0.01, skipped=SkippedProblems(tmp_path / "skipped.jsonl"))
    assert again.make(7, "f", slow) is problem and again.make(8, "f", slow) is None


def test_long_prompts_are_truncated_to_their_end_or_refused_by_rule():
    first = PLAIN[0]
    truncating = PromptMaker(TOKENIZER, max_prompt_tokens=10, long_prompts="truncate")
    problem = mixture(truncating, long=(first,)).train(0)
    assert problem.id == first and TOKENIZER.decode(truncating.prompt(problem).tokens) == "word word\n"
    assert truncating.skipped.counts() == {"numbers": {"truncated": 1}}
    with pytest.raises(
        UserError, match=rf"problem {first} of family 'numbers' has 103 prompt tokens; max_prompt_tokens is 10"
    ):
        mixture(PromptMaker(TOKENIZER, max_prompt_tokens=10, long_prompts="refuse"), long=(first,)).train(0)


def test_a_family_of_which_nothing_can_be_used_says_so():
    with pytest.raises(UserError, match=r"'numbers': of the 4 items for training problem 0, \d are held out"):
        mixture(PromptMaker(TOKENIZER), bad=(0, 1, 2, 3)).train(0)


def test_check_refuses_lengths_that_leave_out_most_problems():
    maker = PromptMaker(TOKENIZER, max_prompt_tokens=20)
    tasks = mixture(maker, long=tuple(n for n in range(100) if n % 4 != 3))
    with pytest.raises(
        UserError, match=r"of \d+ problems of family 'numbers', \d+ have more than max_prompt_tokens=20"
    ):
        check_prompts(tasks, maker, max_prompt_tokens=20, num_train=10, per_family=0)


def test_an_endless_loop_ends_at_its_limit_and_later_code_is_not_interrupted():
    def forever() -> None:
        while True:
            pass

    for _ in range(3):
        with pytest.raises(TookTooLong):
            limited(forever, 0.02)
    for _ in range(50):
        with contextlib.suppress(TookTooLong):
            limited(lambda: 1, 1e-3)  # the timer and the return race
    assert sum(1 for _ in range(100_000)) == 100_000
