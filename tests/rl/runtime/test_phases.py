"""Lines on the terminal about a run's phases: that Ray starts, which phase it is, and where a resumed run stands."""

import json
from pathlib import Path

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from rl.audit.alarms import Alarms
from rl.runtime.phases import Phases
from tests.rl.tiny import tiny_experiment


def test_a_resumed_run_says_that_it_starts_and_goes_on_from_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cfg, said = tiny_experiment(num_steps=5, evaluation=None), list[str]()
    with RunDirectory.open(tmp_path, to_text(cfg)) as run:
        rows = [{"phase": "rl", "step": step, "reward": step / 10} for step in range(1, 5)]
        run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
        phases = Phases(
            cfg, run, EventLog(run.events_path), said.append, start=3, starting="; starting Ray and the roles"
        )
        with phases:
            phases.update(3)
            with run.metrics_path.open("a") as file:
                file.write(json.dumps(rows[3]) + "\n")
            phases.update(4)
        rollouts = cfg.prompts_per_step * cfg.samples_per_prompt
        assert said == [f"reinforcement learning: 5 updates of {rollouts} rollouts; starting Ray and the roles"]
        shown = capsys.readouterr().err
        assert "rl: step 3 of 5" in shown and "step 0" not in shown and "left" not in shown
        assert [row["event"] for row in read_rows(run.events_path)] == ["phase_begin", "phase"]


def test_a_quiet_run_shows_phases_and_alarms_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cfg, said = tiny_experiment(num_steps=9, evaluation=None).set(alarms=Alarms.Config(window=2)), list[str]()
    with RunDirectory.open(tmp_path, to_text(cfg)) as run:
        with Phases(cfg, run, EventLog(run.events_path), said.append, start=0, starting="", progress=False) as phases:
            phases.update(0)
            for step in (1, 2, 3):
                log = EventLog(run.rollouts / "rl.jsonl")
                log.append("controller", "sample", phase="rl", step=step, reward=0.5, question="?", answer="!")
                row = {"phase": "rl", "step": step, "reward": 0.5, "clip_fraction": 0.9}
                EventLog(run.metrics_path).append("trainer", "row", **row)
                phases.update(step)
    assert [line.partition(":")[0] for line in said] == ["reinforcement learning", "alarm clipping at update 2"]
    assert capsys.readouterr().err == ""


def test_an_alarm_is_shown_once_by_the_session_that_made_the_update(tmp_path: Path):
    cfg = tiny_experiment(num_steps=60, evaluation=None).set(alarms=Alarms.Config(window=2))
    with RunDirectory.open(tmp_path, to_text(cfg)) as run:
        said = list[str]()

        def go(start: int, clipped: list[float]) -> None:
            """Resume after `start` updates, and make these."""
            with Phases(cfg, run, EventLog(run.events_path), said.append, start=start, starting="") as phases:
                phases.update(start)
                for step, value in enumerate(clipped, start=start + 1):
                    with run.metrics_path.open("a") as file:
                        file.write(json.dumps({"phase": "rl", "step": step, "clip_fraction": value}) + "\n")
                    phases.update(step)

        go(0, [0.1, 0.9, 0.9, 0.9])
        assert [line.partition(":")[0] for line in said if "alarm" in line] == ["alarm clipping at update 3"]
        go(4, [0.9, 0.1, 0.1])  # still on: nothing to show again, until it is over
        assert [line.partition(":")[0] for line in said if "alarm" in line][1:] == [
            "alarm clipping is over at update 7"
        ]
        noted = [row["text"] for row in read_rows(run.events_path) if row["event"] == "alarm"]
        assert noted == [line for line in said if line.startswith("alarm")]


def test_an_answer_is_shown_beside_its_reward_on_one_line_now_and_then(tmp_path: Path):
    cfg, said = tiny_experiment(num_steps=9, evaluation=None), list[str]()
    with RunDirectory.open(tmp_path, to_text(cfg)) as run:
        with Phases(cfg, run, EventLog(run.events_path), said.append, start=0, starting="") as phases:
            phases.update(0)
            for step in (1, 2, 3):
                log = EventLog(run.rollouts / "rl.jsonl")
                texts = {"question": "1\n+ 1\x1b]0;x\x07", "answer": "2\u202e" + "!" * 200}
                log.append("controller", "sample", phase="rl", step=step, reward=0.5, **texts)
                EventLog(run.metrics_path).append("trainer", "row", phase="rl", step=step, reward=0.5)
                phases.update(step)
        shown = [line for line in said if "answer" in line]
        assert shown == [
            f"answer of update 1, reward 0.50: 2\\u202e{'!' * 90}... (to: 1 + 1\\x1b]0;x\\x07)",
        ]
