"""Inputs of a simulation: durations, lengths, traces, fleets to search."""

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.runtime.simulated.advice import worker_counts
from rl.runtime.simulated.durations import Durations, measured, read_durations
from rl.runtime.simulated.failures import Failure, Faults, read_trace, read_traces, synthetic
from rl.runtime.simulated.lengths import read_lengths
from rl.runtime.simulated.recorded import write_rows
from rl.runtime.simulated.result import bottleneck, measured_ettr


def test_durations_come_from_toml_json_and_edits(tmp_path: Path):
    (tmp_path / "a.toml").write_text("update = 2.5\ncores = 2\n")
    (tmp_path / "a.json").write_text('{"update": 2.5, "cores": 2}')
    assert read_durations(tmp_path / "a.toml") == read_durations(tmp_path / "a.json") == Durations(update=2.5, cores=2)
    assert Durations().changed(["worker_price=3"]).worker_price == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("updat = 1", r"no duration 'updat'; did you mean.*update"),
        ("worker_price = -1", r"durations.worker_price=-1; expected a finite number, 0 or more"),
        ("worker_network = 0", r"durations.worker_network=0; expected a finite number, above 0"),
        ("update = nan", "durations.update=nan"),
        ('update = "x"', "durations.update='x'"),
        ("update =", "expected a table of durations"),
    ],
)
def test_wrong_durations_are_refused_by_name(tmp_path: Path, text: str, message: str):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_durations(tmp_path / "a.toml")
    with pytest.raises(UserError, match=r"no duration 'x'"):
        Durations().changed(["x=1"])


def test_a_runs_events_are_measured(tmp_path: Path):
    events = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(UserError, match="expected a run with rollouts and at least 3 updates"):
        measured(tmp_path)
    for step in range(12):
        events.append("worker-0", "generate", seconds=2.0, lease=step, step=step, tokens=80)
        events.append("worker-0", "score", seconds=0.8, step=step)
        events.append("trainer", "update", seconds=0.5, step=step)
    row = {"phase": "rl", "completion_length": 10.0, "gen_tokens": 80.0, "step_seconds": 3.7, "input_seconds": 3.0}
    write_rows(tmp_path / "metrics.jsonl", [{**row, "step": step} for step in range(1, 13)])
    found = measured(tmp_path)
    assert (found.decode_step, found.update) == (0.2, 0.5)  # 2 s for 10 steps
    assert found.score == pytest.approx(0.1) and found.update_rest == pytest.approx(0.2)


def test_lengths_have_the_mean_asked_for_and_follow_from_the_rollouts_name():
    lengths = read_lengths("lognormal:100,0.5", 1_000_000, seed=3)
    drawn = [lengths.of(prompt, 0, sample, 0.0) for prompt in range(100) for sample in range(40)]
    assert abs(fmean(drawn) - 100) < 3 * 100 * math.sqrt(math.exp(0.25) - 1) / math.sqrt(4000)
    assert drawn == [lengths.of(prompt, 0, sample, 0.0) for prompt in range(100) for sample in range(40)]
    assert lengths.of(1, 0, 0, 0.0) != lengths.of(1, 1, 0, 0.0)
    grown = read_lengths("fixed:100", 1000, growth=0.5)
    assert [grown.of(0, 0, 0, progress) for progress in (0.0, 0.5, 1.0)] == [100, 125, 150]
    assert read_lengths("fixed:900", 1000, growth=0.5).of(0, 0, 0, 1.0) == 1000


@pytest.mark.parametrize("text", ["lognormal:5", "lognormal:2000,1", "fixed:0", "fixed:1001", "fixed:x", "nowhere.txt"])
def test_wrong_lengths_are_refused(text: str):
    with pytest.raises(UserError, match=f"--lengths {text}"):
        read_lengths(text, 1000)


def test_lengths_of_a_file_beyond_the_limit_are_refused(tmp_path: Path):
    (tmp_path / "lengths.txt").write_text("10\n20\n2000\n")
    assert {read_lengths(str(tmp_path / "lengths.txt"), 2000).of(n, 0, 0, 0.0) for n in range(64)} == {10, 20, 2000}
    with pytest.raises(UserError, match=r"expected lengths of 1 to 1000 tokens \(max_new_tokens\), got 10 to 2000"):
        read_lengths(str(tmp_path / "lengths.txt"), 1000)


