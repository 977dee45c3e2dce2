"""A Python interpreter as a tool, in the project's sandbox; names live on from call to call of an episode.

Each episode has a box of its own, from its first call to its end. A call that is killed at its deadline, or ends its
own process, leaves the names as they were before it; files in the working folder stay. If a process dies, the calls so
far are made again in a new box, and then the call: a death from outside (memory, kill -9) is not seen, not even one of
the whole sandbox again and again. If it dies each time, that is said to the policy; if its box was lost, the next call
begins with no names.
"""

import codeop
from collections.abc import Mapping
from typing import Any, override

from rl.environments.tools.tool import ArgumentChecker, Diverged, PartialCall, Tool
from rl.verification.sandbox.sandbox import InterpreterSession, Sandbox
from rl.verification.sandbox.session import Discarded, PartialInput
from rl.verification.sandbox.warm_process import Outcome


class PythonTool(Tool):
    """`python(code)`: what the code prints, the value of a last expression, or the error that it raises."""

    class Config(Tool.Config):
        name: str = "python"
        description: str = "Run Python code. Names are kept from call to call. Returns what it prints."
        # Randomness and hashes begin alike in every episode; set it to False if answers may depend on the clock.
        pure: bool = True
        # Shared by all episodes of a process: some codes run at a time, so that one that hangs holds up nobody.
        sandbox: Sandbox.Config = Sandbox.Config(processes=4, deadline_s=2.0)

        @override
        def checker(self, name: str, row: Mapping[str, Any]) -> ArgumentChecker | None:
            return _Syntax() if name == "code" else None

    def __init__(self, cfg: Config):
        self._sandbox: Sandbox = cfg.sandbox.build()
        self._pure = cfg.pure

    @override
    def open(self, row: Mapping[str, Any]) -> "_Interpreter":
        return _Interpreter(self._sandbox.session(), self._pure)

    @override
    def call(self, code: str) -> str:
        with self._sandbox.session() as session:
            return _Interpreter(session, self._pure).call(code)

    @override
    def shutdown(self) -> None:
        self._sandbox.close()


_LOST = ("lost", "killed")
# How often a call is made again, by how its process has died: by itself, perhaps, or with the whole sandbox
_AGAIN = {"crash": 2, "lost": 2, "killed": 16}


class _Interpreter(Tool):
    def __init__(self, session: InterpreterSession, pure: bool):
        self._session, self._pure = session, pure
        self._made: list[str] = []  # code of the calls that the names are made of

    @override
    def begin(self) -> "_Ahead":
        if self._made and not self._session.alive and self._run("").ended in _AGAIN:
            self._session.close()
            raise Discarded("the calls so far could not be made again")
        return _Ahead(self._session.begin(), self._made)

    @override
    def call(self, code: str) -> str:
        outcome = self._tried(code)
        if outcome.ended == "done":
            self._made.append(code)
            return outcome.output.rstrip("\n")
        if outcome.ended in _LOST:
            self._made.clear()
        more = "; it begins again" if outcome.ended in _LOST else ""
        raise RuntimeError(outcome.error + more)

    @override
    def close(self) -> None:
        self._session.close()

    def _tried(self, code: str) -> Outcome:
        """Run a call, and so often again while its process dies, or the sandbox as it starts."""
        left = dict(_AGAIN) if self._pure else {}
        while left.get((outcome := self._run(code)).ended, 0) > 0:
            left[outcome.ended if self._session.drop() else "killed"] -= 1
        return outcome

    def _run(self, code: str) -> Outcome:
        """Run a call on the names of those so far, which are made again if they are lost."""
        if self._pure and not self._session.alive:
            for one in self._made:
                if (outcome := self._session.run(one)).ended in _AGAIN:
                    return outcome
        return self._session.run(code)


class _Ahead(PartialCall):
    """Code that runs statement by statement, on names that are kept if it turns out to be what was called."""

    def __init__(self, given: PartialInput, made: list[str]):
        self._input, self._made, self._code = given, made, ""

    @override
    def feed(self, name: str, text: str) -> None:
        if name in ("", "code") and text.endswith("\n"):
            self._input.feed(text)

    @override
    def finish(self, code: str) -> str:
        self._code = code
        try:
            return self._input.finish(code).output.rstrip("\n")
        except Discarded as error:
            raise Diverged(str(error)) from error

    @override
    def commit(self) -> None:
        self._input.commit()
        self._made.append(self._code)

    @override
    def discard(self) -> None:
        self._input.discard()


class _Syntax(ArgumentChecker):
    """Search for code that no further line can make correct."""

    def __init__(self) -> None:
        self._code = ""

    @override
    def feed(self, text: str) -> str:
        self._code += text
        if not text.endswith("\n"):
            return ""
        try:
            codeop.compile_command(self._code, "<input>", "exec")
        except SyntaxError as error:
            return f"SyntaxError: {error.msg}"
        except (ValueError, OverflowError, RecursionError, MemoryError):
            return ""
        return ""
