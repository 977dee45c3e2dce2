"""Rewards of the user's own: signatures, terms, groups, and every way in which one can go wrong."""

import asyncio
import decimal
import math
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError, from_text, to_text
from mesh.errors import UserError
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.sources import RowFiles
from rl.tasks.rows.task_rows import TaskRows
from rl.verification.inline import InlineVerifier
from rl.verification.rewards import NotAReward, number
from rl.verification.scorers import check_problems
from rl.verification.service import Verifier
from rl.verification.verifiers.reward import Function, Reward, reward
from rl.verification.verifiers.self_test import Rows
from rl.verification.verifiers.terms import Format, Length, Term, Verified
from rl.verification.verifiers.text import ExactMatch

ROWS = Rows.Config(
    rows=({"question": "2+2?", "answer": "4", "level": 3}, {"question": "3+3?", "answer": "6", "level": 5})
)


def right(answer: str, reference: str) -> float:
    return float(answer == reference)


def row_and_rollout(answer: str, row: dict[str, Any], level: int, tokens: list[int], finish_reason: str) -> float:
    return len(tokens) + level + (finish_reason == "stop") + len(answer) + len(row)


def named(answer: str) -> dict[str, float]:
    return {"digits": float(sum(c.isdigit() for c in answer)), "size": 0.5}


def rank(answers: list[str], tokens: list[list[int]]) -> list[float]:
    return [sorted(answers).index(answer) + len(own) / 10 for answer, own in zip(answers, tokens, strict=True)]


async def slow(answer: str) -> float:
    await asyncio.sleep(0.2)
    return float(len(answer))


def misbehave(answer: str) -> Any:
    if answer == "raise":
        raise RuntimeError("no key")
    if answer == "hang":
        time.sleep(100)
    return {"nan": math.nan, "text": "1", "none": None, "list": [1.0], "unnamed": {1: 1.0}, "inf": {"a": math.inf}}.get(
        answer, 1.0
    )


def short_list(answers: list[str]) -> list[float]:
    return [1.0]


def no_list(answers: list[str]) -> Any:
    return "11"


def no_answer(row: dict[str, Any]) -> float:
    return 1.0


def unknown_column(answer: str, colour: str) -> float:
    return 1.0


def config(*terms: Term.Config) -> Reward.Config:
    return Reward.Config(mixture=ROWS, terms=terms)


def scores(cfg: Reward.Config, ids: list[int], answers: list[str], details: Any = None) -> list[Any]:
    return InlineVerifier.Config(scorer=cfg).build().score(ids, answers, details)


def test_a_function_gets_what_it_names():
    assert [s.reward for s in scores(reward(right, ROWS), [0, 1], ["4", "4"])] == [1.0, 0.0]
    cfg = reward(row_and_rollout, ROWS)
    assert cfg.wants() == {"tokens", "finish_reason"}
    details = [{"tokens": [1, 2], "finish_reason": "stop"}, {"tokens": [], "finish_reason": "length"}]
    assert [s.reward for s in scores(cfg, [0, 1], ["a", "b"], details)] == [2 + 3 + 1 + 1 + 3, 0 + 5 + 0 + 1 + 3]


def test_terms_are_weighted_gated_and_named():
    cfg = config(
        Function.Config(function=right, weight=2.0),
        Function.Config(function=named, weight=-1.0),
        Length.Config(free=2, most=6, weight=0.5),
        Format.Config(pattern=r"\d+", gate=True, name="is a number"),
        Verified.Config(verifier=ExactMatch.Config(mixture=ROWS)),
    )
    details = [{"tokens": [0] * n, "finish_reason": "stop"} for n in (1, 4)]
    first, second = scores(cfg, [0, 0], ["4", "4 "], details)
    assert first.reward == 2.0 - 1.5 + 0.5 + 1.0
    assert dict(first.terms) == {
        "right": 1.0, "named": 1.5, "digits": 1.0, "size": 0.5, "length": 1.0, "is a number": 1.0, "exactmatch": 1.0,
    }  # fmt: skip
    assert second.reward == 0.0  # closed by the gate
    assert dict(second.terms)["length"] == 0.5


