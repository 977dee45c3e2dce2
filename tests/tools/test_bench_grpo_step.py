"""The step protocol with real subprocesses, the arithmetic of the result, the command's errors."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.bench import grpo_step as bench
from tools.bench.grpo_job import GrpoJob, digit_share
from tools.bench.peers.environments import (
    PEERS,
    EnvironmentFailed,
    Peer,
    UnknownPeer,
    ensure_environment,
    find_interpreter,
    find_peers,
)
from tools.bench.step_worker import StepWorker, WorkerError
from tools.cli import EXIT_USER_ERROR, main

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"

# A whole worker: five numbers of CPU work a step, and a library that prints where it should not.
WORKER = """
import sys
from step_protocol import StepServer
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
    """Writes tiny workers into a folder and starts them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def command(
        self, name: str = "tiny", work: int = 200_000, before_reply: str = "pass"
    ) -> bench.Command:
        script = self.folder / f"{name}.py"
        script.write_text(
            WORKER.format(
                work=work, before_reply=before_reply, end_marker=str(self.folder / f"{name}.end")
            )
        )
        environ = bench.worker_environ(PYTHONPATH=str(Path(bench.__file__).parent))
        return bench.Command((sys.executable, str(script)), environ)

    def start(self, before_reply: str = "pass") -> StepWorker:
        made = self.command(before_reply=before_reply)
        return StepWorker("tiny", made.argv, made.environ, self.folder / "tiny.log", self.folder)


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
    assert [step["reward"] for step in results["ours"].steps] == [
        (first + index) / 10 for index in range(3)
    ]
    result = bench.summarise(results, 3)
    assert set(result["peers"]) == {"good"} and set(result["errors"]) == {"bad", "never"}
    assert "gave up" in result["errors"]["bad"] and "no such device" in result["errors"]["never"]
    assert result["best_peer"] == "good"
    assert 0 < result["ratio_to_best_peer"] < 1  # the peer does fifteen times the work
    assert any("left out: never" in line for line in said)


def test_ratio_is_the_median_over_rounds_against_the_best_peer() -> None:
    results = {
        "ours": _measured([1.0, 3.0, 1.2]),
        "slow": _measured([1.9, 9.0, 9.0]),  # quicker than the best in one round, not over all
        "best": _measured([2.0, 4.0, 2.0]),
    }
    result = bench.summarise(results, 3)
    assert result["best_peer"] == "best"
    assert result["ratio_to_best_peer"] == pytest.approx(0.6)  # of 0.5, 0.75, 0.6
    assert result["ours_cpu_s_per_step"] == 1.2
    assert result["ours_gen_tok_per_cpu_s"] == pytest.approx(100 / 0.6)
    assert result["ours_first_step_s"] == 5.0
    best = result["peers"]["best"]
    assert best["cpu_s_per_step"] == 2.0 and best["wall_s_per_step"] == 4.0
    assert best["gen_tok_per_cpu_s"] == pytest.approx(100.0)
    assert best["version"] == "x 1" and best["first_step_s"] == 5.0
    assert set(result["machine"]) == {"cores", "cpu", "load"} and result["machine"]["cores"] >= 1
    assert json.loads(json.dumps(result)) == result
    assert [row[0] for row in bench.rows(result)] == ["ours", "slow", "best"]


def test_without_peers_there_is_no_ratio_and_without_ours_no_success() -> None:
    alone = bench.summarise({"ours": _measured([1.0])}, 1)
    assert alone["peers"] == {} and alone["ratio_to_best_peer"] is None
    assert bench.succeeded(alone, []) and not bench.succeeded(alone, [PEERS["trl"]])
    failed = bench.Measured(error="ours: ended")
    peers_only = bench.summarise({"ours": failed, "trl": _measured([2.0])}, 1)
    assert peers_only["ours_cpu_s_per_step"] is None and peers_only["ratio_to_best_peer"] is None
    assert not bench.succeeded(peers_only, [PEERS["trl"]])
    assert [row[0] for row in bench.rows(peers_only)] == ["trl"]


def test_unknown_names_are_refused_with_the_nearest_before_anything_runs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UnknownPeer, match="no peer 'tunics'; did you mean 'tunix'"):
        find_peers(["trl", "tunics"])
    assert main(["bench", "grpo_step", "--peers", "trl,tunics"]) == EXIT_USER_ERROR
    assert "no peer 'tunics'; did you mean 'tunix'" in capfd.readouterr().err
    assert main(["bench", "grpo-step"]) == EXIT_USER_ERROR
    assert "no benchmark 'grpo-step'; did you mean 'grpo_step'" in capfd.readouterr().err


def test_environment_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    no_python = Peer("old", "old.py", pythons=("3.99",), requirements=())
    with pytest.raises(EnvironmentFailed, match=r"old: needs Python 3\.99.*pyenv install 3\.99"):
        ensure_environment(no_python, lambda _: None, tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EnvironmentFailed, match="cannot write to .*file"):
        ensure_environment(no_python, lambda _: None, blocked / "peers")


def test_environment_is_made_once_and_again_after_a_failure(tmp_path: Path) -> None:
    wheel = str(tmp_path / "absent-1.0-py3-none-any.whl")
    broken = Peer("peer", "peer.py", (HERE,), requirements=(wheel,))
    with pytest.raises(EnvironmentFailed, match="(?s)peer: .*pip install.* failed.*absent"):
        ensure_environment(broken, lambda _: None, tmp_path)
    said: list[str] = []
    peer = Peer("peer", "peer.py", (HERE,), requirements=())
    python = ensure_environment(peer, said.append, tmp_path)
    assert python.exists() and len(said) == 1
    assert ensure_environment(peer, said.append, tmp_path) == python
    assert len(said) == 1  # found complete


def test_interpreter_that_exists_but_refuses_to_run_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "python3.98"
    shim.write_text("#!/bin/sh\necho 'version not selected' >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    _, version = find_interpreter(["3.98", HERE])
    assert version == HERE


def test_job_is_the_same_for_all_and_differs_by_step() -> None:
    job = GrpoJob()
    assert job.rollouts == 64 and job.new_tokens_per_step == 4096
    assert job.prompt_texts(3) == job.prompt_texts(3) != job.prompt_texts(4)
    assert {len(text) for text in job.prompt_texts(0)} == {32}
    assert digit_share("1a2b") == 0.5 and digit_share("") == 0.0 and digit_share("²") == 0.0


def _measured(cpu: list[float]) -> bench.Measured:
    steps = [
        {"cpu_s": c, "wall_s": 2 * c, "gen_cpu_s": c / 2, "new_tokens": 100, "reward": 0.5}
        for c in cpu
    ]
    ready = {"first_step_s": 5.0, "start_s": 9.0, "version": "x 1", "parameters": 7}
    return bench.Measured(ready=ready, steps=steps)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
