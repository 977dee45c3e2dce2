"""A Python interpreter as a tool, in the project's sandbox; names live on from call to call of an episode.

There is no process between two calls: each runs the inputs of the episode again in a fresh box, and shows what the
last one prints. So an episode holds nothing while the policy thinks, a box that was killed loses nothing, and the same
inputs give the same outputs, whichever worker plays them. Long computations are paid for again by each later call.
"""

import json
from collections.abc import Mapping
from typing import Any, override

from rl.environments.tools.tool import Tool
from rl.verification.sandbox.sandbox import Sandbox

__all__ = ["PythonTool"]

# Read by a box: inputs come as JSON on the standard input. Randomness begins alike in every box.
_PROGRAM = """
import ast, contextlib, io, json, random, sys, traceback

def run(source, space):
    tree = ast.parse(source, "<input>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<input>", "exec"), space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<input>", "eval"), space)
        if value is not None:
            print(repr(value))

def main():
    inputs, out = json.loads(sys.stdin.read()), sys.stdout
    random.seed(0)
    space = {"__name__": "__main__"}
    for source in inputs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                run(source, space)
            except BaseException as error:
                print("".join(traceback.format_exception_only(error)).strip())
    out.write(printed.getvalue())
    out.flush()

main()
"""


class PythonTool(Tool):
    """`python(code)`: what the code prints, the value of a last expression, or the error that it raises."""

    class Config(Tool.Config):
        name: str = "python"
        description: str = "Run Python code. Names are kept from call to call. Returns what it prints."
        pure: bool = True
        sandbox: Sandbox.Config = Sandbox.Config(processes=4, deadline_s=2.0)
        """Shared by all episodes of a process: some codes run at a time, so that one that hangs holds up nobody."""

        @override
        def schema(self) -> dict[str, Any]:
            return {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}

    def __init__(self, cfg: Config):
        self._sandbox: Sandbox = cfg.sandbox.build()

    @override
    def open(self, row: Mapping[str, Any]) -> "_Session":
        del row
        return _Session(self._sandbox)

    @override
    def call(self, code: str) -> str:
        return _Session(self._sandbox).call(code)

    @override
    def shutdown(self) -> None:
        self._sandbox.close()


class _Session(Tool):
    """The inputs of an episode so far; one that was killed is forgotten."""

    def __init__(self, sandbox: Sandbox):
        self._sandbox = sandbox
        self._inputs: list[str] = []

    @override
    def call(self, code: str) -> str:
        outcome = self._sandbox.run_script(_PROGRAM, json.dumps([*self._inputs, code]))
        if outcome.ended != "done":
            raise RuntimeError(outcome.error)
        if not outcome.passed:
            raise RuntimeError(outcome.error or "the interpreter has ended")
        self._inputs.append(code)
        return outcome.output.rstrip("\n")
