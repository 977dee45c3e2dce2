"""Verdicts that a person has decided (`verdicts.txt`): kinds of answers, and published reports on other verifiers."""

import re
from pathlib import Path
from threading import Thread

import pytest

from rl.verification.verifiers.math import MathVerifier
from rl.verification.verifiers.self_test import Rows

VERIFIER = MathVerifier(MathVerifier.Config(mixture=Rows.Config(rows=({"question": "", "answer": "1"},))))
KINDS = re.findall(r"^\[(.+)\]\n((?:.+\n)+)", Path(__file__).with_name("verdicts.txt").read_text(), re.MULTILINE)


def wrong(lines: str) -> list[str]:
    found = []
    for line in lines.splitlines():
        answer, sign, reference = re.split(r"  (==|!=)  ", line)
        _, _, verdict = VERIFIER.explain(answer, reference)
        if verdict.equal != (sign == "=="):
            found.append(f"{line}: {verdict.reason}")
    return found


@pytest.mark.parametrize(("kind", "lines"), KINDS, ids=[kind for kind, _ in KINDS])
def test_the_kind(kind: str, lines: str):
    assert wrong(lines) == []


def test_there_are_many_verdicts_of_both_signs():
    every = "".join(lines for _, lines in KINDS)
    assert len(KINDS) >= 30 and every.count("  ==  ") >= 150 and every.count("  !=  ") >= 100


def test_threads_give_the_same_verdicts():
    """Need no timers by signals, which only main threads have: without them each verdict was 0 in verl #5635."""
    found: list[str] = []
    thread = Thread(target=lambda: found.extend(["began", *wrong(KINDS[0][1])]))
    thread.start()
    thread.join()
    assert found == ["began"]


def test_an_answer_is_never_run(tmp_path: Path):
    """Refuse Python, which some graders evaluate (verl #7603)."""
    file = tmp_path / "made"
    for text in (f"__import__('pathlib').Path('{file}').touch()", f"\\pi if open('{file}','w') else 1"):
        assert VERIFIER.judge(text, "\\pi", None) == 0.0 and VERIFIER.judge(f"\\boxed{{{text}}}", "7", None) == 0.0
    assert not file.exists()


def test_a_percentage_is_a_number_where_the_question_asks_for_one():
    assert VERIFIER.explain(r"\boxed{25\%}", "25", "What percent of 8 is 2?")[2].equal
    assert VERIFIER.explain("25 percent", "25", "Write 1/4 as a percentage.")[2].equal
    assert not VERIFIER.explain(r"\boxed{25\%}", "25", "What is the price after a discount of 20%?")[2].equal
    assert not VERIFIER.explain(r"\boxed{25\%}", "25")[2].equal
    assert not VERIFIER.explain(r"\boxed{2.5\%}", "25", "What percent of 8 is 2?")[2].equal
