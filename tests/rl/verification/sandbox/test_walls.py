"""Boxes are apart on machines of each kind, and nothing is left of a box."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.verification.sandbox.attacks import ATTACKS, KINDS, TESTS
from rl.verification.sandbox.sandbox import Sandbox, SandboxError
from tests.rl.verification.isolation import skip_without_isolation
from tests.rl.verification.processes import descendants

SQUARE = "def solve(x):\n    return x * x\n"
_NO_NAMESPACES = "import os\ndef unshare(flags): raise OSError(1, 'not here')\nos.unshare = unshare\n"
_NO_LANDLOCK = "from rl.verification.sandbox import landlock\nlandlock._OTHERS_NEED = landlock._ROOT_NEEDS = 99\n"
_NO_FILTER = "from rl.verification.sandbox import calls\ncalls.CallFilter.load = lambda self: None\n"


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make the machine refuse something: lines that each warm process runs first."""
    lines: list[str] = []
    monkeypatch.setattr("rl.verification.sandbox.warm_process._BEFORE", _Joined(lines))
    yield lines


class _Joined:
    def __init__(self, lines: list[str]):
        self._lines = lines

    def __str__(self) -> str:
        return "".join(self._lines)


@pytest.fixture(params=["namespaces", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox.Config(deadline_s=2.0, backend=request.param).build() as built:
        skip_without_isolation(built)
        yield built


def test_without_namespaces_landlock_takes_their_place(sandbox: Sandbox, before: list[str]):
    before.append(_NO_NAMESPACES)
    with Sandbox.Config(backend="landlock").build() as wanted:
        skip_without_isolation(wanted)
    with Sandbox.Config().build() as found:
        assert found.isolation == "landlock, seccomp"
        assert found.run_tests(SQUARE, TESTS).passed
        assert (
            found.run_script("import threading, asyncio; asyncio.run(asyncio.sleep(0)); print(1)", "").output == "1\n"
        )
        with found.session() as session:
            session.run("x = 1")
            assert session.run("x").output == "1\n"
    with Sandbox.Config(backend="namespaces").build() as refused, pytest.raises(SandboxError, match="not here"):
        refused.run_script("print(1)", "")


def test_a_machine_without_either_is_refused_unless_allowed(before: list[str]):
    before += [_NO_NAMESPACES, _NO_LANDLOCK]
    refusal = "cannot be isolated.*not here; .*no Landlock of version 99.*allow_unisolated"
    with Sandbox.Config().build() as sandbox, pytest.raises(SandboxError, match=refusal):
        sandbox.run_script("print(1)", "")
    with Sandbox.Config(allow_unisolated=True, deadline_s=1.0).build() as sandbox:
        assert sandbox.isolation == "seccomp"
        assert sandbox.run_tests(SQUARE, TESTS).passed
        assert sandbox.run_script("while True: pass", "", deadline_s=0.2).ended == "timeout"
        calls = [
            "make a segment of shared memory",
            "make a queue of messages",
            "make a POSIX queue",
            "make a semaphore",
        ]
        for name in [*calls, "memory of an unnamed file", "open a Unix socket", "send a descriptor"]:
            assert not ATTACKS[name].run(sandbox, {})[1]


def test_a_machine_without_filters_of_calls_is_refused(before: list[str]):
    before.append("from rl.verification.sandbox import calls\ncalls._MODE_FILTER = 99\n")
    with Sandbox.Config().build() as sandbox, pytest.raises(SandboxError, match="no seccomp filters"):
        sandbox.run_script("print(1)", "")


def test_queues_and_shared_memory_are_apart_without_the_filter_too(before: list[str]):
    before.append(_NO_FILTER)
    with Sandbox.Config(backend="namespaces").build() as sandbox:
        skip_without_isolation(sandbox)
        assert ATTACKS["make a segment of shared memory"].run(sandbox, {})[1]  # the filter is off
        names = ["leave a segment of shared memory", "leave a queue of messages", "leave a semaphore"]
        assert [name for name in names if ATTACKS[name].run(sandbox, {})[1]] == []


def test_python_that_cannot_be_read_behind_the_walls_is_refused(before: list[str]):
    before.append(
        "from rl.verification.sandbox import landlock\nlandlock.SYSTEM = ()\nimport sys, json\n"
        "json.__file__ = '/etc/hostname'\n"
    )
    with Sandbox.Config(backend="landlock").build() as sandbox, pytest.raises(SandboxError, match="hostname"):
        sandbox.run_script("print(1)", "")


def test_memory_is_returned_after_a_box(sandbox: Sandbox):
    """Every attack on memory outside of a process's limit, several times; what is lost of it would be a gigabyte."""
    lost = _shared_mb()
    for _ in range(3):
        for name in ("leave a segment of shared memory", "memory of an unnamed file", "fill the disk"):
            ATTACKS[name].run(sandbox, {})
    time.sleep(0.2)
    assert _shared_mb() - lost < 200


def _shared_mb() -> float:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Shmem"].split()[0]) / 1024


def test_no_process_or_zombie_is_left_of_an_answer_or_of_its_caller(sandbox: Sandbox):
    idle = len(descendants(os.getpid()))
    for name in ("leave a daemon behind", "leave orphans", "leave zombies", "two processes that answer"):
        ATTACKS[name].run(sandbox, {})
        assert len(descendants(os.getpid())) == idle, name
    backend = sandbox.cfg.backend
    source = "import os, time\nif os.fork() == 0: time.sleep(1000)\ntime.sleep(1000)"
    program = (
        "import os, threading, time\nfrom rl.verification.sandbox.sandbox import Sandbox\n"
        f"sandbox = Sandbox.Config(backend={backend!r}, deadline_s=60).build()\nsandbox.isolation\n"
        f"threading.Thread(target=sandbox.run_script, args=({source!r}, ''), daemon=True).start()\n"
        "time.sleep(0.5)\nprint(os.getpid(), flush=True)\ntime.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        below = descendants(int(caller.stdout.readline()))
        assert len(below) >= 3
        caller.kill()
    end = time.monotonic() + 5.0
    while (left := [pid for pid in below if _runs(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == []


def _runs(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_boxes_end_with_the_sandbox(sandbox: Sandbox):
    idle = set(descendants(os.getpid()))
    with Sandbox.Config(backend=sandbox.cfg.backend).build() as another:
        session = another.session()
        session.run("import os, time")
        session.run("if os.fork() == 0: time.sleep(1000)")
        mine = set(descendants(os.getpid())) - idle
        assert len(mine) >= 3
    end = time.monotonic() + 2.0
    while (left := [pid for pid in mine if _runs(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    assert left == []


@pytest.mark.full
def test_attacks_fail_as_another_user_than_root():
    """All kinds, by a process without root's rights but that of reading, where Python may lie in root's folder."""
    if os.geteuid() != 0:
        pytest.skip("it is not root: the other tests run as another user already")
    names = [name for kind in KINDS.values() for name, attack in kind.items() if not attack.hangs]
    program = (
        "import os\nfrom rl.verification.sandbox.attacks import ATTACKS\n"
        "from rl.verification.sandbox.sandbox import Sandbox\n"
        f"places = {{'secret': {str(Path.home() / 'secret')!r}, 'variable': 'HOME', 'port': 9, 'pid': os.getpid()}}\n"
        "os.environ['HOME'] = '/'\n"
        "for backend in ('namespaces', 'landlock'):\n"
        "    with Sandbox.Config(backend=backend, deadline_s=2).build() as sandbox:\n"
        f"        print([name for name in {names!r} if ATTACKS[name].run(sandbox, places)[1]])\n"
    )
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    done = subprocess.run([*user, *rights, sys.executable, "-B", "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n[]\n", 0), done.stderr[-500:]


def test_no_folder_is_left_behind(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Sandbox.Config(backend=sandbox.cfg.backend).build() as another:
        assert another.run_script("print(1)", "").output == "1\n"
        assert another.isolation == sandbox.isolation
        assert list(tmp_path.iterdir()) == []  # while it runs, so that a kill leaves none either


def test_boxes_share_nothing(sandbox: Sandbox):
    sandbox.run_script("open('note', 'w').write('1')", "")
    sandbox.run_script("import math; math.pi = 3", "")
    assert sandbox.run_script("import numpy, math; print(numpy.ones(2).sum(), math.pi > 3)", "").output == "2.0 True\n"
    if sandbox.cfg.backend == "namespaces":
        source = "import os, tempfile; tempfile.TemporaryFile(); print(os.listdir('.'))"
        assert sandbox.run_script(source, "").output == "[]\n"
