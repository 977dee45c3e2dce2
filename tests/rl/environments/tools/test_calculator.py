"""The calculator: exact values, and nothing else than arithmetic."""

import pytest

from rl.environments.tools.calculator import calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("655 * 171", "112005"),
        (" (3 + 4) * 5 / 2 ", "17.5"),
        ("-2**2", "-4"),
        ("2^10", "1024"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("10**30 / 3", "333333333333000000000000000000"),
        ("1e3 * 2", "2000"),
        ("2**-2", "0.25"),
        ("100 / 4", "25"),
    ],
)
def test_values(expression: str, value: str):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "3 +", "a", "f(3)", "True + 1", "'a' * 3", "[1][0]", "().__class__", "1 if 2 else 3", "3 < 4", "2**0.5"),
        *("9**9**9", "10**2000", "(10**1000) * (10**1000)", "1" * 201, "(" * 150 + "1" + ")" * 150, "1e999", "1/0"),
    ],
)
def test_refusals(expression: str):
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculate(expression)
