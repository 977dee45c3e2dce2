"""Values of expressions: those that are equal, those that are not, and what is read at all."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.verification.verifiers.exact.arithmetic import Unclear
from rl.verification.verifiers.exact.expression import evaluate, same_values

# Each row has one value, and no two rows the same.
VALUES = (
    ("0", r"\sqrt{2}-\sqrt{2}", r"(\sqrt{2}+\sqrt{3})^2-5-2\sqrt{6}"),
    (r"\frac{3}{4}", r"\frac{6}{8}", "3/4", r"\frac34", "0.75", r"{3 \over 4}", r"1-\frac14"),
    (r"\sqrt{12}", r"2\sqrt{3}", r"\frac{6}{\sqrt3}", "12^{1/2}", r"2\cdot 3^{\frac12}"),
    ("-2", r"\sqrt[3]{-8}", "i^2-1", r"\log_2 \frac14", r"\lfloor -1.5 \rfloor", r"2\cos 180^\circ", "-|2|"),
    ("120", "5!", r"\binom{10}{3}", r"2^3\cdot 15", r"\operatorname{lcm}(24, 40)", "10^2+20"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", r"\sin 45^\circ", r"\cos \frac{\pi}{4}"),
    ("e^{i\\pi/3}", r"\frac{1+i\sqrt{3}}{2}", r"\frac12+\frac{\sqrt3}{2}i"),
    (r"1\frac{1}{2}\pi", r"\frac{3\pi}{2}", r"\frac32\pi", r"1.5\pi"),
    (r"\frac{1}{2^{99}}", "2^{-99}"),
    (r"\frac{1}{2^{98}}", "2^{-98}"),
    ("x^2+2x+1", "(x+1)^2", "x(x+2)+1", r"x^2 + x\cdot 2 + 1"),
    ("x+1", "1+x", r"\frac{x^2-1}{x-1}"),
    ("|x|", r"\sqrt{x^2}"),
    ("x", r"\frac{xy}{y}", r"\ln e^x", "x_1+x-x_1"),
    (r"\tan^2 y+1", r"\sec^2(y)", r"\frac{1}{\cos^2 y}"),
    ("abc", "cba", r"\frac{a^2bc}{a}"),
    (r"\sqrt{ab}", r"\sqrt{a}\sqrt{b}", "(ab)^{1/2}"),
    ("(-1)^n", "(-1)^{n+2}", "(-1)^{-n}"),
    ("(n+1)!", r"(n+1)\cdot n!"),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    (r"\ln 2x", r"\ln 2+\ln x", r"\ln(2x)"),
    (r"\log 2", r"\log_{10} 2"),
    ("2^{n}", "2^{n+1}/2", "4^{n/2}"),
)


def same(one: str, other: str) -> bool:
    return any(same_values(evaluate(one, True, base), evaluate(other, True, base), 6) for base in (0, 10))


def test_one_value_has_many_forms():
    assert [pair for row in VALUES for pair in itertools.permutations(row, 2) if not same(*pair)] == []


def test_other_values_are_told_apart():
    pairs = itertools.combinations(VALUES, 2)
    assert [(a, b) for one, other in pairs for a, b in itertools.product(one, other) if same(a, b)] == []


@pytest.mark.parametrize(
    "text",
    [
        "1/2x",
        "2 3",
        "f(x)",
        "P(x)",
        "2^3^4",
        "3!!",
        "3--4",
        "x +",
        "(",
        "((((1",
        r"\frac{1}{0}",
        r"\sqrt{",
        "1011_2",
        "x'",
        "",
    ]
    + [
        r"\infty",
        r"\int x",
        "1,2",
        r"\text{if } x",
        "9^{9^{9^9}}",
        "3001!",
        "2^{99999}",
        "x^{3000}" * 40,
        "1+" * 300 + "1",
    ]
    + [r"\exp(\exp(\exp(9)))", "3000!" * 2, "(" * 13 + "1" + ")" * 13, r"\sin^{-1} 2x^{", "3{,}5"],
)
def test_what_may_mean_two_things_or_is_too_large_is_not_read(text: str):
    with pytest.raises(Unclear):
        evaluate(text)


def test_letters_may_have_other_names():
    assert same_values(evaluate("x^2+y", False), evaluate("a^2+b", False), 6)
    assert not same_values(evaluate("x^2+y", False), evaluate("a+b^2", False), 6)


@given(st.integers(-99, 99), st.integers(1, 99), st.integers(-99, 99), st.integers(1, 99))
def test_sums_of_fractions_are_exact(a: int, b: int, c: int, d: int):
    total = evaluate(rf"\frac{{{a}}}{{{b}}} + ({c})/{d}").points[0]
    assert total == evaluate(rf"\frac{{{a * d + c * b}}}{{{b * d}}}").points[0]
    assert total != evaluate(rf"\frac{{{a * d + c * b}}}{{{b * d}}} + \frac{{1}}{{2^{{200}}}}").points[0]


@pytest.mark.full
def test_math_verify_agrees_on_what_is_equal():
    import math_verify

    parse: Any = math_verify.parse

    rng = random.Random(0)
    numbers = ("7", "-3", r"\frac{3}{4}", r"\sqrt{12}", r"2\sqrt{3}", r"\frac{1}{\sqrt{2}}", r"\pi", "x", "y", "x^2")
    forms = ("{a}+({b})", "{a}-({b})", r"{a}\cdot({b})", r"\frac{{{a}}}{{{b}}}", "({a})(({b})+1)", "({a}+({b}))^2")
    texts = [rng.choice(forms).format(a=rng.choice(numbers), b=rng.choice(numbers)) for _ in range(120)]
    checked = 0
    for one, other in itertools.combinations(texts, 2):
        if (equal := same(one, other)) or rng.random() < 0.02:
            read = [parse(f"${text}$", parsing_timeout=None) for text in (one, other)]
            assert math_verify.verify(*read, timeout_seconds=None) == equal, (one, other)
            checked += 1
    assert checked > 150
