"""Exact comparison of simple mathematics: what it says is what math-verify says, and it is silent on all else."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from rl.verification.verifiers.exact.comparison import same_value
from rl.verification.verifiers.math import MathVerifier
from rl.verification.verifiers.self_test import CASES, Rows

NUMBERS = (
    "0",
    "7",
    "-3",
    "12",
    r"\frac{3}{4}",
    r"\frac{6}{8}",
    "3/4",
    r"\sqrt{12}",
    r"2\sqrt{3}",
    r"\frac{1}{\sqrt{2}}",
)
SUMS = ("(x+1)^2", "x^2+2x+1", "x^2 + 2x", "(x-1)(x+1)", "x^2-1", "xy-yx+1", r"2\pi", r"\pi\cdot 2", "0.5x", "2^{-1}x")
AROUND = ("{}", "${}$", r"\boxed{{{}}}", r"So we find $\boxed{{{}}}$.", "It is ${}$ then", r"\[ {} \]")
PAIRS = (
    *((r"\frac{6}{8}", "3/4"), (r"\sqrt{12}", r"2\sqrt{3}"), ("x^2+2x+1", "(x+1)^2"), (r"\pi\cdot 2", r"2\pi")),
    *(
        ("2^{-1}x", "0.5x"),
        ("(0, 7)", "(0,7)"),
        (r"\{2, 1\}", r"\{1,2\}"),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    ),
    *(
        (r"\sqrt{3}", r"2\sqrt{3}"),
        ("x^2+2x", "(x+1)^2"),
        ("[0,7)", "(0,7]"),
        (r"\{1, 2\}", r"\{1,2,3\}"),
        ("(1,2,3)", "(1,2)"),
    ),
)


def check(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    library: Any = MathVerifier.Config(mixture=Rows.Config(rows=())).build()
    said: list[bool] = []
    for number, (given, wanted) in enumerate(pairs):
        given = AROUND[number % len(AROUND)].format(given)
        if (same := same_value(given, wanted)) is None:
            continue
        said.append(same)
        expected = library._verify(library._read(wanted), library._read(given), float_rounding=6, timeout_seconds=None)
        assert same == expected, (given, wanted)
    return said


def lists(rng: random.Random) -> str:
    opening, closing = rng.choice(["()", "[]", "[)", "(]", (r"\{", r"\}")])
    return f"{opening}{', '.join(rng.sample(NUMBERS, rng.choice([2, 2, 3])))}{closing}"


@pytest.mark.full
def test_what_it_says_is_what_math_verify_says():
    assert check(PAIRS) == [True] * 8 + [False] * 5
    rng = random.Random(0)
    pairs = [(given, wanted) for given, wanted in itertools.product((*NUMBERS, *SUMS), repeat=2) if given != wanted]
    pairs += [(lists(rng), lists(rng)) for _ in range(100)]
    pairs += [(one.replace(", ", ","), one) for one in (lists(rng) for _ in range(50))]
    assert len(check(pairs)) > 300


def test_most_cases_of_the_self_test_need_no_library():
    said = [same_value(answer, case.row["answer"]) for case in CASES["math"] for answer in (*case.right, *case.wrong)]
    assert sum(one is not None for one in said) > 0.7 * len(said)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (r"1\frac{1}{2}", r"\frac{3}{2}"),  # a product, or a mixed number
        ("(1,234)", "1234"),  # a thousand, or two numbers
        ("1/2x", "x/2"),
        ("2 3", "6"),
        (r"10\%", "0.1"),
        (r"$10$ percent", "10"),
        (r"\boxed{3} \%", "3"),
        (r"the final answer is $4$, not \boxed{3}", "3"),
        (r"\boxed{3} or \boxed{4}", "3"),
        ("We have 5 of $3$", "3"),
        ("5m", "5"),
        (r"5\text{ m}", "5"),
        ("x", "x+0"),
        ("f(x)", "fx"),
        ("e^2", "e^2+0"),
        ("0.3333333", r"\frac{1}{3}+0"),
        (r"\{\frac{99999999}{100000000}, 2\}", r"\{1, 2\}"),  # nearer than the library's rounding
        (r"(2,1)", "(3,1)"),  # empty intervals
        (r"\frac{1}{0}", "1"),
        ("x^{99}", "x"),
        ("9" * 500, "9"),
        (r"\sqrt{x^2}", "x+0"),
        ("((((", "1"),
        (r"\boxed{", "1"),
    ],
)
def test_it_is_silent_where_a_text_may_mean_something_else(given: str, wanted: str):
    assert same_value(given, wanted) is None


def test_values_are_told_apart():
    """The library agrees: see the slow test above."""
    assert [same_value(*pair) for pair in PAIRS] == [True] * 8 + [False] * 5


def test_letters_that_may_have_other_names_are_left_to_the_library():
    assert same_value("x+1", "1+x") is True
    assert same_value("x+1", "1+x", names=False) is None
    assert same_value("2+2", "5-1", names=False) is True
