"""Whatever stands in a run directory, the report is written, says what it leaves out, and moves no terminal."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.errors import printable
from tests.tools.report.made_up_run import Page, table_text, write_run
from tools.cli import main
from tools.report import load_run, write_report
from tools.report.invariants import findings
from tools.report.load import left_out, parse_rows

ROWS = ("metrics.jsonl", "events.jsonl")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eltr\r\b"
DEEP: Any = json.loads("[" * 300 + "]" * 300)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [10**400, -(10**400), 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, 1e18, -1, 0, 2**63, 1e100, -1e100]
    ),
    st.floats(),
    st.integers(),
    st.sampled_from(["", ESCAPES, "\ud800", "<b>", "a" * 5000, "1", "rl", "trainer", "start", "session", "kill"]),
    st.text(max_size=20),
    st.sampled_from([{}, [], DEEP, [[]], {"a": {}}, {"": None}, [None], [1, 2], ["x", "y"]]),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole") / "run", steps=12)


def check(run: Path) -> str:
    """Read the report in all its forms; returns the page's text."""
    loaded = load_run(run)
    told = table_text(run)
    findings(loaded)
    source = write_report(loaded).read_text(encoding="utf-8")
    page = Page(source)
    assert page.open == [] and source.endswith("</html>\n")
    assert not CONTROL.search(source) and not CONTROL.search(told)
    return page.text


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_record_gives_a_page(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
    for name in (*ROWS, "report.json"):
        rows = (
            [json.loads(line) for line in (whole / name).read_text().splitlines()]
            if name in ROWS
            else [json.loads((whole / name).read_text())]
        )
        for _ in range(data.draw(st.integers(0, 4))):
            row = data.draw(st.sampled_from(rows))
            field = data.draw(st.sampled_from([*row, "new"]))
            inner = row.get(field)
            if isinstance(inner, dict) and inner and data.draw(st.booleans()):
                row, field = inner, data.draw(st.sampled_from([*inner]))
            if data.draw(st.integers(0, 4)):
                row[field] = copy.deepcopy(data.draw(ODD))  # it may be changed next
            else:
                row.pop(field, None)
        (run / name).write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    began = time.process_time()
    check(run)
    assert time.process_time() - began < 5


def secret(folder: Path) -> Path:
    """Make a file that no page may show."""
    path = folder / "secret"
    path.write_text('{"name": "hidden", "event": "hidden", "time": 1}\n')
    return path


PARTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "expected a regular file, got a pipe; it is left out"),
    "a folder": (lambda path: path.mkdir(), "expected a regular file, got a directory; it is left out"),
    "a link to a device": (
        lambda path: path.symlink_to("/dev/zero"),
        "expected a file of the run, got a link; it is left out",
    ),
    "a link to a secret": (
        lambda path: path.symlink_to(secret(path.parents[1])),
        "expected a file of the run, got a link; it is left out",
    ),
    "binary": (lambda path: path.write_bytes(bytes(range(256)) * 50), ""),
    "empty": (lambda path: path.touch(), ""),
    "deep JSON": (lambda path: path.write_text('{"role": ' * 50_000), ""),
    "an empty role": (lambda path: path.write_text('{"role": {}}\n{"role": {}, "event": "start", "time": 1}\n'), ""),
    "escapes": (lambda path: path.write_text(json.dumps({"name": ESCAPES, "event": ESCAPES, "time": 5}) + "\n"), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("part", [*ROWS, "config.txt", "report.json", "skipped.jsonl", "rollouts/eval_after.jsonl"])
def test_any_file_may_be_garbage(whole: Path, tmp_path: Path, part: str, kind: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / part).unlink(missing_ok=True)
    make, note = PARTS[kind]
    make(run / part)
    if part == "skipped.jsonl" and kind in ("a pipe", "a folder", "a link to a device", "a link to a secret"):
        note = ""  # the file is for the run itself
    text = check(run)
    assert note in text and "hidden" not in text


def test_a_control_character_in_an_answer_is_escaped_and_is_no_value_left_out() -> None:
    notes: list[str] = []
    lines = ['{"step": 1, "answer": "\\u00013", "reward": 0.5}', '{"step": 2, "reward": 1e999}']
    first, second = parse_rows("rl.jsonl", lines, notes)
    assert first["answer"] == "\\x013" and second["reward"] is None
    assert notes == ["rl.jsonl: values that are none left out of 1 row"]


def test_what_was_left_out_is_said(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 99, "time": 1e308, "reward": %s}\n{"cut\n' % ("9" * 400))
    (run / "report.json").write_text('{"before": {"pass@1": 0.5, "families": {"a": 3}}, "after": {"pass@1": [1]}}')
    text = check(run)
    assert "metrics.jsonl: 1 unreadable line skipped" in text
    assert "metrics.jsonl: values that are none left out of 1 row" in text
    notes: list[str] = []
    assert left_out("Kills", lambda: str(1 // 0), "none", notes) == "none"
    assert notes == [
        "Kills: left out, since its records are odd (ZeroDivisionError: integer division or modulo by zero)"
    ]


def test_no_escape_reaches_the_terminal(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    run = tmp_path / f"a{ESCAPES}b"
    shutil.copytree(whole, run)
    for part in (*ROWS, "report.json"):
        text = (run / part).read_text()
        (run / part).write_text(text.replace("worker-1", json.dumps(ESCAPES)[1:-1]).replace("spell_", "\\u001b[2J"))
    with contextlib.suppress(SystemExit):  # of broken invariants
        main(["report", str(run), "--check"])
    assert main(["report", str(run / ESCAPES)]) == 2
    assert main(["config", "show", str(tmp_path / ESCAPES)]) == 2
    said = capsys.readouterr()
    assert not CONTROL.search(said.out) and not CONTROL.search(said.err)
    assert "\\x1b]0;owned\\x07" in said.out and "\\x1b]0;owned\\x07" in said.err


def test_the_text_for_a_terminal_keeps_what_is_harmless() -> None:
    assert printable("a\tb\nc é 中 🙂 — naïve") == "a\tb\nc é 中 🙂 — naïve"
    assert printable("\x1b[31m\x9b\u202e\u2066\ud800\r") == "\\x1b[31m\\x9b\\u202e\\u2066\\ud800\\r"


def test_the_page_allows_its_style_and_nothing_else(whole: Path) -> None:
    """A policy without scripts, and a page that has none: no element, no handler, no address but its own parts."""
    page = Page(write_report(whole).read_text())
    policies = [found["content"] for tag, found in page.tags if tag == "meta" and "http-equiv" in found]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]
    names = {name for _, found in page.tags for name in found}
    assert not [name for name in names if name.startswith("on")] and not names & {
        "src",
        "srcset",
        "action",
        "xlink:href",
    }
    assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe", "object", "embed", "form", "link", "base"}
    assert all(str(found["href"]).startswith("#") for _, found in page.tags if "href" in found)
