"""The step protocol with real subprocesses, and systems that take turns."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.bench.harness import interleave as bench
from tools.bench.harness.processes import Command, worker_environ
from tools.bench.harness.protocol import GENERATION_FIELDS
from tools.bench.harness.worker import StepWorker, WorkerError

# A whole worker: five numbers of CPU work a step, and a library that prints where it should not.
WORKER = """
import sys
from harness.protocol import StepServer
server = StepServer("tiny 1.0", parameters=7)
server.begin()
index = 0
while True:
    print("a library prints to stdout")
    with server.generation():
        sum(range({work}))
    server.record(new_tokens=10, reward=index / 10)
    {before_reply}
    if not server.step_done():
        break
    index += 1
open({end_marker!r}, "w").write(str(index))
"""


class Tiny:
    """Write tiny workers into a folder and start them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def command(self, name: str = "tiny", work: int = 200_000, before_reply: str = "pass") -> Command:
        script = self.folder / f"{name}.py"
        script.write_text(
            WORKER.format(work=work, before_reply=before_reply, end_marker=str(self.folder / f"{name}.end"))
        )
        environ = worker_environ(PYTHONPATH=str(Path(bench.__file__).parents[1]))
        return Command((sys.executable, str(script)), environ)

    def start(self, before_reply: str = "pass") -> StepWorker:
        return self.start_command(self.command(before_reply=before_reply))

    def start_command(self, made: Command) -> StepWorker:
        return StepWorker("tiny", made, self.folder / "tiny.log", self.folder)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    yield Tiny(tmp_path)


def test_one_request_is_one_step_and_the_rest_is_idle(tiny: Tiny) -> None:
    with tiny.start() as worker:
        ready = worker.wait_ready(30)
        assert ready["version"] == "tiny 1.0" and ready["parameters"] == 7
        assert 0 < ready["first_step_s"] < ready["start_s"]
        first = worker.step(30)
        started = time.perf_counter()
        time.sleep(0.2)
        second = worker.step(30)
        elapsed = time.perf_counter() - started
    assert [first["reward"], second["reward"]] == [0.1, 0.2]  # the ready line was step 0
    assert second["new_tokens"] == 10  # of this step, not summed over steps
    assert 0 < second["gen_cpu_s"] <= second["cpu_s"]
    assert second["wall_s"] <= elapsed - 0.2  # the wait between two requests is in no step
    assert second["idle_cpu_s"] < 0.1
    assert (tiny.folder / "tiny.end").read_text() == "2"  # left its loop by itself when closed
    assert "a library prints to stdout" in (tiny.folder / "tiny.log").read_text()


def test_ended_worker_is_an_error_with_its_status_and_last_words(tiny: Tiny) -> None:
    with tiny.start("index < 1 or sys.exit('out of luck')") as worker:
        worker.wait_ready(30)
        with pytest.raises(WorkerError, match=r"(?s)tiny: ended with status 1.*out of luck"):
            worker.step(30)


def test_hanging_worker_is_an_error_and_is_killed_with_its_children(tiny: Tiny) -> None:
    hang = "index < 1 or (__import__('subprocess').Popen(['sleep', '600']), sys.stdin.read())"
    with tiny.start(hang) as worker:
        worker.wait_ready(30)
        with pytest.raises(WorkerError, match="no reply within 0.5 s"):
            worker.step(0.5)
        group = worker._process.pid
        worker.close(grace_s=0.1)
        deadline = time.monotonic() + 10  # the killed child is reaped by init, soon
        while _group_lives(group) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _group_lives(group)


def test_step_without_generation_or_reward_reports_neither(tiny: Tiny) -> None:
    made = tiny.command()
    script = Path(made.argv[1])
    script.write_text(
        script.read_text().replace("with server.generation():", "if True:").replace(", reward=index / 10", "")
    )
    with tiny.start_command(made) as worker:
        worker.wait_ready(30)
        assert set(worker.step(30, GENERATION_FIELDS)) == set(GENERATION_FIELDS)
        with pytest.raises(WorkerError, match="tiny: expected a line with .'gen_cpu_s', 'gen_wall_s', 'reward'."):
            worker.step(30)


def test_measure_takes_turns_and_goes_on_without_a_failed_worker(tiny: Tiny) -> None:
    fails = bench.WARM_UP_ROUNDS + 1
    said: list[str] = []
    results = bench.measure(
        {
            "ours": tiny.command("ours"),
            "good": tiny.command("good", work=3_000_000),
            "bad": tiny.command("bad", before_reply=f"index < {fails} or sys.exit('gave up')"),
            "never": tiny.command("never", before_reply="sys.exit('no such device')"),
        },
        steps=3,
        say=said.append,
    )
    assert [len(results[name].steps) for name in ("ours", "good")] == [3, 3]
    first = bench.WARM_UP_ROUNDS + 1  # the step that made the worker ready is step 0
    assert [step["reward"] for step in results["ours"].steps] == [(first + index) / 10 for index in range(3)]
    assert results["ours"].error is None and results["good"].error is None
    assert "gave up" in str(results["bad"].error) and "no such device" in str(results["never"].error)
    ours, good = results["ours"], results["good"]
    ratio = bench.ratio_over_rounds(ours, good, lambda step: step["cpu_s"])
    assert ratio is not None and 0 < ratio < 1  # the other does fifteen times the work
    assert any("left out: never" in line for line in said)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