@pytest.mark.slow
def test_a_group_is_seen_whole():
    cfg = reward(rank, ROWS)
    assert cfg.wants() == {"group", "tokens"}
    details = [{"tokens": [1] * n} for n in (1, 2, 3)]
    with Verifier.Config(scorer=cfg, processes=1).build() as verifier:
        found = verifier.score([0, 0, 1], ["b", "a", "c"], details)
    assert [s.reward for s in found] == [1.1, 0.2, 0.3]


def test_an_asynchronous_function_waits_for_a_group_at_once():
    began = time.monotonic()
    assert [s.reward for s in scores(reward(slow, ROWS), [0] * 20, ["ab"] * 20)] == [2.0] * 20
    assert time.monotonic() - began < 2.0


@pytest.mark.slow
def test_whatever_is_no_reward_is_counted_and_named():
    bad = ["raise", "nan", "text", "none", "list", "unnamed", "inf", "hang"]
    with Verifier.Config(scorer=reward(misbehave, ROWS), processes=1, deadline_s=0.5).build() as verifier:
        found = verifier.score([0] * 9, [*bad, "fine"])
        stats = verifier.stats()
    assert [s.status for s in found] == ["error"] * 7 + ["timeout", "ok"]
    assert [s.reward for s in found] == [0.0] * 8 + [1.0]
    assert "RuntimeError: no key" in found[0].error
    assert "misbehave returned nan; expected a finite number" in found[1].error
    assert "returned str '1'" in found[2].error and "returned NoneType None" in found[3].error
    assert (stats["error"], stats["timeout"], stats["ok"]) == (7, 1, 1)


@pytest.mark.parametrize(
    ("function", "message"), [(short_list, "1 rewards for 2 answers"), (no_list, "expected a list")]
)
def test_a_list_of_the_wrong_length_is_named(function: Any, message: str):
    found = scores(reward(function, ROWS), [0, 0], ["a", "b"])
    assert {s.status for s in found} == {"error"}
    assert message in found[0].error


def test_signatures_are_checked_before_anything_runs():
    with pytest.raises(ConfigError, match=r"function: expected a function with a parameter `answer`"):
        reward(no_answer, ROWS).check()
    assert "has not; it has row, question" in scores(reward(unknown_column, ROWS), [0], ["a"])[0].error
    with pytest.raises(ConfigError, match="terms of different names"):
        config(Function.Config(function=right), Function.Config(function=right)).check()
    with pytest.raises(ConfigError, match="a term that is no gate"):
        config(Function.Config(function=right, gate=True)).check()


def test_what_no_row_has_is_refused_before_a_run():
    def misspelt(answer: str, refernce: str, level: int) -> float:
        return float(answer == refernce) * level

    problem = ROWS.build().problem(0)
    wrong = Verifier.Config(scorer=Reward.Config(mixture=ROWS, terms=(Function.Config(function=misspelt),)))
    with pytest.raises(ConfigError, match=r"function: expected .* no refernce; did you mean 'reference'"):
        check_problems(wrong, [problem])
    exact = Verifier.Config(scorer=ExactMatch.Config(mixture=ROWS, field="levels"))
    with pytest.raises(ConfigError, match=r"field: expected a field that the rows .* have; did you mean 'level'"):
        check_problems(exact, [problem])
    fine = Reward.Config(mixture=ROWS, terms=(Function.Config(function=row_and_rollout),))
    check_problems(Verifier.Config(scorer=fine), [problem])


def test_variables_of_tasks_and_terms_are_inherited():
    files = RowFiles.Config(files="$SOME_DATA/rows.jsonl")
    tasks = TaskMixture.Config(families=(TaskRows.Config(rows=files, label="rows"),))
    term = Function.Config(function=right, inherits=("SOME_KEY",))
    assert Reward.Config(mixture=tasks, terms=(term,)).environment() == ("SOME_DATA", "SOME_KEY")
    assert ExactMatch.Config(mixture=tasks).environment() == ("SOME_DATA",)


