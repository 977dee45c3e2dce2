r"""Reading of mathematical expressions, in a subset of LaTeX whose meaning is beyond doubt, with their values.

Numbers, letters, fractions, powers, roots, functions, factorials, binomials, absolute values. What may mean two things
(1/2x, f(x), 2 3, x^y^z) is not read.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rl.verification.verifiers.exact.arithmetic import (
    MAX_SIZE,
    MP,
    Unclear,
    Undefined,
    add,
    factorial,
    number,
    over,
    power,
    root,
    times,
    whole,
)
from rl.verification.verifiers.exact.tokens import FUNCTIONS, SEVERAL, is_letter

_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}


class Parser:
    """Recursive descent that computes while it reads; anything unexpected is unclear."""

    def __init__(self, tokens: list[str], letter: Callable[[str], Fraction], base: int, *, real: bool):
        """Begin to read; `letter`: gives a letter's value; `base`: of a bare logarithm, 0: e; `real`: real values."""
        self._tokens = [*tokens, ""]
        self._place, self._bars = 0, 0
        self._letter, self._base, self._real = letter, base, real

    def value(self) -> Any:
        """Return the whole expression's value (Unclear: not of the subset, or too large; Undefined: not real)."""
        value = self._sum()
        self._expect("")
        return value

    def _sum(self) -> Any:
        sign = self._take() if self._peek() in ("+", "-") else "+"
        total = times(Fraction(-1 if sign == "-" else 1), self._product())
        while self._peek() in ("+", "-"):
            sign = Fraction(-1 if self._take() == "-" else 1)
            total = add(total, times(sign, self._product()))
        return total

    def _product(self) -> Any:
        value, divided = self._factor(), False
        while True:
            token = self._peek()
            if token == "*":
                self._take()
                value = times(value, self._signed())
            elif token == "/":
                self._take()
                value, divided = over(value, self._signed()), True
            elif self._begins(token):
                if divided:
                    raise Unclear  # 1/2x
                value = times(value, self._factor())
            else:
                return value

    def _signed(self) -> Any:
        if self._peek() == "-":
            self._take()
            return times(Fraction(-1), self._factor())
        return self._factor()

    def _begins(self, token: str) -> bool:
        if token == "|":
            return not self._bars
        closing = ("\\rfloor", "\\rceil", "\\circ")
        return token == "(" or token == "{" or is_letter(token) or (token[:1] == "\\" and token not in closing)

    def _factor(self) -> Any:
        value = self._base_value()
        if self._peek() == "!":
            self._take()
            value = factorial(value)
        if self._peek() != "^":
            return value
        self._take()
        if (exponent := self._exponent()) is None:
            return times(value, MP.pi / 180)
        if self._peek() in ("^", "!"):
            raise Unclear
        return power(value, exponent, real=self._real)

    def _exponent(self) -> Any:
        """Return the exponent; None: it is a degree sign."""
        if self._ahead("\\circ") or self._ahead("{", "\\circ", "}"):
            return None
        sign = -1 if self._ahead("-") else 1
        return times(Fraction(sign), self._argument(whole=True))

    def _base_value(self) -> Any:
        token = self._take()
        if token[:1].isdigit() or token[:1] == ".":
            if self._peek() == "_":
                raise Unclear  # number in another base than ten
            return Fraction(token)
        if token == "e" and self._peek() != "_":
            return +MP.e
        if token == "i" and self._peek() != "_":
            return MP.mpc(0, 1)
        if is_letter(token):
            return self._variable(token)
        if token in ("(", "{"):
            value = self._sum()
            self._expect(")" if token == "(" else "}")
            return value
        if token == "|":
            self._bars += 1
            value = self._sum()
            self._expect("|")
            self._bars -= 1
            return abs(value)
        if token[:1] == "\\":
            return self._command(token[1:])
        raise Unclear

    def _variable(self, token: str) -> Any:
        if self._ahead("_"):
            token += "_" + (self._take() if self._peek() != "{" else self._braces())
        elif (token in "fgh" or token.isupper()) and self._peek() == "(":
            raise Unclear  # f(x)
        return self._letter(token)

    def _braces(self) -> str:
        self._expect("{")
        inside = ""
        while self._peek() not in ("}", ""):
            inside += self._take()
        self._expect("}")
        return inside

    def _command(self, name: str) -> Any:
        if name == "pi":
            return +MP.pi
        if name.endswith("frac"):
            top = self._argument()
            return over(top, self._argument())
        if name == "sqrt":
            return self._root()
        if name in ("binom", "dbinom", "tbinom"):
            n = whole(self._argument(), 1000)
            return Fraction(math.comb(n, whole(self._argument(), 1000)))
        if name in ("lfloor", "lceil"):
            value = self._sum()
            self._expect("\\r" + name[1:])
            return Fraction(int((MP.floor if name == "lfloor" else MP.ceil)(number(value))))
        if name in SEVERAL:
            return self._several(SEVERAL[name])
        if name in ("ln", "log"):
            return self._logarithm(name)
        if name in FUNCTIONS:
            return self._function(name)
        raise Unclear

    def _root(self) -> Any:
        degree = Fraction(2)
        if self._ahead("["):
            degree = self._sum()
            self._expect("]")
        return root(self._argument(), degree, real=self._real)

    def _several(self, function: Callable[..., Any]) -> Any:
        self._expect("(")
        values = [self._sum()]
        while self._ahead(","):
            values.append(self._sum())
        self._expect(")")
        if function in (math.gcd, math.lcm):
            values = [whole(value, 10**12) for value in values]
        if not all(isinstance(value, Fraction | int) for value in values):
            raise Unclear
        return Fraction(function(*values))

    def _logarithm(self, name: str) -> Any:
        base = self._base
        if self._ahead("_"):
            base = self._argument()
        exponent = self._exponent() if self._ahead("^") else Fraction(1)
        value = number(self._of())
        if not value or (self._real and value.real < 0):
            raise Undefined
        found = MP.log(value)
        found = found / MP.log(number(base)) if base and name == "log" else found
        return power(found, exponent, real=self._real) if exponent != 1 else found

    def _function(self, name: str) -> Any:
        exponent = self._exponent() if self._ahead("^") else Fraction(1)
        if exponent == -1:
            name, exponent = _INVERSE.get(name, ""), Fraction(1)
        value = number(self._of())
        if not name or abs(value) > MAX_SIZE:
            raise Unclear
        found = FUNCTIONS[name](value)
        return power(found, exponent, real=self._real) if exponent != 1 else found

    def _of(self) -> Any:
        r"""Return the argument of a function: \sin(x+1), \sin 2x, \sin{x}; it ends before the next function."""
        if self._peek() in ("(", "{", "|"):
            return self._factor()
        value = self._signed()
        while (token := self._peek()) and (is_letter(token) or token in ("\\pi", "\\frac", "\\sqrt")):
            value = times(value, self._factor())
        if self._ahead("/"):
            value = over(value, self._factor())
        return value

    def _argument(self, whole: bool = False) -> Any:
        r"""Return what a command or sign applies to: {...}, or one sign; of \frac12 one digit, of 10^12 all digits."""
        token = self._peek()
        if token == "{" or (token == "(" and whole):
            self._take()
            value = self._sum()
            self._expect("}" if token == "{" else ")")
            return value
        if token.isdigit() and not whole and len(token) > 1:
            self._tokens[self._place : self._place + 1] = [token[0], token[1:]]
        elif not (token[:1].isdigit() or is_letter(token) or token in ("\\pi", "\\frac", "\\sqrt")):
            raise Unclear
        return self._base_value() if not token.isdigit() else Fraction(self._take())

    def _peek(self) -> str:
        return self._tokens[self._place]

    def _take(self) -> str:
        token = self._tokens[self._place]
        self._place = min(self._place + 1, len(self._tokens) - 1)
        return token

    def _ahead(self, *tokens: str) -> bool:
        """Take these tokens if they are the next ones."""
        if (found := self._tokens[self._place : self._place + len(tokens)] == list(tokens)) is True:
            self._place += len(tokens)
        return found

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise Unclear
