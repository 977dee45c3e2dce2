"""A command forks its driver and what holds Ray, starts again what is killed, and ends as its driver does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

COMMAND = """
import os, signal, sys, time
from rl.runtime.node.drivers import AGAIN, kept_ray, run_drivers

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def keep(kept):
    kept.tell(keeper=os.getpid(), raylet=7)
    say("ray", os.getpid())
    time.sleep(60)

class Observer:
    step = 0
    def begin_ray(self): say("begin")
    def look(self, driver, ray): return False
    def died(self, driver, cause): say("died", driver, cause)

assert run_drivers(keep, Observer())
kept = kept_ray()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
found = kept.wait()
if "AGAIN" in os.environ and kept.number == 1:
    os._exit(AGAIN)
say("driver", os.getpid(), kept.number, found["raylet"], kept.token)
again = kept.wait()
say("again", again["keeper"])
time.sleep(60)
"""


class Lines:
    """Lines of a command, by their first words."""

    def __init__(self, process: "subprocess.Popen[bytes]", path: Path):
        self.process, self.path = process, path

    def wait(self, word: str, count: int = 1) -> list[str]:
        """Wait for so many lines that begin with a word, and return the last one's other words."""
        give_up = time.monotonic() + 60
        while True:
            found = [line.split()[1:] for line in self.path.read_text().splitlines() if line.split()[0] == word]
            if len(found) >= count:
                return found[count - 1]
            assert time.monotonic() < give_up and self.process.poll() is None, self.path.read_text()
            time.sleep(0.01)


@pytest.fixture
def command(tmp_path: Path, checkout: Path) -> Callable[[], Lines]:
    return lambda: _start(tmp_path / "said", checkout)


def _start(path: Path, checkout: Path) -> Lines:
    with open(path, "wb") as said:
        return Lines(subprocess.Popen([sys.executable, "-c", COMMAND], cwd=checkout, stdout=said), path)


@contextmanager
def gone(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Expect that no child of a process outlives the block, nor itself."""
    children = psutil.Process(process.pid).children(recursive=True)
    try:
        yield
        process.wait(20)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
    finally:
        for one in (*children, psutil.Process(process.pid)) if process.poll() is None else children:
            if one.is_running():
                one.kill()


def test_a_killed_driver_is_forked_again_and_finds_the_same_ray(command: Callable[[], Lines]) -> None:
    said = command()
    pid, number, raylet, token = said.wait("driver")
    os.kill(int(pid), signal.SIGKILL)
    assert said.wait("died") == [pid, "SIGKILL"]
    later, *rest = said.wait("driver", 2)
    assert later != pid and [number, *rest] == ["1", "2", raylet, token] and raylet == "7"
    with gone(said.process):
        said.process.terminate()  # is passed on
    assert said.process.returncode == 5, "it ends as its driver does"


def test_a_driver_that_has_lost_its_raylet_is_followed_by_another(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGAIN", "1")
    said = command()
    assert said.wait("driver")[1] == "2"
    with gone(said.process):
        said.process.terminate()
    assert said.process.returncode == 5 and "died" not in said.path.read_text()


def test_a_killed_keeper_is_followed_by_another_for_the_same_driver(command: Callable[[], Lines]) -> None:
    said = command()
    said.wait("driver")
    [keeper] = said.wait("ray")
    os.kill(int(keeper), signal.SIGKILL)
    [after] = said.wait("again")
    assert said.wait("ray", 2) == [after] and after != keeper and said.wait("begin", 2) == []
    with gone(said.process):
        said.process.kill()  # the kernel ends the others


def test_a_driver_that_is_killed_again_and_again_ends_its_command(command: Callable[[], Lines]) -> None:
    said = command()
    for count in range(1, 6):
        pid = int(said.wait("driver", count)[0])
        with gone(said.process) if count == 5 else contextmanager(lambda: iter([None]))():
            os.kill(pid, signal.SIGKILL)
    assert said.process.returncode == -signal.SIGKILL