def test_a_file_is_named_by_its_place(tmp_path: Path):
    place = tmp_path / "my_own_reward.py"
    place.write_text("def score(answer, reference):\n    return float(answer == reference)\n")
    cfg = reward(f"{place}:score", ROWS)
    assert from_text(to_text(cfg)) == cfg
    with Verifier.Config(scorer=cfg, processes=1).build() as verifier:
        assert [s.reward for s in verifier.score([0, 1], ["4", "4"])] == [1.0, 0.0]
    with pytest.raises(UserError, match=r"is no function: my_own_reward.py has score"):
        reward(f"{place}:points", ROWS)
    with pytest.raises(UserError, match="no file"):
        reward(f"{tmp_path}/none.py:score", ROWS)


def sorts_its_row(answer: str, row: dict[str, Any], level: int) -> float:
    """Change what it is given, as code that pops and sorts does."""
    row["answer"] = answer
    row.clear()
    return float(level)


async def refuses_one(answer: str, reference: str) -> float:
    if answer == "bad":
        raise RuntimeError("cannot read it")
    return float(answer == reference)


def refuses_one_too(answer: str) -> float:
    if answer == "bad":
        raise ZeroDivisionError
    return 1.0


def test_a_function_that_changes_its_row_changes_no_later_reward():
    level = scores(config(Function.Config(function=sorts_its_row)), [0], ["x"])[0].reward
    found = scores(config(Function.Config(function=sorts_its_row), Function.Config(function=right)), [0] * 3, ["1"] * 3)
    assert [one.status for one in found] == ["ok"] * 3
    assert [dict(one.terms)["sorts_its_row"] for one in found] == [level] * 3


@pytest.mark.parametrize("function", [refuses_one, refuses_one_too])
def test_an_error_of_one_answer_is_not_that_of_its_group(function: Any):
    terms = (Function.Config(function=function, name="one"), Function.Config(function=rank, weight=0.0))
    found = scores(config(*terms), [0] * 3, ["a", "bad", "c"], [{"tokens": [1], "finish_reason": "stop"}] * 3)
    assert [one.status for one in found] == ["ok", "error", "ok"]
    assert found[1].error.startswith(("RuntimeError: cannot read it", "ZeroDivisionError"))


NUMBERS = {
    "decimal": decimal.Decimal("0.5"),
    "numpy scalar": np.float32(0.5),
    "numpy 0-d": np.array(0.5),
    "numpy one element": np.array([0.5]),
    "numpy one element deep": np.array([[0.5]]),
    "jax 0-d": jnp.asarray(0.5),
    "jax bfloat16": jnp.asarray([0.5], jnp.bfloat16),
    "like torch": type("Tensor", (), {"__array__": lambda self, dtype=None, copy=None: np.array([0.5])})(),
}


def number_of_kind(answer: str) -> Any:
    return NUMBERS[answer]


def array_for_a_group(answers: list[str]) -> Any:
    return np.linspace(0.0, 1.0, len(answers), dtype=np.float32)


def test_numbers_of_every_kind_are_rewards():
    found = scores(config(Function.Config(function=number_of_kind)), [0] * len(NUMBERS), list(NUMBERS))
    assert {kind: (one.status, one.reward) for kind, one in zip(NUMBERS, found, strict=True)} == dict.fromkeys(
        NUMBERS, ("ok", 0.5)
    )
    found = scores(config(Function.Config(function=array_for_a_group)), [0] * 3, ["a", "b", "c"])
    assert [one.reward for one in found] == [0.0, 0.5, 1.0]
    with pytest.raises(NotAReward, match=r"returned ndarray array\(\[0.5, 0.5\]\); expected a finite number"):
        number(np.array([0.5, 0.5]))
