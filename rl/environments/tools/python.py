"""A Python interpreter as a tool, in the project's sandbox; names live on from call to call of an episode.

Each episode has a box of its own, from its first call to its end. A call that is killed at its deadline, or ends its
own process, leaves the names as they were before it; files in the working folder stay. That a box was lost is said to
the policy, and the next call begins with no names.
"""

from collections.abc import Mapping
from typing import Any, override

from rl.environments.tools.tool import Tool
from rl.verification.sandbox.sandbox import InterpreterSession, Sandbox


class PythonTool(Tool):
    """`python(code)`: what the code prints, the value of a last expression, or the error that it raises."""

    class Config(Tool.Config):
        name: str = "python"
        description: str = "Run Python code. Names are kept from call to call. Returns what it prints."
        # Randomness and hashes begin alike in every episode; set it to False if answers may depend on the clock.
        pure: bool = True
        # Shared by all episodes of a process: some codes run at a time, so that one that hangs holds up nobody.
        sandbox: Sandbox.Config = Sandbox.Config(processes=4, deadline_s=2.0)

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
    """The interpreter of an episode."""

    def __init__(self, session: InterpreterSession):
        self._session = session

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
