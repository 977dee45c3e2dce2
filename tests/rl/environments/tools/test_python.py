"""Python as a tool: an interpreter that lives from the first call of an episode to its end."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from rl.environments.tools.python import _AGAIN, PythonTool
from rl.environments.tools.tool import Tool
from rl.verification.sandbox.sandbox import Sandbox
from rl.verification.sandbox.session import Discarded
from tests.rl.verification.isolation import skip_without_isolation
from tests.rl.verification.processes import descendants


@pytest.fixture(scope="module")
def tool() -> Iterator[Tool]:
    with Sandbox.Config().build() as sandbox:
        skip_without_isolation(sandbox)
    tool = PythonTool.Config(sandbox=Sandbox.Config(deadline_s=0.5)).build()
    yield tool
    tool.shutdown()


def test_names_live_on_within_an_episode_and_no_longer(tool: Tool):
    one, other = tool.open({}), tool.open({})
    assert one.call("x = 2\ndef f(n):\n    return n * x") == ""
    assert one.call("print('seen'); f(21)") == "seen\n42"
    assert one.call("x = 1 / 0") == "ZeroDivisionError: division by zero"
    assert one.call("x += 1\nx") == "3"
    assert other.call("x") == "NameError: name 'x' is not defined"
    assert one.call("import random; random.random()") == other.call("import random; random.random()")


def test_what_goes_wrong_is_an_error_and_forgotten(tool: Tool):
    session = tool.open({})
    session.call("x = 1")
    with pytest.raises(RuntimeError, match="not done after 0.5 s"):
        session.call("x = 2\nwhile True: pass")
    assert session.call("x") == "1"
    assert session.call("def f(:").endswith("SyntaxError: invalid syntax")
    assert session.call("raise SystemExit(3)") == "SystemExit: 3"
    assert "Error" in session.call("open('/etc/passwd').read()")
    with pytest.raises(RuntimeError, match="the input has ended the process that ran it"):
        session.call("import os; os._exit(4)")
    assert session.call("x") == "1"
    with pytest.raises(RuntimeError, match="interpreter was lost, and all names with it; it begins again"):
        session.call(
            "import contextlib, os, time\nif os.fork(): time.sleep(9)\nfor pid in {*range(2, 100)} - {os.getpid()}:\n"
            "    with contextlib.suppress(ProcessLookupError): os.kill(pid, 9)\nos._exit(0)"
        )
    assert session.call("x") == "NameError: name 'x' is not defined"
    session.close()


def kill_all_below() -> None:
    """Kill -9 the sandbox with all boxes."""
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):  # it went with another
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_death_from_outside_is_not_seen(ahead: bool):
    tool = PythonTool.Config(sandbox=Sandbox.Config(deadline_s=5.0)).build()
    session = tool.open({})
    assert session.call("x = 1\nopen('seen', 'w').write('1')") == "1"
    partial = session.begin()
    assert partial is not None
    partial.feed("code", "x += 1\n")
    assert partial.finish(code="x += 1\nx") == "2"
    partial.commit()
    partial = session.begin()
    assert partial is not None
    if not ahead:
        partial.discard()
    kill_all_below()
    if ahead:  # what runs ahead is dropped, and the call waits for its action
        with pytest.raises(Discarded):
            partial.feed("code", "x += 1\n")
    assert session.call("x += 1\nx, open('seen').read()") == "(3, '1')"
    session.close()
    tool.shutdown()


@contextmanager
def killed(times: int) -> Iterator[list[int]]:
    """Kill the sandbox so many times: as it starts, then as an input runs, and so on. Yields the kills."""
    over, kills = threading.Event(), list[int]()

    def kill() -> None:
        while len(kills) < times and not over.wait(0.01):
            if len(below := descendants(os.getpid())) > 2 * (len(kills) % 2):
                kills.append(len(below))
                kill_all_below()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield kills
    finally:
        over.set()
        killer.join()


def test_a_sandbox_that_is_killed_again_and_again_is_started_as_often():
    tool = PythonTool.Config(sandbox=Sandbox.Config(deadline_s=30.0)).build()
    session = tool.open({})
    assert session.call("x = 1") == ""
    with killed(8) as kills:
        assert session.call("import time\ntime.sleep(1)\nx += 1\nx") == "2"
    assert len(kills) == 8
    session.close()
    tool.shutdown()


def test_a_call_gives_up_at_a_bound_and_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(_AGAIN, "killed", 2)
    tool = PythonTool.Config(sandbox=Sandbox.Config(deadline_s=30.0)).build()
    session = tool.open({})
    assert session.call("x = 1") == ""
    with killed(1000), pytest.raises(RuntimeError, match="(ended|was lost).*; it begins again"):
        session.call("import time\ntime.sleep(20)")
    assert session.call("x") == "NameError: name 'x' is not defined"
    session.close()
    tool.shutdown()


def test_an_impure_tool_makes_no_call_twice():
    tool = PythonTool.Config(pure=False, sandbox=Sandbox.Config(deadline_s=5.0)).build()
    session = tool.open({})
    session.call("x = 1")
    kill_all_below()
    with pytest.raises(RuntimeError, match="it begins again"):
        session.call("x")
    tool.shutdown()
