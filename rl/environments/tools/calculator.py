"""A calculator: exact arithmetic on expressions, which are parsed and never run."""

import ast
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import override

from rl.environments.tools.tool import Tool

_LONGEST = 200  # characters of an expression
_BITS = 4096  # limit of an intermediate number
_SIGNIFICANT = 12  # digits of a result that is no finite decimal

_Number = Fraction
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: lambda a, b: a % b,
}


class Calculator(Tool):
    """`calculator(expression)`: + - * / // % ** and parentheses on numbers of any size, exactly."""

    class Config(Tool.Config):
        name: str = "calculator"
        description: str = "Evaluate an arithmetic expression such as (3 + 4) * 5 / 2."
        pure: bool = True

    def __init__(self, cfg: Config):
        del cfg

    @override
    def call(self, expression: str) -> str:
        return calculate(expression)


def calculate(expression: str) -> str:
    """Return the value: an integer, a decimal, or its first digits (ValueError: no arithmetic, or too large)."""
    if len(expression) > _LONGEST:
        raise ValueError(f"{len(expression)} characters; expected {_LONGEST} at most")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    return _text(_value(tree.body))


def _value(node: ast.expr) -> _Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(Fraction(str(value)))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _value(operand)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _BINARY:
            return _bounded(_BINARY[type(operator)](_value(left), _value(right)))
        case _:
            raise ValueError("expected numbers, + - * / // % ** and parentheses")


def _power(base: _Number, exponent: _Number) -> _Number:
    if exponent.denominator != 1:
        raise ValueError("the exponent is not an integer")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(int(exponent)) > _BITS:
        raise ValueError("the result is too large")
    return base ** int(exponent)


def _bounded(value: _Number) -> _Number:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
        raise ValueError("the result is too large")
    return value


def _text(value: _Number) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    rest, digits = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest, count = rest // prime, count + 1
        digits = max(digits, count)
    with localcontext() as context:
        context.prec = _SIGNIFICANT if rest > 1 or digits > _SIGNIFICANT else _BITS
        text = format(Decimal(value.numerator) / Decimal(value.denominator), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
