"""Inputs give the same whether they come whole or in parts, and parts leave nothing when they are dropped."""

import random
from collections.abc import Iterator

import pytest

from rl.verification.sandbox.sandbox import Sandbox
from rl.verification.sandbox.session import Discarded, InterpreterSession, PartialInput

LINES = (
    "x = 1",
    "x += 2; y = x",
    "x",
    "y",
    "print(x)",
    "print('a', end='')",
    "1 / 0",
    "del x",
    "import random",
    "random.random()",
    "raise ValueError('no')",
    "'text'",
    "# nothing",
    "",
    "z = [\n  1,\n  2]",
    "s = '''a\nb'''",
    "for i in range(3):\n    x += i\n    print(i)\nelse:\n    print('end')",
    "if x > 2:\n    x = 0\n\nelif x:\n    x = 5",
    "@staticmethod\n# c\n@staticmethod\ndef f(a):\n\n    return a\n\nprint(f.__name__)",
    "try:\n    q\nfinally:\n    print(3)",
    "def g(n):\n    return g(n + 1)\ng(0)",
    "import sys\nprint(sys._getframe().f_lineno)",
    "exit(3)",
    "def h(:",
    "  x = 1",
    "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    print(traceback.format_exc())",
    "return 3",
    "a = (1, 2)\nb = (1, 2)",
    "a is b",
    "d = 0\ndef deep():\n    global d\n    d += 1\n    deep()\ntry:\n    deep()\nexcept RecursionError:\n    print(d)",
    "from __future__ import annotations",
    "class A:\n    v: B = 1\nA.__annotations__",
    "sys.stdout = open('/dev/null', 'w')",
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.Config(deadline_s=3.0).build() as one:
        yield one


def in_parts(session: InterpreterSession, code: str, draw: random.Random) -> tuple[str, bool]:
    """Return the output of a code that comes some lines at a time, and False if it had to be run whole."""
    lines = code.split("\n")
    given = session.begin()
    try:
        while len(lines) > 1:
            count = draw.randint(1, len(lines) - 1)
            given.feed("".join(f"{line}\n" for line in lines[:count]))
            lines = lines[count:]
        outcome = given.finish(code)
        given.commit()
    except Discarded:
        given.discard()
        return shown(session, code), False
    return outcome.output, True


def shown(session: InterpreterSession, code: str) -> str:
    outcome = session.run(code)
    return outcome.output or outcome.error


@pytest.mark.parametrize("seed", range(6))
def test_an_input_in_parts_is_the_input(sandbox: Sandbox, seed: int) -> None:
    draw, ran = random.Random(seed), 0
    with sandbox.session() as whole, sandbox.session() as parts:
        for _ in range(12):
            code = "\n".join(draw.choices(LINES, k=draw.randint(1, 5)))
            found, ahead = in_parts(parts, code, draw)
            assert found == shown(whole, code), code
            ran += ahead
    assert ran > 4


def begun(session: InterpreterSession, *parts: str) -> PartialInput:
    given = session.begin()
    for part in parts:
        given.feed(part)
    return given


def test_what_is_dropped_leaves_no_names(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        assert session.run("x = [1]").passed
        begun(session, "x.append(2)\n").discard()
        assert session.run("x").output == "[1]\n"
        given = begun(session, "x.append(2)\n", "y = 3\n")
        with pytest.raises(Discarded, match="does not begin"):
            given.finish("x.append(4)\ny = 3\n")
        assert session.run("x").output == "[1]\n"
        assert "NameError" in session.run("y").output


@pytest.mark.parametrize(
    "code", ["while True: pass\n", "import os; os._exit(1)\n", "import os; os.kill(os.getpid(), 9)\n"]
)
def test_parts_that_hang_or_die_leave_the_names(sandbox: Sandbox, code: str) -> None:
    with sandbox.session() as session:
        session.run("x = 1")
        given = session.begin()
        with pytest.raises(Discarded):
            given.feed(f"{code}x = 2\n")
        with pytest.raises(Discarded, match="over"):
            given.feed("x = 2\n")
        given.discard()
        assert session.run("x").output == "1\n"


def test_all_parts_together_have_the_deadline_of_one_input(sandbox: Sandbox) -> None:
    with Sandbox.Config(deadline_s=0.6).build() as short, short.session() as session:
        given = begun(session, "import time\n", "time.sleep(0.35)\n")
        with pytest.raises(Discarded):
            given.feed("time.sleep(0.35)\n")
        assert session.run("1").output == "1\n"


def test_a_fork_of_the_code_does_not_answer_for_it(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        code = "import os\nx = os.fork()\nprint('child' if x == 0 else 'parent')\n"
        found, _ = in_parts(session, code, random.Random(0))
        assert "parent" in found and "child" not in found
        assert session.run("2").output == "2\n"
