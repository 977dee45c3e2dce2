"""Every attack scores 0 and leaves nothing running; what is right passes before, between and after."""

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.verification.sandbox.attacks import ATTACKS, TESTS
from rl.verification.sandbox.sandbox import Outcome, Sandbox, SandboxError
from rl.verification.sandbox.values import decode, encode
from tests.rl.verification.isolation import skip_without_isolation
from tests.rl.verification.processes import descendants

SQUARE = "def solve(x):\n    return x * x\n"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.Config(deadline_s=1.0).build() as built:
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


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if not attack.hangs])
def test_an_attack_scores_0_and_leaves_nothing(sandbox: Sandbox, places: dict[str, object], name: str):
    idle = descendants(os.getpid())
    _, through = ATTACKS[name].run(sandbox, places)
    assert not through
    assert len(descendants(os.getpid())) == len(idle)
    assert sandbox.run_tests(SQUARE, TESTS).passed


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.hangs])
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
    assert len(ATTACKS) >= 40


def test_the_documentation_lists_every_attack(checkout: Path):
    page = (checkout / "docs" / "concepts" / "sandbox.md").read_text()
    table = page.partition("## The attacks, one by one")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| ([\d.]+) \|$", table, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(ATTACKS)
    assert {name for name, ended, _ in rows if ended.startswith("timeout")} >= {
        name for name, attack in ATTACKS.items() if attack.hangs
    }


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


def test_no_folder_is_left_behind(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Sandbox.Config().build() as another:
        assert another.run_script("print(1)", "").output == "1\n"
        assert another.isolation == sandbox.isolation
        assert list(tmp_path.iterdir()) == []  # while it runs, so that a kill leaves none either


def test_boxes_share_nothing(sandbox: Sandbox):
    sandbox.run_script("open('note', 'w').write('1'); import math; math.pi = 3", "")
    assert (
        sandbox.run_script("import numpy, tempfile; tempfile.TemporaryFile(); print(numpy.ones(2).sum())", "").output
        == "2.0\n"
    )
    assert sandbox.run_script("import os, math; print(os.listdir('.'), math.pi > 3)", "").output == "[] True\n"


@pytest.mark.parametrize(
    "value",
    [None, True, 1, -1.5, "é\ud800", b"\x00", [1, (2, {3})], {(1, 2): [None]}, frozenset({1}), 1 + 2j, 10**40, {}],
)
def test_values_keep_their_types(value: object):
    back = decode(encode(value))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("value", [object(), len, iter([]), Outcome("done")])
def test_what_is_no_data_is_refused(value: object):
    with pytest.raises(TypeError, match="is not data"):
        encode(value)


def test_a_machine_without_isolation_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch):
    code = "raise OSError(1, 'not here')"
    monkeypatch.setattr(
        "rl.verification.sandbox.warm_process._BEFORE", f"import os\ndef unshare(flags): {code}\nos.unshare = unshare\n"
    )
    with Sandbox.Config().build() as sandbox, pytest.raises(SandboxError, match="cannot be isolated.*allow_unisolated"):
        sandbox.run_script("print(1)", "")
    with Sandbox.Config(allow_unisolated=True).build() as sandbox:
        assert sandbox.isolation == "none"
        assert sandbox.run_tests(SQUARE, TESTS).passed
        assert sandbox.run_script("while True: pass", "", deadline_s=0.2).ended == "timeout"