def test_a_generated_trace_reads_back_and_has_its_rate(tmp_path: Path):
    failures = synthetic({"worker": 60.0, "trainer": 6.0}, 10.0, seed=1, back_s=30.0)
    lines = [f"{one.time:.3f},{one.target},{one.kind},{one.factor:g}" for one in failures]
    (tmp_path / "trace.csv").write_text("\n".join(["time,target,kind,factor", *lines]) + "\n")
    read = read_trace(tmp_path / "trace.csv")
    assert [(one.target, one.kind) for one in read] == [(one.target, one.kind) for one in failures]
    kills = [one for one in read if one.kind == "gone"]
    assert abs(len(kills) - 600) < 4 * math.sqrt(600)
    assert [one.time for one in read] == sorted(one.time for one in read)
    (tmp_path / "trace.jsonl").write_text('{"time": 1, "target": "trainer"}\n{"time": 2, "target": "worker-3"}\n')
    assert [one.target for one in read_trace(tmp_path / "trace.jsonl")] == ["trainer", "worker-3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,target\n5,trainer\n4,trainer\n", "line 3: time 4 is before 5; expected times in order"),
        ("time,target\n5,trainr\n", "line 2: there is no 'trainr'; did you mean.*trainer"),
        ("time,target,kind\n5,worker,dies\n", "line 2: there is no kind 'dies'"),
        ("time,target,kind\n5,trainer,gone\n", "'gone' is of workers"),
        ("time,target\n-1,trainer\n", "expected a time of 0 or more"),
        ("when,who\n1,trainer\n", "expected the columns time,target,kind,factor"),
        ('{"time": 1}\n', "line 1: expected numbers for time and factor, and a target"),
        ('{"time": 1\n', "line 1: expected a JSON object"),
        ("", "is empty"),
    ],
)
def test_wrong_traces_are_refused_by_line(tmp_path: Path, text: str, message: str):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(UserError, match=message):
        read_trace(tmp_path / "trace")


def test_rates_and_fleets_are_checked():
    assert list(worker_counts("workers=16..128")) == [16, 21, 27, 35, 45, 59, 76, 99, 128]
    assert list(worker_counts("workers=2..4")) == [2, 3, 4]
    for wrong in ("workers=4..2", "worker=1..2", "workers=0..3", "workers=5"):
        with pytest.raises(UserError, match=r"expected workers=FIRST..LAST"):
            worker_counts(wrong)
    with pytest.raises(UserError, match="no such role"):
        synthetic({"referee": 1.0}, 1.0)
    with pytest.raises(UserError, match="failures an hour, 0 or more"):
        synthetic({"trainer": -1.0}, 1.0)


def test_the_bottleneck_is_named():
    assert bottleneck({"trainer": 0.2, "workers": 0.97}, 8, 1).startswith("Drawing is the bottleneck: the 8 workers")
    assert "staleness above 0" in bottleneck({"trainer": 0.4, "workers": 0.5}, 8, 0)


def updates(*times: float) -> list[dict[str, Any]]:
    return [{"time": time, "role": "trainer", "event": "update", "step": step} for step, time in enumerate(times)]


def test_the_ettr_of_a_real_run_is_the_time_of_its_updates_undisturbed_over_the_time_that_they_took() -> None:
    calm = updates(*range(31))
    assert measured_ettr(calm)["ettr"] == 1.0
    kill = {"time": 30.5, "role": "chaos", "event": "kill", "target": "trainer"}
    late = [{**row, "step": 31 + n} for n, row in enumerate(updates(35, 37, 38, 39, 40, 41))]
    again = [{**row, "time": row["time"] + 35, "step": 30} for row in calm[:1]]
    found = measured_ettr([*calm, kill, *again, *late])
    assert found["kills"] == 1 and found["updates"] == 36 and found["update_seconds"] == 1.0
    assert found["ettr"] == pytest.approx(36 / 41)
    with pytest.raises(UserError, match="no two updates follow each other undisturbed"):
        measured_ettr([*updates(0, 1), {**kill, "time": 0.5}])


