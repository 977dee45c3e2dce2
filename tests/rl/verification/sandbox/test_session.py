"""Sessions: names live on, what is killed leaves them as they were, nothing runs between two inputs or at the end."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from rl.verification.sandbox.sandbox import InterpreterSession, Sandbox
from tests.rl.verification.isolation import skip_without_isolation
from tests.rl.verification.processes import descendants

_KILL_OTHERS = """import contextlib, os
for pid in {*range(1, 100)} - {os.getpid()}:
    with contextlib.suppress(ProcessLookupError): os.kill(pid, 9)
x"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.Config(deadline_s=0.6, memory_mb=256).build() as built:
        skip_without_isolation(built)
        with built.session() as session:
            session.run("1")  # the process of sessions is there from now on
        yield built


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[InterpreterSession]:
    """Whatever a test does, its session leaves nothing running."""
    idle = set(descendants(os.getpid()))
    with sandbox.session() as opened:
        yield opened
    end = time.monotonic() + 2.0
    while set(descendants(os.getpid())) - idle and time.monotonic() < end:
        time.sleep(0.01)
    assert set(descendants(os.getpid())) <= idle


def test_a_process_lives_on_and_inputs_are_not_run_again(session: InterpreterSession):
    assert session.run("count = iter(range(100)); file = open('seen', 'a')").output == ""
    assert session.run("next(count), file.write('x'), file.flush()").output == "(0, 1, None)\n"
    assert session.run("next(count), open('seen').read()").output == "(1, 'x')\n"
    assert session.run("def f(:").output.endswith("SyntaxError: invalid syntax\n")
    assert session.run("print('said'); 1 / 0").output == "said\nZeroDivisionError: division by zero\n"
    assert session.run("raise SystemExit(3)").output == "SystemExit: 3\n"
    assert session.run("next(count)").output == "2\n"


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("x = 2\nwhile True: pass", "timeout"),
        ("x = 2\nimport signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(9)", "timeout"),
        ("x = 2\nimport os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
        ("x = 2\nimport os\nif os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(9)\nos._exit(4)", "crash"),
        ("x = 2\nimport os; os.kill(os.getpid(), 9)", "crash"),
    ],
)
def test_what_is_killed_or_dies_leaves_the_names_as_they_were(session: InterpreterSession, code: str, ended: str):
    session.run("x = 1")
    assert session.run(code).ended == ended
    assert session.run("x").output == "1\n"


def test_nothing_runs_between_two_inputs(session: InterpreterSession):
    session.run("seen = [0]; import os, threading, time")
    spin = "def spin():\n    while True: seen[0] += 1; time.sleep(0.001); open('beat', 'a').write('x')\n"
    assert (
        session.run(spin + "threading.Thread(target=spin, daemon=True).start()\nif os.fork() == 0: spin()").output == ""
    )
    size = "os.path.getsize('beat') if os.path.exists('beat') else 0, seen[0]"
    before = session.run(size).output
    time.sleep(0.1)
    assert session.run(size).output == before
    assert session.run("threading.active_count()").output == "1\n"
    assert session.run("if os.fork() == 0: seen[0] = -1").output == ""
    assert session.run("seen[0] > 0").output == "True\n"


def test_a_lost_interpreter_is_named_and_begins_again(session: InterpreterSession):
    session.run("x = 1")
    assert session.run(_KILL_OTHERS).output == "1\n"  # the one that kills all others is left
    outcome = session.run(f"import os, time\nif os.fork(): time.sleep(9)\n{_KILL_OTHERS}\nos._exit(0)")
    assert (outcome.ended, outcome.error) == ("lost", "the interpreter was lost, and all names with it")
    assert session.run("x").output == "NameError: name 'x' is not defined\n"
    assert session.run("2 + 2").output == "4\n"


def test_limits_and_walls_are_those_of_a_box(session: InterpreterSession):
    assert session.run("held = bytearray(1 << 30)").output == "MemoryError\n"
    assert "Error" in session.run("open('/etc/passwd').read()").output
    assert "Error" in session.run("import socket; socket.socket()").output
    assert len(session.run("print('x' * (1 << 22))").output) == 256 << 10
    assert session.run("held").output == "NameError: name 'held' is not defined\n"


def test_sessions_are_apart_and_begin_alike(sandbox: Sandbox, session: InterpreterSession):
    with sandbox.session() as other:
        session.run("x = 1; open('x', 'w')")
        assert other.run("x").output == "NameError: name 'x' is not defined\n"
        assert other.run("import os; os.listdir('.')").output == "[]\n"
        drawn = "import random; random.random(), hash('text')"
        assert other.run(drawn).output == session.run(drawn).output != session.run(drawn).output


def test_the_death_of_the_warm_process_is_a_loss_and_no_more():
    with Sandbox.Config(deadline_s=5.0).build() as sandbox, sandbox.session() as session:
        idle = set(descendants(os.getpid()))
        skip_without_isolation(sandbox)
        session.run("x = 1")
        for pid in set(descendants(os.getpid())) - idle:
            with contextlib.suppress(ProcessLookupError):  # it went with another
                os.kill(pid, signal.SIGKILL)
        assert session.run("x").ended == "killed"
        after = session.run("x")
        if after.ended == "killed":  # the next process had been made already, and was killed with the first
            after = session.run("x")
        assert after.output == "NameError: name 'x' is not defined\n"


def test_without_isolation_an_input_that_is_late_ends_its_session_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    refuse = "import os\ndef unshare(flags): raise OSError(1, 'not here')\nos.unshare = unshare\n"
    monkeypatch.setattr("rl.verification.sandbox.warm_process._BEFORE", refuse)
    with Sandbox.Config(allow_unisolated=True, deadline_s=0.4).build() as sandbox, sandbox.session() as session:
        assert session.run("x = 1; x").output == "1\n"
        assert session.run("x + 1").output == "2\n"
        assert session.run("while True: pass").ended == "lost"
        assert session.run("2").output == "2\n"
