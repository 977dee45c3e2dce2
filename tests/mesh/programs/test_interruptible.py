"""Work in threads: results in order, the first error, and Ctrl-C that waits for nothing."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mesh.programs.interruptible import map_in_threads

LONG = (
    "import time\nfrom mesh.programs.interruptible import map_in_threads\n"
    "def work(n):\n    print('began', flush=True)\n    time.sleep(600)\n"
    "map_in_threads(work, range(50), 2)\n"
)
BESIDE = LONG.replace("map_in_threads(", "with begun_in_threads(").replace(", 2)\n", ", 2):\n    time.sleep(600)\n")
BESIDE = BESIDE.replace("import map_in_threads", "import begun_in_threads")


def test_results_are_in_the_order_of_the_items_and_so_many_run_at_once() -> None:
    running, most = set[int](), list[int]()

    def work(number: int) -> int:
        running.add(number)
        most.append(len(running))
        time.sleep(0.02 * (number % 3))
        running.discard(number)
        return number * number

    assert map_in_threads(work, range(20), 4) == [number * number for number in range(20)]
    assert 1 < max(most) <= 4
    assert map_in_threads(work, []) == []


def test_the_first_error_is_raised_and_the_rest_is_left() -> None:
    begun = list[int]()

    def work(number: int) -> None:
        begun.append(number)
        if number == 3:
            raise ValueError("three")
        time.sleep(0.01)

    with pytest.raises(ValueError, match="three"):
        map_in_threads(work, range(1000), 2)
    assert len(begun) < 20


def seconds_to_end(command: Sequence[str], begun: Callable[["subprocess.Popen[str]"], object]) -> tuple[float, int]:
    """Interrupt a command once `begun` returns; returns seconds to its end, and its status."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        begun(process)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        return time.monotonic() - began, process.returncode
    finally:
        process.kill()


@pytest.mark.parametrize("program", [LONG, BESIDE])
def test_ctrl_c_waits_for_no_work(program: str) -> None:
    begun = lambda process: process.stdout.readline()  # noqa: E731
    seconds, status = seconds_to_end([sys.executable, "-c", program], begun)
    assert seconds < 30 and status in (1, 130, -signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_of_an_evaluation_waits_for_no_silent_endpoint(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(120)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        words = ["eval", url, "--set", "model=x", "--tasks", "chain_sum", "--problems", "4", "--out", tmp_path / "out"]
        command = [sys.executable, "-m", "tools.cli", *map(str, words)]
        seconds, status = seconds_to_end(command, lambda process: silent.accept())
        assert seconds < 30 and status == 130


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "service"])
def test_ctrl_c_waits_for_no_server_that_is_being_made(tmp_path: Path, command: str) -> None:
    program = (
        "import os, sys, time\nos.chdir(sys.argv[1])\nfrom tools.cli import main\n"
        f"from tools.commands.serving import {command} as module\n"
        "def build(*_):\n    print('began', flush=True)\n    time.sleep(600)\n"  # minutes of compilation
        f"module._build = build\nsys.exit(main(['{command}', 'demo', '--random-weights', '--port', '0']))"
    )
    begun = lambda process: process.stdout.readline()  # noqa: E731
    seconds, status = seconds_to_end([sys.executable, "-c", program, str(tmp_path)], begun)
    assert seconds < 30 and status == 130
