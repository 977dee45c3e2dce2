"""Workers are forked from an interpreter that has imported what they need; without one, they start by themselves."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl.runtime.node.start import raylet_command
from rl.runtime.node.warm import serve_node, teach
from rl.runtime.node.worker import VARIABLE, forked

NODE = """
import sys
from rl.runtime.node.warm import fork_server, run_worker
if not fork_server(sys.argv[1], ["colorsys"]):
    run_worker()
print(flush=True)
sys.stdin.read()
"""
WORKER = """
import os, sys, time
print("colorsys" in sys.modules, sys.argv[1:], os.environ["MINE"], os.getcwd(), os.getpid(), flush=True)
if "sleep" in sys.argv:
    time.sleep(60)
sys.exit(3)
"""
ASKER = "import sys; from rl.runtime.node.worker import forked; sys.exit(forked(sys.argv[1], sys.argv[2:]))"


@pytest.fixture
def node(tmp_path: Path, checkout: Path) -> Iterator["subprocess.Popen[str]"]:
    """A node with a warm interpreter that listens at `socket`."""
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-c", NODE, str(tmp_path / "socket")]
    with subprocess.Popen(command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None and started.stdout.readline()
        yield started
        started.kill()


def ask(folder: Path, checkout: Path, *arguments: str, own_session: bool = False) -> "subprocess.Popen[str]":
    """Start a process that asks for a worker, as a raylet does."""
    command = [sys.executable, "-c", ASKER, str(folder / "socket"), str(folder / "worker.py"), *arguments]
    environment = {**os.environ, "MINE": "yes", "PYTHONPATH": str(checkout)}
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "start_new_session": own_session}
    return subprocess.Popen(command, cwd=folder, env=environment, **given)


def test_a_worker_has_what_its_asker_has_and_ends_with_it(
    node: "subprocess.Popen[str]", tmp_path: Path, checkout: Path
):
    assert "MINE" not in psutil.Process(node.pid).environ()
    first = ask(tmp_path, checkout, "a", "b")
    output, _ = first.communicate(timeout=60)
    warm, arguments, variable, folder, pid = output.replace("['a', 'b']", "['a','b']").split()
    assert (warm, arguments, variable, folder) == ("True", "['a','b']", "yes", str(tmp_path))
    assert first.returncode == 3 and int(pid) != first.pid
    second = ask(tmp_path, checkout, "sleep")
    assert second.stdout is not None
    worker = psutil.Process(int(second.stdout.readline().split()[-1]))
    [server] = psutil.Process(node.pid).children()
    assert worker.parent() == server and os.getpgid(worker.pid) == os.getpgid(second.pid)
    worker.send_signal(signal.SIGTERM)
    assert second.wait(20) == 128 + signal.SIGTERM
    third = ask(tmp_path, checkout, "sleep", own_session=True)  # as that of a raylet, which was started beside
    assert third.stdout is not None
    worker = psutil.Process(int(third.stdout.readline().split()[-1]))
    assert os.getpgid(worker.pid) == worker.pid, "a raylet that ends its group ends nothing else"
    third.kill()
    third.wait(20)
    worker.wait(20)
    node.kill()
    server.wait(20)
    assert forked(str(tmp_path / "socket"), [str(tmp_path / "worker.py")]) is None


OF_JOB = """
import os, sys
print(*(name in sys.modules for name in ("ray", "colorsys", "tabnanny")), os.environ["RAY_JOB_ID"], os.getppid())
"""


@pytest.mark.full  # imports all that roles need
def test_workers_of_a_job_are_forked_from_one_interpreter_that_has_imported_ray_for_it(
    node: "subprocess.Popen[str]", tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "worker.py").write_text(OF_JOB)
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path / "socket"))
        teach(["tabnanny", "no_such_package"])
    found: list[list[str]] = []
    for job, raylet in (("01000000", "1"), ("01000000", "2"), ("02000000", "2"), ("03000000", "2")):
        monkeypatch.setenv("RAY_JOB_ID", job)
        monkeypatch.setenv("RAY_RAYLET_PID", raylet)
        found.append(ask(tmp_path, checkout).communicate(timeout=120)[0].split())
    assert [words[:4] for words in found] == [
        ["True"] * 3 + [job] for job in ("01000000", "01000000", "02000000", "03000000")
    ]
    first, again, other, later = (int(words[4]) for words in found)
    assert first == again and len({first, other, later}) == 3
    [warm] = psutil.Process(node.pid).children()
    psutil.wait_procs([child for child in warm.children() if child.pid not in (other, later)], timeout=20)
    assert {child.pid for child in warm.children()} == {other, later}, "that of an earlier job has ended"


def test_variables_that_imports_have_set_are_those_of_a_worker_which_was_given_no_others(
    tmp_path: Path, checkout: Path
):
    """jax, for one, adds to LIBTPU_INIT_ARGS when it is imported, and a worker does not import it again."""
    (tmp_path / "sets.py").write_text("import os; os.environ |= {'FIRST': 'set', 'SECOND': 'set', 'MINE': 'set'}")
    (tmp_path / "worker.py").write_text("import os; print(*map(os.environ.get, ('FIRST', 'SECOND', 'MINE')))")
    command = [sys.executable, "-c", NODE.replace("colorsys", "sets"), str(tmp_path / "socket")]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{checkout}", "SECOND": "2"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stdout.readline()
        os.environ["SECOND"] = "2"
        try:
            output, _ = ask(tmp_path, checkout).communicate(timeout=60)
        finally:
            del os.environ["SECOND"]
        assert output.split() == ["set", "set", "yes"]
        started.kill()


@pytest.mark.parametrize("modules", ["ray", "holds_a_thread"])
def test_an_interpreter_that_must_not_be_forked_is_none(modules: str, tmp_path: Path, checkout: Path):
    (tmp_path / "ray.py").touch()
    (tmp_path / "holds_a_thread.py").write_text("import threading; threading.Timer(60, print).start()")
    command = [sys.executable, "-c", NODE.replace("colorsys", modules), str(tmp_path / "socket")]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{checkout}"}
    given: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **given) as started:
        assert started.stderr is not None
        assert "workers start by themselves" in started.stderr.readline()
        assert forked(str(tmp_path / "socket"), ["never.py"]) is None
        started.kill()


def test_an_interpreter_that_cannot_import_is_none(tmp_path: Path, checkout: Path):
    """A connection that waits for it is told, and the worker starts by itself."""
    code = NODE.replace("colorsys", "no_such_module")
    command = [sys.executable, "-c", code, str(tmp_path / "socket")]
    with subprocess.Popen(command, cwd=checkout, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        while not (tmp_path / "socket").exists():
            time.sleep(0.01)
        assert forked(str(tmp_path / "socket"), ["never.py"]) is None
        assert started.poll() is None
        started.terminate()


def test_a_raylet_starts_no_agents_and_its_workers_come_from_the_warm_interpreter(monkeypatch: pytest.MonkeyPatch):
    from ray._private.workers import default_worker

    workers = f"--python_worker_command=python setup_worker.py {default_worker.__file__} --node-ip-address=127.0.0.1"
    given = ["raylet", workers, "--metrics-agent-port=0", "--runtime_env_agent_command=python main.py", "--head"]
    monkeypatch.delenv(VARIABLE, raising=False)
    found = raylet_command(given)
    assert found[:3] == ["raylet", workers, "--head"]
    assert not any("main.py" in word for word in found) and "--metrics-agent-port=-1" in found
    monkeypatch.setenv(VARIABLE, "/somewhere/socket")
    assert "/rl/runtime/node/worker.py --node-ip" in raylet_command(given)[1]


def test_a_process_with_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch):
    """A lock that a thread holds at the fork, nobody releases in the child."""
    for name in (VARIABLE, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    thread = threading.Thread(target=(done := threading.Event()).wait)
    thread.start()
    try:
        children = set(psutil.Process().children())
        with serve_node():
            assert VARIABLE not in os.environ
            assert set(psutil.Process().children()) <= children
    finally:
        done.set()
        thread.join()


KILLED = """
import os, sys, time
from rl.runtime.node import warm
warm.MODULES = ("colorsys",)
with warm.serve_node():
    print(os.environ[warm.VARIABLE], flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_socket_whose_driver_was_killed_goes_with_the_next_driver(checkout: Path):
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "RAY_ADDRESS")}
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": environment, "cwd": checkout}
    with subprocess.Popen([sys.executable, "-c", KILLED, "60"], **given) as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip()).parent
        killed.kill()
    assert left.is_dir() and left.name.startswith("axl-warm-"), "kill -9 cleans nothing up"
    done = subprocess.run([sys.executable, "-c", KILLED, "0"], check=True, timeout=60, **given)
    assert not left.exists() and not Path(done.stdout.strip()).parent.exists()
