"""A Python interpreter as a tool, in the project's sandbox; names live on from call to call of an episode.

Each episode has a box of its own, from its first call to its end. A call that is killed at its deadline, or ends its
own process, leaves the names as they were before it; files in the working folder stay. That a box was lost is said to
the policy, and the next call begins with no names.
"""

import codeop
from collections.abc import Mapping
from typing import Any, override

from rl.environments.tools.tool import ArgumentChecker, Diverged, PartialCall, Tool
from rl.verification.sandbox.sandbox import InterpreterSession, Sandbox
from rl.verification.sandbox.session import Discarded, PartialInput


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
            del row
            return _Syntax() if name == "code" else None

    def __init__(self, cfg: Config):
        self._sandbox: Sandbox = cfg.sandbox.build()

    @override
    def open(self, row: Mapping[str, Any]) -> "_Interpreter":
        del row
        return _Interpreter(self._sandbox.session())

    @override
    def call(self, code: str) -> str:
        with self._sandbox.session() as session:
            return _Interpreter(session).call(code)

    @override
    def shutdown(self) -> None:
        self._sandbox.close()


class _Interpreter(Tool):
    def __init__(self, session: InterpreterSession):
        self._session = session

    @override
    def begin(self) -> "_Ahead":
        return _Ahead(self._session.begin())

    @override
    def call(self, code: str) -> str:
        outcome = self._session.run(code)
        if outcome.ended == "done":
            return outcome.output.rstrip("\n")
        more = "; it begins again" if outcome.ended == "lost" else ""
        raise RuntimeError(outcome.error + more)

    @override
    def close(self) -> None:
        self._session.close()


class _Ahead(PartialCall):
    """Code that runs statement by statement, on names that are kept if it turns out to be what was called."""

    def __init__(self, given: PartialInput):
        self._input = given

    @override
    def feed(self, name: str, text: str) -> None:
        if name in ("", "code") and text.endswith("\n"):
            self._input.feed(text)

    @override
    def finish(self, code: str) -> str:
        try:
            return self._input.finish(code).output.rstrip("\n")
        except Discarded as error:
            raise Diverged(str(error)) from error

    @override
    def commit(self) -> None:
        self._input.commit()

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
