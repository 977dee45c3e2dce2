"""Answers that may reach a scorer of reasoning-gym that would run them as Python.

Seven scorers of reasoning-gym 0.1.25 call `eval`, or sympy's `parse_expr`, which does, on the text of the answer. A
policy under optimisation finds what that allows. Here an answer of these families passes only if its syntax tree holds
nothing but what the family's answers are made of: literals, or sums and products of numbers. Every other one is scored
as what these scorers cannot read.
"""

import ast
import warnings
from collections.abc import Callable
from typing import Any

_LONGEST = 20_000  # characters of an answer that is parsed
_DEEPEST = 50  # opening brackets in one another: the parser recurses
_LARGEST_EXPONENT = 64

_Check = Callable[[str, dict[str, Any]], bool]


def _is_literal(answer: str, entry: dict[str, Any]) -> bool:
    return all(isinstance(node, _LITERAL) for node in ast.walk(ast.parse(answer.strip(), mode="eval")))


def _is_arithmetic(answer: str, entry: dict[str, Any]) -> bool:
    return all(isinstance(node, _ARITHMETIC) and _is_number(node) for node in _nodes(answer))


def _is_polynomial(answer: str, entry: dict[str, Any]) -> bool:
    names = {str(entry["metadata"]["variable"]), "C"}
    for node in _nodes(answer):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            if not _is_small(node.right):
                return False
        elif isinstance(node, ast.Name):
            if node.id not in names:
                return False
        elif not (isinstance(node, (*_ARITHMETIC, ast.Pow)) and _is_number(node)):
            return False
    return True


def _nodes(answer: str) -> list[ast.AST]:
    tree = ast.parse(answer.strip(), mode="eval")
    return [node for node in ast.walk(tree.body) if not isinstance(node, ast.Load)]


def _is_number(node: ast.AST) -> bool:
    return not isinstance(node, ast.Constant) or type(node.value) in (int, float)


def _is_small(exponent: ast.expr) -> bool:
    """Return True for 3, -1, (1/2): a power that can be multiplied out, and not 9**9**9."""
    values = [node.value for node in ast.walk(exponent) if isinstance(node, ast.Constant)]
    allowed = (ast.Constant, ast.UnaryOp, ast.USub, ast.BinOp, ast.Div)
    plain = all(isinstance(node, allowed) for node in ast.walk(exponent))
    return plain and all(isinstance(value, int | float) and value <= _LARGEST_EXPONENT for value in values)


_LITERAL = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load)
_ARITHMETIC = (
    ast.BinOp,
    ast.UnaryOp,
    ast.Constant,
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.UAdd, ast.USub),
)

EVALUATED: dict[str, _Check] = {
    "binary_matrix": _is_literal,
    "n_queens": _is_literal,
    "spiral_matrix": _is_literal,
    "string_insertion": _is_literal,
    "countdown": _is_arithmetic,
    "puzzle24": _is_arithmetic,
    "simple_integration": _is_polynomial,
}


def readable(family: str, answer: str, entry: dict[str, Any]) -> str:
    """Return the answer, or "" in place of one that the family's scorer would run as more than data."""
    check = EVALUATED.get(family)
    if check is None or answer.strip() in _known(entry):
        return answer
    if not answer.isascii() or len(answer) > _LONGEST or bracket_depth(answer) > _DEEPEST:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `1(2)`: a call of a number
            return answer if check(answer, entry) else ""
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


def _known(entry: dict[str, Any]) -> set[str]:
    """Return the answers that the task itself made."""
    others = entry["metadata"].get("valid_answers", ())
    return {str(answer).strip() for answer in (entry["answer"], *others)}


def bracket_depth(answer: str) -> int:
    """Return how many brackets of a text are open at the most."""
    depth = deepest = 0
    for character in answer:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest
