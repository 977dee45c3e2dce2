"""Every attack scores 0 and leaves nothing running; what is right passes before, between and after."""

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.verification.sandbox.attacks import ATTACKS, KINDS, TESTS
from rl.verification.sandbox.sandbox import Outcome, Sandbox
from rl.verification.sandbox.values import decode, encode
from tests.rl.verification.isolation import skip_without_isolation
from tests.rl.verification.processes import descendants

_ONCE_THROUGH = (
    *("override a helper of the tests", "override a module of the tests", "end a loop of the tests"),
    *("memory of an unnamed file", "send a descriptor", "watch files of others", "take a descriptor of a process"),
    *("hide an argument in its upper half", "send to an address by a pair of sockets"),
)
_QUICK = ("fork bomb that goes on", "outlive the deadline")
SQUARE = "def solve(x):\n    return x * x\n"


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox.Config(deadline_s=1.0, backend=request.param).build() as built:
        skip_without_isolation(built)
        yield built


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    secret = tmp_path_factory.mktemp("home") / "secret"
    secret.write_text("secret")
    os.environ["SOME_SECRET"] = "secret"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield {"secret": str(secret), "variable": "SOME_SECRET", "port": listener.getsockname()[1], "pid": os.getpid()}
    del os.environ["SOME_SECRET"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_attack_gets_through(sandbox: Sandbox, places: dict[str, object], kind: str):
    """Every third attack of a kind, and those that once got through; all of them run with `--full`, one by one."""
    names = [name for name, attack in KINDS[kind].items() if not attack.hangs]
    chosen = names if kind == "leave" else [name for i, name in enumerate(names) if i % 3 == 0 or name in _ONCE_THROUGH]
    assert [name for name in chosen if ATTACKS[name].run(sandbox, places)[1]] == []
    assert sandbox.run_tests(SQUARE, TESTS).passed


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if not attack.hangs])
def test_an_attack_scores_0_and_leaves_nothing(sandbox: Sandbox, places: dict[str, object], name: str):
    idle = descendants(os.getpid())
    _, through = ATTACKS[name].run(sandbox, places)
    assert not through
    assert len(descendants(os.getpid())) == len(idle)
    assert sandbox.run_tests(SQUARE, TESTS).passed


@pytest.mark.parametrize(
    "name",
    [
        name if name in _QUICK else pytest.param(name, marks=pytest.mark.full)
        for name, attack in ATTACKS.items()
        if attack.hangs
    ],
)
def test_a_hang_is_reaped_in_half_a_second_after_its_deadline(sandbox: Sandbox, places: dict[str, object], name: str):
    idle, began = descendants(os.getpid()), time.monotonic()
    outcome, _ = ATTACKS[name].run(sandbox, places)
    assert outcome.ended == "timeout"
    assert time.monotonic() - began < 1.5 + _waiting_for_a_core()
    assert len(descendants(os.getpid())) <= len(idle)
    assert sandbox.run_tests(SQUARE, TESTS).passed


def _waiting_for_a_core() -> float:
    """Return seconds to allow where others use the machine: those by which a sleep of 50 ms is late, many times."""
    began = time.monotonic()
    time.sleep(0.05)
    return 20 * (time.monotonic() - began - 0.05) + os.getloadavg()[0] / 10


def test_attacks_would_get_through_without_walls(places: dict[str, object]):
    """The sources do what they say: run here, without walls, those that only read succeed."""
    for name in ("read a secret file", "read an environment secret", "open a socket"):
        space: dict[str, object] = {}
        exec(ATTACKS[name].fill(places), space)
        exec(TESTS, space)
    assert len(ATTACKS) >= 110
    for attack in ATTACKS.values():
        if attack.tests != TESTS:  # which the right answer passes
            space = {}
            exec(f"{SQUARE}\n{attack.prelude}\n{attack.tests}", space)


def test_the_documentation_lists_every_attack(checkout: Path):
    page = (checkout / "docs" / "benchmarks" / "sandbox.md").read_text()
    table = page.partition("## The attacks, one by one")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["attack", *ATTACKS]


@pytest.mark.parametrize("body", ["pass", "...", "'Return the square.'", "raise NotImplementedError('yours')"])
def test_a_function_that_the_prelude_leaves_to_the_answer_is_the_answer_s(sandbox: Sandbox, body: str):
    prelude = f"import math\ndef solve(x):\n    {body}\ndef same(a, b):\n    return a == b\n"
    assert sandbox.run_tests(SQUARE, "assert same(solve(3), math.isqrt(81))", prelude=prelude).passed


def test_programs_and_functions(sandbox: Sandbox):
    assert sandbox.run_script("print(int(input()) ** 2)", "12").output == "144\n"
    assert sandbox.run_script("import sys; sys.exit(3)", "").passed is False
    failed = sandbox.run_script("1 / 0", "")
    assert (failed.passed, failed.error) == (False, "ZeroDivisionError: division by zero")
    assert sandbox.run_tests("def f(a, *, b): return {a: (b, {1})}", "assert f(2, b=[3]) == {2: ([3], {1})}").passed
    raised = "try:\n    f()\nexcept KeyError:\n    pass\nelse:\n    assert False"
    assert sandbox.run_tests("def f(): return {}[1]", raised).passed
    assert (
        sandbox.run_tests("def g(): pass", "assert f() is None", names=["f"]).error == "_AnswerError: f is not defined"
    )
    assert (
        sandbox.run_tests("def f(x): return h(x)", "assert f(1) == g(1)", prelude="def g(x): return x").passed is False
    )


@pytest.mark.parametrize(
    "value",
    [None, True, 1, -1.5, "é\ud800", b"\x00", [1, (2, {3})], {(1, 2): [None]}, frozenset({1}), 1 + 2j, 10**40, {}],
)
def test_values_keep_their_types(value: object):
    back = decode(encode(value))
    assert back == value and type(back) is type(value)


@pytest.mark.slow
@pytest.mark.parametrize("value", [object(), len, iter([]), Outcome("done")])
def test_what_is_no_data_is_refused(value: object):
    with pytest.raises(TypeError, match="is not data"):
        encode(value)
