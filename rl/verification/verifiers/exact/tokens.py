"""Tokens of a mathematical expression."""

import math
import re
from collections.abc import Callable
from typing import Any

from rl.verification.verifiers.exact.arithmetic import MP, Unclear

_SAME = {"\\cdot": "*", "\\times": "*", "\\div": "/", "\\lvert": "|", "\\rvert": "|"}
_LONGEST, _DEEPEST = 400, 12
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(MP, name) for name in "sin cos tan cot sec csc sinh cosh tanh exp".split()},
    **{f"arc{name}": getattr(MP, f"a{name}") for name in ("sin", "cos", "tan")},
}
SEVERAL: dict[str, Callable[..., Any]] = {"gcd": math.gcd, "lcm": math.lcm, "max": max, "min": min}
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi "
    "omega Delta Gamma Lambda Omega Phi Psi Sigma Theta"
).split()
_LETTERS = {f"\\{name}" for name in _GREEK}
_MIXED = re.compile(r"(?<![\d.^_}])(\d+)\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_TOKEN = re.compile(r"(?:\s|\\[,;!: ])+|(\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|[A-Za-z]|[-+*/^(){}\[\],!|_])")


def tokens_of(text: str) -> list[str]:
    """Return the tokens of an expression (Unclear: a sign is of no expression, or the text is too long or too deep)."""
    if len(text) > _LONGEST:
        raise Unclear
    text = re.sub(r"\\(?:operatorname|mathrm|text|mathbf|mathit)\s*\{\s*([A-Za-z]+)\s*\}", _named, text)
    text = re.sub(r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = _MIXED.sub(_mixed, text)
    tokens, place, depth = [], 0, 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise Unclear
        place = found.end()
        if found[1]:
            depth += (found[1] in "([{") - (found[1] in ")]}")
            tokens.append(_SAME.get(found[1], found[1]))
        if not 0 <= depth <= _DEEPEST:
            raise Unclear
    return tokens


def _mixed(found: re.Match[str]) -> str:
    top, below = found[2] or found[3], found[4] or found[5]
    return rf"({found[1]}+\frac{{{top}}}{{{below}}})" if int(top) < int(below) else found[0]


def _named(found: re.Match[str]) -> str:
    name = found[1]
    known = name in FUNCTIONS or name in SEVERAL or name in ("log", "ln")
    return f"\\{name} " if known else name if len(name) == 1 else found[0]


def is_letter(token: str) -> bool:
    """Return True for a variable, e or i."""
    return (len(token) == 1 and token.isalpha()) or token in _LETTERS
