"""`axl watch`: frames of runs in every state, live on a terminal and without one, and of hostile files."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from axlearn_like.run.events import EventLog
from tests.tools.report.made_up_run import HOSTILE, write_run
from tests.tools.watch.test_standing import ROOT, stopped_in_the_middle
from tools.cli import EXIT_USER_ERROR, main
from tools.report import load_run
from tools.report.load import Run
from tools.watch.frame import frame, line, spark
from tools.watch.live import Follower

WATCH = [sys.executable, "-m", "tools.cli", "watch"]
CURSOR = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(run: Run, now: float | None = None, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))
    console.print(frame(run, now))
    return console.export_text()


def held(run: Path) -> Path:
    """Lock a run directory by this process, which is alive."""
    lock = {"pid": os.getpid(), "host": os.uname().nodename, "started": None}
    (run / "run.lock").write_text(json.dumps(lock))
    return run


def test_a_frame_of_a_run_under_way_has_all_that_one_asks_for(tmp_path: Path) -> None:
    path = held(write_run(tmp_path / "mine", finished=False))
    (path / "config.txt").write_text("rl.experiment:RLExperiment\nnum_steps: 640\nprompts_per_step: 4\n")
    events = EventLog(path / "events.jsonl")
    last = load_run(path).metrics[-1]
    for name, fields in (
        ("evaluated", {"version": 0, "pass@1": 0.362}),
        ("alarm", {"text": "alarm entropy at update 9: low", "step": 9}),
        ("alarm", {"text": "alarm ess at update 10: few tokens", "step": 10}),
        ("alarm", {"text": "alarm entropy is over at update 12", "step": 12}),
        ("alarm", {"text": "alarm clipping at update 900: of updates that are lost", "step": 900}),
        ("generate", {"tokens": 600, "seconds": 1.0}),
    ):
        events.append("worker-0", name, **fields)
    rows = [json.loads(row) for row in (path / "events.jsonl").read_text().splitlines()]
    rows = [row if row["time"] <= last["time"] else {**row, "time": last["time"]} for row in rows]
    (path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = shown(load_run(path), last["time"] + 1.0)
    left = re.search(r"ETA (?:(\d+) min (\d+) s)", text)
    assert "mine  running" in text and "rl step 319 of 640" in text and left is not None
    pace = (last["time"] - load_run(path).rows("rl")[-20]["time"]) / 19
    assert abs(60 * int(left[1]) + int(left[2]) - (321 * pace - 1.0)) < 1.0
    assert re.search(r"reward +0\.\d{3} in the last 20 updates  [▁▂▃▄▅▆▇█]{10,}", text)
    assert "pass@1    36.2 % at 0" in text and re.search(r"trainer [5-8],\d{3}, worker-0 10\b", text)
    assert "versions in the mean, at most 2" in text
    assert "ess at update 10: few tokens" in text and "entropy at" not in text and "clipping at" not in text
    assert "worker-1, back after 3.19 s" in text
    assert re.search(r"5: reward [01]  Sort these numbers .* → \S", text) is not None
    assert "Supervised" in shown(load_run(path), last["time"], width=30)  # a narrow terminal
    assert line(load_run(path), last["time"]).startswith("mine: running, rl step 319 of 640, reward 0.5")
    (path / "run.lock").unlink()
    assert "ess at update" not in shown(load_run(path), last["time"]), "alarms end with the run"


def test_every_state_has_a_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    run = write_run(tmp_path / "run")
    for path, words in ((empty, "not started"), (run, "stopped")):
        assert main(["watch", "--once", str(path)]) == 0
        assert words in capsys.readouterr().out
    (run / "config.txt").write_text("x:X\nprompts_per_step: 4\n")
    assert main(["watch", "--once", str(run)]) == 0
    assert "finished" in capsys.readouterr().out
    assert main(["watch", str(run)]) == 0  # ends by itself, without a terminal
    assert capsys.readouterr().out.startswith("demo: finished")


def test_what_is_no_run_is_refused_and_the_nearest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs" / "demo-seed0")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.doc").touch()
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        (["watch", "--once", "runs/demo-sed0"], "did you mean 'demo-seed0'?"),
        (["watch", str(foreign)], "foreign: not a run directory; expected"),
        (["watch", "--serve", "runs/demo-sed0"], "did you mean 'demo-seed0'?"),
        (["watch", "--once", "--serve", "runs/demo-seed0"], "expected one of them"),
        (["watch", "--port", "1", "runs/demo-seed0"], "--port belongs to --serve"),
        (["runs", "rnus"], "rnus: no such directory"),
    ):
        assert main(arguments) == EXIT_USER_ERROR
        assert words in capsys.readouterr().err
    assert main(["watch", "--once"]) == 0  # the newest in runs/
    assert "demo" in capsys.readouterr().out
    monkeypatch.chdir(foreign)
    assert main(["watch", "--once"]) == EXIT_USER_ERROR
    assert "no runs in runs/" in capsys.readouterr().err


def test_hostile_files_move_no_cursor_and_break_no_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e[bold]x[/bold]\x9b31m\r" + HOSTILE
    run = held(write_run(tmp_path / "evil", steps=3, finished=False))
    rows = [
        {"phase": evil, "step": 1e100, "time": 1e300, "reward": evil, "loss": {"a": evil}},
        {"phase": "rl", "step": 10**99, "time": -1, "reward": float("inf"), "staleness_mean": [1]},
        {"phase": "rl", "step": 4, "time": 1.79e9, "reward": 0.5, evil: 1.0, "train_tokens": "x"},
    ]
    events = [
        {"time": 1.8e9, "role": evil, "event": "generate", "tokens": evil},
        {"time": 1.8e9, "role": evil, "event": "generate", "tokens": 9},
        {"time": 1.8e9, "role": "driver", "event": "alarm", "text": evil},
        {"time": 1.8e9, "role": "driver", "event": "phase_begin", "phase": evil},
        {"time": 1.8e9, "role": "driver", "event": "evaluated", "version": evil, "pass@1": 0.5},
        {"time": 1.8e9, "role": "driver", "event": "kill", "target": evil},
    ]
    for name, added in (("metrics", rows), ("events", events), ("rollouts/rl", [{"phase": "rl", "step": 1}])):
        sample = {"phase": "rl", "step": evil, "question": evil, "answer": [evil], "reward": evil}
        with open(run / f"{name}.jsonl", "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in [*added, sample][: len(added) + (name[0] == "r")]))
            file.write('{"torn\n\xff\n[1]\n' + "[" * 5000 + "\n")
    (run / "config.txt").write_text(f"x:X\nnum_steps: {'9' * 40}\nprompts_per_step: {evil}\n")
    for arguments in (
        ["watch", "--once", str(run)],
        ["runs", str(tmp_path)],
        ["compare", str(run), str(run.parent / "b")],
    ):
        write_run(tmp_path / "b", steps=2)
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert not CURSOR.search(text) and "[bold]" in text + "[bold]"
    assert not CURSOR.search(line(load_run(run))) and "\n" not in line(load_run(run))
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").symlink_to("/etc/passwd")
    assert "got a link" in shown(Follower(run).read()) and "root:" not in shown(Follower(run).read())


def test_a_follower_sees_what_a_load_sees_also_after_a_repair(tmp_path: Path) -> None:
    path, whole = tmp_path / "grows", write_run(tmp_path / "whole")
    follower = Follower(path)
    assert follower.read().metrics == []
    path.mkdir()
    (path / "rollouts").mkdir()
    content = (whole / "metrics.jsonl").read_bytes()
    for size in (1000, 5555, len(content)):  # torn in the middle of a row
        (path / "metrics.jsonl").open("ab").write(
            content[(path / "metrics.jsonl").stat().st_size if (path / "metrics.jsonl").exists() else 0 : size]
        )
        seen = follower.read()
        assert len(seen.metrics) == content[:size].count(b"\n")
    for part in ("events.jsonl", "rollouts/rl.jsonl"):
        (path / part).write_bytes((whole / part).read_bytes())
    read, loaded = follower.read(), load_run(path)
    assert (read.metrics, read.rollouts) == (loaded.metrics, loaded.rollouts)
    assert sorted(map(str, read.events)) == sorted(map(str, loaded.events))
    (path / "new").write_bytes(b"\n".join(content.split(b"\n")[:9]) + b"\n")
    (path / "new").rename(path / "metrics.jsonl")  # rows beyond a checkpoint were dropped
    assert len(follower.read().metrics) == 9


@pytest.mark.slow
def test_without_a_terminal_lines_are_printed_and_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    run = tmp_path / "tiny"
    with stopped_in_the_middle(run) as process:
        watching = subprocess.Popen([*WATCH, str(run)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert watching.stdout is not None and watching.stderr is not None
        assert watching.stdout.readline().startswith(b"tiny: running, sft step ")
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=60)
        assert watching.returncode == 0 and err == b"" and f"process {process.pid}".encode() in out
        assert process.poll() is None


@pytest.mark.slow
def test_on_a_terminal_that_is_resized_until_the_run_dies(tmp_path: Path) -> None:
    run, screen = tmp_path / "tiny", b""

    def look(wanted: bytes) -> None:
        nonlocal screen
        screen, until = b"", time.monotonic() + 60
        while wanted not in screen and time.monotonic() < until:
            if select.select([main_end], [], [], 0.5)[0]:
                with contextlib.suppress(OSError):  # the watching has ended
                    screen += os.read(main_end, 65536)
        assert wanted in screen

    with stopped_in_the_middle(run) as process:
        main_end, terminal = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color"}
        watching = subprocess.Popen([*WATCH, str(run)], cwd=ROOT, stdin=terminal, stdout=terminal, env=environment)
        os.close(terminal)
        try:
            look(b"running")
            for rows, columns in ((5, 20), (60, 200)):
                fcntl.ioctl(main_end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
                look(b"tiny")
            assert watching.poll() is None
            process.kill()
            process.wait()
            look(b"is gone without a word")
            assert watching.wait(60) == 0
        finally:
            watching.kill()
            watching.wait()
            os.close(main_end)


def test_a_spark_is_as_high_as_its_values() -> None:
    assert spark([(0, 0.0), (1, 1.0), (2, 0.5)]) == "▁█▅" and spark([]) == "" and spark([(0, 3.0)] * 2) == "▁▁"
    assert len(spark([(float(n), float(n)) for n in range(1000)])) <= 32
