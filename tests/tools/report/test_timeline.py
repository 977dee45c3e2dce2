"""The timeline: kills, outages and versions, where they happened."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.tools.report.made_up_run import FAMILIES, section, write_run
from tools.report import charts, load_run, timeline
from tools.report.html import render


def test_kill_and_return_are_drawn_where_they_happened(run_path: Path, source: str) -> None:
    run = load_run(run_path)
    drawn = charts.marks(run)
    assert [mark.style for mark in drawn] == ["kill", "back"]
    assert 159 <= drawn[0].step <= 161 < drawn[1].step < 170
    assert section(source, "reward").count('class="rule kill"') == 1 + len(FAMILIES)  # of all, one per family
    lanes = section(source, "timeline")
    assert 'class="outage"' in lanes and "worker-1 killed" in lanes


def test_a_role_without_spans_has_a_lane_that_shows_when_it_was_down(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", kill=False, steps=60)
    first = load_run(path).rows("rl")[20]["time"]
    rows = [
        {"time": first - 5, "role": "controller", "event": "start", "pid": 1},
        {"time": first, "role": "driver", "event": "died", "target": "controller"},
        {"time": first + 1, "role": "controller", "event": "start", "pid": 2},
        {"time": first + 2, "role": "driver", "event": "kill", "target": "controller"},
        {"time": first + 2.1, "role": "driver", "event": "died", "target": "controller"},
        {"time": first + 3, "role": "controller", "event": "start", "pid": 3},
        {"time": first + 4, "role": "chaos", "event": "kill", "target": "driver"},
        {"time": first + 5, "role": "driver", "event": "session", "pid": 4},
    ]
    with (path / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(path)
    assert timeline.lanes(run)["controller"] == []
    down = [(o.target, round(o.killed - first, 1), o.back and round(o.back - first, 1)) for o in run.outages]
    assert down == [("controller", 0.0, 1.0), ("controller", 2.0, 3.0), ("driver", 4.0, 5.0)]
    lanes = section(render(run), "timeline")
    assert "started 3 times" in lanes and "controller down for 1.00 s" in lanes


def test_versions_stand_below_the_times_where_they_were_published(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", kill=False, steps=60)
    at = load_run(path).rows("rl")[30]["time"]
    push = {"role": "trainer", "event": "push", "seconds": 0.1}
    rows = [{**push, "time": at, "version": 7}, {**push, "time": at + 9, "version": 5}]
    with (path / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(path)
    near = timeline.versions(run, at - 1, at + 1)
    assert (at, 7) in near and (at + 9, 5) not in near
    drawn = timeline.overview(run)
    assert re.search(r"version \d+ published .* after the start", drawn) and re.search(r">v\d+<", drawn)


def test_a_run_without_a_kill_has_no_marks(tmp_path: Path) -> None:
    source = render(load_run(write_run(tmp_path / "calm", kill=False, steps=60)))
    assert 'class="rule' not in source and "<h3>Kills</h3>" not in source