def test_failures_of_a_real_run_are_due_by_their_times_from_the_first_update_on() -> None:
    faults = Faults(trace=[Failure(1.0, "trainer"), Failure(2.0, "worker"), Failure(9.0, "worker-1")])
    assert faults.due(100.0) == [] and [one.target for one in faults.due(102.5)] == ["trainer", "worker"]
    assert faults.due(103.0) == [] and [one.target for one in faults.due(200.0)] == ["worker-1"]
    with pytest.raises(UserError, match="'gone' at 3 s: expected 'kill'"):
        Faults(trace=[Failure(3.0, "worker", "gone")]).check(2)
    with pytest.raises(UserError, match="no 'worker-2'; expected worker-0 to worker-1"):
        Faults(trace=[Failure(3.0, "worker-2")]).check(2)
    with pytest.raises(UserError, match="'zone-0': zones are of simulations"):
        Faults(trace=[Failure(3.0, "zone-0")]).check(2)


SKYPILOT = '{"metadata": {"gap_seconds": 300}, "data": [16, 16, 8, 12, 0]}'
BAMBOO = "0,12\n7,12\n7,6\n30,6\n30,9\n"  # a line before and after each change
PARCAE = "0,1\n0,2\n0,3\n0,4\n60000,3\n180000,2\n180000,1\n240000,4\n"


def of_trace(tmp_path: Path, workers: int, *texts: str, zones: int = 1) -> list[tuple[float, str, str]]:
    """Return time, target and kind of what is read from these traces."""
    for number, text in enumerate(texts):
        (tmp_path / str(number)).write_text(text)
    found = read_traces([tmp_path / str(number) for number in range(len(texts))], workers, zones)
    return [(one.time, one.target, one.kind) for one in found]


def there(found: list[tuple[float, str, str]], workers: int, time: float) -> int:
    """Return the workers that are there at a time, by going through all failures."""
    gone = set[str]()
    for when, target, kind in found:
        if when <= time:
            (gone.add if kind == "gone" else gone.discard)(target)
    return workers - len(gone)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SKYPILOT, {0: 4, 599: 4, 600: 2, 900: 3, 1200: 0}),
        (BAMBOO, {0: 4, 6.9: 4, 7: 2, 30: 3}),
        (PARCAE, {0: 4, 59: 4, 60: 3, 180: 1, 240: 4}),
    ],
)
def test_published_traces_of_spot_instances_are_read(tmp_path: Path, text: str, expected: dict[float, int]) -> None:
    found = of_trace(tmp_path, 4, text)
    assert {time: there(found, 4, time) for time in expected} == expected
    assert all(time > 0 for time, _, _ in found)  # counts of one time are one change: nobody goes and comes at 0
    assert of_trace(tmp_path, 2, SKYPILOT)[0] == (600.0, "worker-1", "gone")  # half of the instances are half of these


def test_a_zone_has_its_workers_and_its_trace(tmp_path: Path) -> None:
    found = of_trace(tmp_path, 5, SKYPILOT, '{"metadata": {"gap_seconds": 100}, "data": [2, 0, 2]}', zones=2)
    assert [one for one in found if one[0] < 300] == [
        *((100.0, name, "gone") for name in ("worker-1", "worker-3")),
        *((200.0, name, "back") for name in ("worker-1", "worker-3")),
    ]
    assert {target for time, target, _ in found if time >= 300} == {"worker-0", "worker-2", "worker-4"}
    whole = of_trace(tmp_path, 5, "time,target,kind\n5,zone-1,gone\n9,zone-1,back\n", zones=2)
    assert whole[:2] == [(5.0, "worker-1", "gone"), (5.0, "worker-3", "gone")] and len(whole) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,4\n9,3\n7,4\n", "line 3: time 7 is before 9; expected times in order"),
        ("0,4\n9,-3\n", "line 2: expected a count of instances, 0 or more, got -3.0"),
        ("0,4\n9\n", "line 2: expected TIME,INSTANCES, got '9'"),
        ("0,0\n9,0\n", "no instance at any time"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "expected gap_seconds above 0"),
        ('{"metadata": {"gap_seconds": 5}, "data": [1, "x"]}', r"data\[1\]: expected a count of instances"),
        ('{"metadata": {"gap_seconds": 5}}', "expected {.metadata"),
        ("time,target,kind\n5,zone-2,gone\n", "no 'zone-2'; expected zone-0 to zone-0"),
        ("time,target,kind\n5,trainer-1,gone\n", "no 'trainer-1'"),
    ],
)
def test_wrong_traces_of_instances_and_zones_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        of_trace(tmp_path, 4, text)
    with pytest.raises(UserError, match="at most a trace of instances for each of the 1 zones"):
        of_trace(tmp_path, 4, SKYPILOT, SKYPILOT)
