"""Programs of a box, which read their job from a channel once the walls stand.

`script` runs a program on its standard input. `serve` defines functions and calls them for the other end of a link.
`judge` runs tests that call such functions over a link: the tests and what they expect are in another box than the code
that they judge, which can therefore neither read them nor change them nor answer in their stead. `session` is of
`interpreter`.
"""

import ast
import builtins
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from rl.verification.sandbox import interpreter
from rl.verification.sandbox.values import decode, encode, receive, send

_ERROR = 300  # characters of an error


def run(mode: str, descriptors: list[int]) -> int:
    """Run the program of a box; returns its exit status."""
    channel = socket.socket(fileno=descriptors[0])
    if mode == "session":
        return interpreter.run(channel)
    job = receive(channel)
    if job is None:
        return 1
    if mode == "script":
        return _script(channel, job, *descriptors[1:])
    link = socket.socket(fileno=descriptors[1])
    return _serve(link, job) if mode == "serve" else _judge(channel, link, job)


def _script(channel: socket.socket, job: dict[str, Any], stdin: int, stdout: int) -> int:
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    status = 0
    try:
        exec(compile(job["source"], "<answer>", "exec"), {"__name__": "__main__", "__builtins__": builtins})
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        send(channel, {"error": _describe(error)})
        status = 1
    sys.stdout.flush()
    return status


def _serve(link: socket.socket, job: dict[str, Any]) -> int:
    space: dict[str, Any] = {"__name__": "answer", "__builtins__": builtins}
    try:
        exec(compile(job["source"], "<answer>", "exec"), space)
    except BaseException as error:
        send(link, {"error": _describe(error)})
        return 1
    send(link, {"functions": [name for name, value in space.items() if callable(value)]})
    while (call := receive(link)) is not None:
        try:
            arguments = [decode(value) for value in call["arguments"]]
            named = {name: decode(value) for name, value in call["named"].items()}
            reply = {"value": encode(space[call["name"]](*arguments, **named))}
        except BaseException as error:
            reply = {"raised": type(error).__name__, "text": _describe(error)}
        send(link, reply)
    return 0


class _AnswerError(Exception):
    """The other end has ended, or sent what is no data."""


def _judge(channel: socket.socket, link: socket.socket, job: dict[str, Any]) -> int:
    try:
        hello = _ask(link)
        if "functions" not in hello:
            raise _AnswerError(str(hello.get("error", "nothing was defined"))[:_ERROR])
        space: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
        exec(compile(job["prelude"], "<prelude>", "exec"), space)
        offered = [name for name in hello["functions"] if isinstance(name, str)]
        for name in _wanted(job, set(offered), space):
            space[name] = _stub(link, name)
        exec(compile(job["tests"], "<tests>", "exec"), space)
    except BaseException as error:
        send(channel, {"passed": False, "error": _describe(error)})
        return 0
    send(channel, {"passed": True, "error": ""})
    return 0


def _wanted(job: dict[str, Any], offered: set[str], space: dict[str, Any]) -> list[str]:
    """Return the functions to call in the other box: those named, or those that the tests use and do not define.

    What the prelude defines is not replaced, but for functions that it leaves to the answer.
    """
    if names := job["names"]:
        if missing := [name for name in names if name not in offered]:
            raise _AnswerError(f"{missing[0]} is not defined")
        return names
    tree = ast.parse(job["tests"])
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = space.keys() - _unfinished(job["prelude"])
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    return sorted(name for name in used & offered if name not in own and not hasattr(builtins, name))


def _unfinished(source: str) -> set[str]:
    """Return the functions without a body: nothing but documentation, `pass`, `...` or NotImplementedError."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {function.name for function in functions if all(map(_does_nothing, function.body))}


def _does_nothing(step: ast.stmt) -> bool:
    if isinstance(step, ast.Raise) and step.exc is not None:
        kind = step.exc.func if isinstance(step.exc, ast.Call) else step.exc
        return isinstance(kind, ast.Name) and kind.id == "NotImplementedError"
    return isinstance(step, ast.Pass) or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))


def _stub(link: socket.socket, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        values = [encode(value) for value in arguments]
        reply = _ask(link, {"name": name, "arguments": values, "named": {k: encode(v) for k, v in named.items()}})
        if "raised" in reply:
            kind = getattr(builtins, str(reply["raised"]), None)
            known = kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError
            if known in (StopIteration, StopAsyncIteration):  # would silently end a test's loop over `map`
                known = RuntimeError
            raise known(str(reply.get("text", ""))[:_ERROR])
        try:
            return decode(reply["value"])
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise _AnswerError(f"{name} returned no data") from error

    call.__name__ = name
    return call


def _ask(link: socket.socket, message: Any = None) -> dict[str, Any]:
    try:
        if message is not None:
            send(link, message)
        reply = receive(link)
    except (BrokenPipeError, ConnectionResetError):
        reply = None
    if not isinstance(reply, dict):
        raise _AnswerError("the answer's process has ended")
    return reply


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_ERROR]
    except BaseException:  # an exception of the answer's own, that cannot be shown
        return type(error).__name__[:_ERROR]
