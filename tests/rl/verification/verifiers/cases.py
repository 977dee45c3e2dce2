"""Rows with right and wrong answers for each verifier of the package, and mutants of code."""

import random
import re
from collections.abc import Callable, Iterator

from rl.verification.scorers import Scorer
from rl.verification.verifiers.code import CodeVerifier
from rl.verification.verifiers.math import MathVerifier
from rl.verification.verifiers.self_test import Case, Rows, case_of
from rl.verification.verifiers.text import ExactMatch, JsonMatch, RegexMatch

_MATH = (
    case_of(
        "18",
        ["18.0", "$18$", r"\boxed{18}", "The answer is 18.", "36/2", r"$\frac{36}{2}$", "9*2"],
        ["81", "-18", "1.8"],
    ),
    case_of(
        r"\frac{3}{4}",
        ["3/4", "0.75", r"\dfrac{3}{4}", r"$\frac{6}{8}$", r"\boxed{\frac{3}{4}}"],
        ["4/3", "0.7", "3", "-3/4"],
    ),
    case_of("1,234", ["1234", "$1,234$", "1234.0"], ["1.234", "1", "234", "12340"]),
    case_of(r"2\sqrt{3}", [r"$\sqrt{12}$", r"$2\sqrt{3}$", r"$\sqrt{3}\cdot 2$"], [r"$\sqrt{6}$", "2", r"$3\sqrt{2}$"]),
    case_of("[0,1)", ["$[0, 1)$", r"$\left[0,1\right)$"], ["$(0,1)$", "$[0,1]$", "$[0,2)$"]),
    case_of(r"\{1,2,3\}", [r"$\{3,2,1\}$", r"$\{1, 2, 3\}$"], [r"$\{1,2\}$", r"$\{1,2,3,4\}$", r"$\{1,2,4\}$"]),
    case_of("(1,2)", ["$(1, 2)$"], ["$(2,1)$", "$(1,2,3)$"]),
    case_of("x^2+2x+1", ["$(x+1)^2$", "$1+2x+x^2$"], ["$x^2+2x$", "$(x-1)^2$", "$y^2+2y+1$"]),
    case_of(r"10\%", [r"$10\%$", "$0.1$"], ["$1$", r"$1\%$"]),
    case_of(r"\pi/2", [r"$\frac{\pi}{2}$", r"$0.5\pi$"], [r"$\pi$", r"$\frac{\pi}{3}$"]),
    case_of("-7", ["$-7$", r"\boxed{-7}", "-14/2"], ["7", "$7$", "-77", "0"]),
    case_of(r"12\text{ cm}", ["$12$", r"$12\text{ cm}$", r"$12\mathrm{cm}$"], ["$21$", r"$1.2\text{ cm}$"]),
)
_TEXT = (
    case_of(
        "Paris", ["paris", "  Paris ", "PARIS"], ["", "Pari", "Paris, France", "not Paris", "Paris Paris", "P aris"]
    ),
    case_of("forty two", ["Forty  Two", "forty\ntwo"], ["forty", "two forty", "fortytwo", "42"]),
)
_REGEX = (
    Case({"answer": "4+2"}, ["42", " 442 "], ["4+2", "421", "x42", "42\n42", ""]),
    Case({"answer": r"(yes|no)"}, ["yes", "no"], ["yesno", "maybe", "yes or no"]),
)
_SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}, "additionalProperties": True}
_JSON = (
    case_of(
        '{"n": 1, "s": ["a", null]}',
        ['{"s": ["a", null], "n": 1}', '```json\n{"n": 1, "s": ["a", null]}\n```', '{"n":1.0,"s":["a",null]}'],
        [
            '{"n": 2, "s": ["a", null]}',
            '{"n": true, "s": ["a", null]}',
            '{"n": 1}',
            '{"n": "1", "s": ["a", null]}',
            "{n: 1}",
        ]
        + ["", "[" * 5000, '{"n": NaN, "s": ["a", null]}', '{"n": 1, "s": ["a", null], "t": 0}'],
        schema=_SCHEMA,
    ),
)
_ADD = "def add(a, b):\n    if a == 0:\n        return b\n    return 1 + add(a - 1, b)\n"
_ADD_TESTS = """
def check(candidate):
    assert candidate(2, 5) == 7
    assert candidate(5, 2) == 7
    assert candidate(0, 1) == 1
"""


def mutants_of_code(source: str, count: int, seed: int = 0) -> Iterator[str]:
    """Yield sources in which one operator, number or comparison is another; they may happen to be right still."""
    swaps = [
        (r" \+ ", " - "),
        (r" - ", " + "),
        (r" == ", " != "),
        (r" < ", " >= "),
        (r" > ", " <= "),
        (r"return ", "return not "),
    ]
    places = [(found.span(), other) for old, other in swaps for found in re.finditer(old, source)]
    random.Random(seed).shuffle(places)
    for (start, end), other in places[:count]:
        yield source[:start] + other + source[end:]


CASES: dict[str, tuple[Case, ...]] = {
    "math": _MATH,
    "exact": _TEXT,
    "regex": _REGEX,
    "json": _JSON,
    "code": (
        Case(
            {"entry_point": "add", "test": _ADD_TESTS},
            [_ADD, f"Here it is:\n```python\n{_ADD}```\n", "add = lambda a, b: sum([a, b])"],
            [
                "",
                "add",
                "def add(a, b): return 7",
                "def plus(a, b): return a + b",
                "def add(a): return a",
                *mutants_of_code(_ADD, 9),
            ],
        ),
        Case(
            {"cases": [{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "9"}]},
            ["print(int(input()) ** 2)", "n = int(input())\nprint(n * n)\n\n"],
            [
                "print(4)",
                "print(int(input()) * 2)",
                "print(input())",
                "raise SystemExit",
                "print(int(input()) ** 2); exit(1)",
            ],
        ),
    ),
}

VERIFIERS: dict[str, Callable[[Rows.Config], Scorer.Config]] = {
    "math": lambda rows: MathVerifier.Config(mixture=rows),
    "exact": lambda rows: ExactMatch.Config(mixture=rows),
    "regex": lambda rows: RegexMatch.Config(mixture=rows),
    "json": lambda rows: JsonMatch.Config(mixture=rows, schema_field="schema"),
    "code": lambda rows: CodeVerifier.Config(mixture=rows),
}
