"""The timeline of a program: bars where its seconds went, in the page and in a line of `axl watch`."""

import json
from pathlib import Path
from typing import Any

from tests.tools.report.made_up_run import section, write_run
from tools.report import load_run
from tools.report.html import render
from tools.watch.frame import line

LANES = [
    ["sample 0", [["queue", 0, 0.5], ["draw", 0.5, 2.5], ["wait", 2.5, 3.0], ["draw", 3.0, 4.0], ["join", 4.0, 5.0]]],
    ["sample 0: tools", [["python", 1.0, 2.75]]],
    ["child 1", [["draw", 4.1, 4.9]]],
]


def drawn(tmp_path: Path, *lanes: Any) -> tuple[str, Any]:
    path = write_run(tmp_path / "run", kill=False, steps=12)
    until = load_run(path).events[-1]["time"]
    with (path / "events.jsonl").open("a") as file:
        for row in lanes:
            one = {"time": until, "role": "worker-0", "event": "program", "step": 10, "lanes": row}
            file.write(json.dumps(one) + "\n")
    run = load_run(path)
    return section(render(run), "timeline"), run


def test_each_lane_has_its_bars_and_the_caption_says_where_the_seconds_went(tmp_path: Path) -> None:
    page, run = drawn(tmp_path, [["sample 1", [["draw", 0, 1]]]], LANES)
    assert "One program (update 10, worker-0)" in page and "sample 1" not in page
    assert "sample 0: tools: tool python for 1.75 s, from 1.00 s on" in page
    assert "child 1: drawing for 0.80 s, from 4.10 s on" in page
    says = "sample 0: waiting for a row 0.50 s, drawing 3.00 s, waiting for its environment 0.50 s, waiting for others"
    assert f"{says} 1.00 s, beside it tools 1.75 s, 1 spawned" in page
    assert "program" not in line(run)  # the line is short; the frame has it


def test_what_cannot_be_drawn_is_left_out(tmp_path: Path) -> None:
    odd = [[], ["a"], ["b", 3], ["c", [["draw", 2, 1], ["draw", None, 1], 4]], 5, ["\x1b[2J<b>", [["x\x07", 0, 1e-9]]]]
    page, _ = drawn(tmp_path, None, 3, [["a", []]], odd)
    assert "&lt;b&gt;" in page and "\x1b" not in page and "\x07" not in page
    assert "update 0, worker-0" in drawn(tmp_path / "none", None, [["a", []]])[0]  # the one before
