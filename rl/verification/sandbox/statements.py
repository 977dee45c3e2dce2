"""An input of an interpreter as its statements, which run one after the other, whole or as they are written.

Both ways run the same code objects in the same order, so that an input gives the same whether it came in parts or not.
It runs in boxes, among code that nobody trusts.
"""

import __future__

import ast
import contextlib
import io
import sys
import traceback
from typing import Any

from rl.verification.sandbox.values import MAX_FRAME

_COMPOUND = (
    *(ast.If, ast.For, ast.While, ast.Try, ast.TryStar, ast.With, ast.Match, ast.FunctionDef, ast.ClassDef),
    *(ast.AsyncFor, ast.AsyncWith, ast.AsyncFunctionDef),
)
_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag


class InputProgram:
    """One input, on the names of a session."""

    def __init__(self, space: dict[str, Any]):
        self._space = space
        self._printed = io.StringIO()
        self._stdout, sys.stdout = sys.stdout, self._printed
        self._source, self._at, self._line = "", 0, 0  # code so far; characters and lines of it that were run
        self._ran: list[str] = []  # statements that were run, as their trees
        self._value: Any = None  # value of the last statement, if it is an expression
        self._failed = False

    def output(self, source: str) -> str:
        """Run all of it; returns what it prints, the value of its last expression, and the error that it raises."""
        try:
            tree, flags = _parsed(source)
            codes = [_compiled(statement, flags) for statement in tree.body]
        except BaseException as error:
            self._show(error)
        else:
            self._run(codes)
        return self._text()

    def feed(self, part: str) -> None:
        """Run the statements that are complete with more of the code: whatever follows belongs to others."""
        self._source += part
        if "\r" in self._source:
            return  # ends a line, too
        rest = self._source[self._at :]
        try:
            body = ast.parse("\n" * self._line + rest, "<input>").body
            closed = body if body and not isinstance(body[-1], _COMPOUND) else body[:-1]
            codes = [_compiled(statement, 0) for statement in closed]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return  # incomplete, or wrong: the whole code will tell
        if not closed:
            return
        lines = rest.split("\n")
        after = _first_line(body[-1]) - 1 - self._line if len(closed) < len(body) else len(lines) - 1
        self._at += sum(len(line) + 1 for line in lines[:after])
        self._line += after
        self._ran += map(_spelled, closed)
        self._run(codes)

    def finish(self, source: str) -> str | None:
        """Run the rest of the whole code; returns its output, or None if what was run is not its beginning."""
        try:
            tree, flags = _parsed(source)
            codes = [_compiled(statement, flags) for statement in tree.body]
        except BaseException:
            return None
        count = len(self._ran)
        if flags or [_spelled(statement) for statement in tree.body[:count]] != self._ran:
            return None
        self._run(codes[count:])
        return self._text()

    def _run(self, codes: list[tuple[Any, bool]]) -> None:
        """Run statements, unless one before them has failed."""
        for code, is_expression in codes:
            if self._failed:
                return
            self._value = None
            try:
                if is_expression:
                    self._value = eval(code, self._space)
                else:
                    exec(code, self._space)
            except BaseException as error:
                self._show(error)

    def _text(self) -> str:
        try:
            if self._value is not None and not self._failed:
                print(repr(self._value))
        except BaseException as error:
            self._show(error)
        sys.stdout = self._stdout
        return self._printed.getvalue()[: MAX_FRAME // 8]

    def _show(self, error: BaseException) -> None:
        self._failed = True
        with contextlib.suppress(BaseException):  # an exception of the input's own that cannot be shown
            print("".join(traceback.format_exception_only(error)).strip())


def _parsed(source: str) -> tuple[ast.Module, int]:
    """Return the tree, and flags of its imports from the future. Raises SyntaxError also for faults of the whole."""
    tree = ast.parse(source, "<input>")
    return tree, compile(tree, "<input>", "exec", dont_inherit=True).co_flags & _FUTURES


def _compiled(statement: ast.stmt, flags: int) -> tuple[Any, bool]:
    """Return the code of a statement, and True if it is an expression."""
    if isinstance(statement, ast.Expr):
        whole = ast.Expression(statement.value)
        return compile(whole, "<input>", "eval", flags, dont_inherit=True), True
    return compile(ast.Module([statement], []), "<input>", "exec", flags, dont_inherit=True), False


def _first_line(statement: ast.stmt) -> int:
    """Return the line on which a statement begins, with what decorates it."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def _spelled(statement: ast.stmt) -> str:
    return ast.dump(statement, include_attributes=True)
