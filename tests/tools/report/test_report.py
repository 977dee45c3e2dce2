"""The report of a run, built from a made-up run directory with a kill in the middle of RL."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from mesh.errors import UserError
from tools.cli import main
from tools.commands.report import command
from tools.report import charts, load_run, spans, timeline, write_report
from tools.report.html import render
from tools.report.table import print_tables

FAMILIES = {
    "basic_arithmetic": (0.42, 0.66),
    "spell_backward": (0.31, 0.55),
    "number_sorting": (0.36, 0.41),
}
HOSTILE = '<script>alert("1")</script> & <img src="http://evil.example/x.png">'
SECTIONS = (
    "tasks",
    "reward",
    "sft",
    "timeline",
    "offpolicy",
    "speed",
    "health",
    "samples",
    "config",
)


def evaluation(which: int) -> dict[str, Any]:
    """An EVAL record with Wilson-like intervals."""

    def one(rate: float, problems: int) -> dict[str, Any]:
        row: dict[str, Any] = {"problems": problems, "samples": 8}
        for key, value in (("pass@1", rate), ("pass@8", 1 - (1 - rate) ** 2.2)):
            half = 1.96 * math.sqrt(value * (1 - value) / problems)
            row[key], row[f"{key}_ci"] = value, [value - half, value + 0.9 * half]
        return row

    families = {name: one(rates[which], 128) for name, rates in FAMILIES.items()}
    mean = sum(rates[which] for rates in FAMILIES.values()) / len(FAMILIES)
    return {**one(mean, 384), "families": families}


def write_run(run: Path, *, steps: int = 320, kill: bool = True, finished: bool = True) -> Path:
    """Write a run directory as the RL demo would, with two workers and one of them killed."""
    rng, start = random.Random(0), 1_795_000_000.0
    now = start
    metrics: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []

    def event(time: float, role: str, name: str, **fields: Any) -> None:
        events.append({"time": time, "role": role, "event": name, **fields})

    event(now, "driver", "phase", phase="setup")
    now += 9.0
    event(now, "driver", "phase", phase="sft")
    for step in range(200):
        now += 0.3
        loss = 0.35 + 2.6 * math.exp(-step / 28) + rng.gauss(0, 0.025)
        metrics.append(
            {"phase": "sft", "step": step, "time": now, "loss": loss, "accuracy": 1 - 0.2 * loss,
             "grad_norm": 1.1, "lr": 1e-3, "tokens": 4096, "step_seconds": 0.3}
        )  # fmt: skip
    event(now, "trainer", "sft", seconds=60.0)
    event(now, "driver", "phase", phase="eval_before")
    now += 11.0
    event(now, "worker-0", "eval", seconds=10.5)
    event(now, "worker-1", "eval", seconds=10.8)
    event(now, "driver", "phase", phase="rl")
    killed = back = None
    for step in range(steps):
        if kill and step == steps // 2:
            killed, back = now + 0.21, now + 3.4
            event(killed, "driver", "kill", target="worker-1", pid=4711)
            event(killed + 1.1, "controller", "lease_expired", worker="worker-1")
            event(back, "driver", "restart", target="worker-1")
        down = killed is not None and back is not None and killed <= now + 0.3 and now < back
        wait = rng.uniform(0.35, 0.5) if down else rng.uniform(0.02, 0.12)
        seconds = 0.34 + wait
        for worker in ("worker-0", "worker-1"):
            if not (down and worker == "worker-1"):
                event(now + 0.05, worker, "pull", seconds=0.03, version=step)
                event(now + seconds - 0.05, worker, "generate", seconds=seconds - 0.12, version=step)
        for part in range(4):
            event(now + 0.3 + 0.02 * part, "verifier", "score", seconds=0.035)
        event(now + wait, "trainer", "wait", seconds=wait, **{"for": "batch"})
        event(now + wait + 0.3, "trainer", "update", seconds=0.3, step=step)
        event(now + seconds, "trainer", "push", seconds=0.035, version=step + 1)
        now += seconds
        progress = 1 - math.exp(-step / 110)
        per = {name: a + (b - a) * progress + rng.gauss(0, 0.05) for name, (a, b) in FAMILIES.items()}
        stale = 2.0 if down else float(rng.random() < 0.4) + 1
        metrics.append(
            {
                "phase": "rl", "step": step, "time": now, "version": step + 1,
                "reward": sum(per.values()) / 3,
                **{f"reward/{name}": value for name, value in per.items()},
                "loss": rng.gauss(0, 0.01), "grad_norm": abs(rng.gauss(0.6, 0.12)),
                "lr": 8e-5 * min(1, step / 20), "entropy": rng.gauss(0.62 - 0.3 * progress, 0.01),
                "clip_fraction": abs(rng.gauss(0.012, 0.004)),
                "kl_old_new": abs(rng.gauss(0.002, 0.0007)),
                "staleness_mean": stale - 0.4, "staleness_max": stale,
                "logprob_diff_mean": 10 ** rng.gauss(-6.6, 0.08),
                "logprob_diff_max": 10 ** rng.gauss(-5.3, 0.12), "ratio_mean": rng.gauss(1, 0.004),
                "zero_variance_fraction": min(1, abs(rng.gauss(0.3 + 0.1 * progress, 0.05))),
                "truncation_fraction": abs(rng.gauss(0.02, 0.01)),
                "completion_length": rng.gauss(11.5, 0.5), "gen_tokens": 2950 + rng.gauss(0, 90),
                "train_tokens": 2950, "wait_seconds": wait, "step_seconds": seconds,
            }
        )  # fmt: skip
    run.mkdir(parents=True, exist_ok=True)
    if finished:
        event(now, "driver", "phase", phase="eval_after")
        now += 11.0
        event(now, "worker-0", "eval", seconds=10.6)
        event(now, "worker-1", "eval", seconds=10.7)
        kills = [
            {"target": "worker-1", "pid": 4711, "time": killed, "step": steps // 2,
             "detected_s": 0.4, "replaced_s": 3.19, "lost_s": 1.27}
        ]  # fmt: skip
        report = {
            "name": "demo", "seed": 0, "before": evaluation(0), "after": evaluation(1),
            "kills": kills if kill else [],
            "seconds": now - start,
            "phase_seconds": {"setup": 9.0, "sft": 60.0, "eval_before": 11.0, "rl": 131.5, "eval_after": 11.0},
            "throughput": {"gen_tokens_per_second": 7012.4, "train_tokens_per_second": 6911.0},
            "staleness": {"mean": 1.02, "max": 2}, "logprob_diff": {"mean": 2.4e-7, "max": 9.1e-6},
            "versions": {"jax": "0.12.0", "flax": "0.12.12", "ray": "2.60.0"},
        }  # fmt: skip
        (run / "report.json").write_text(json.dumps(report))
    (run / "config.txt").write_text("policy.dim: 128\ntrainer.learner.lr: 8e-05\nname: '<demo>'\n")
    for name, rows in (("metrics", metrics), ("events", events)):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _write_rollouts(run / "rollouts", rng, finished)
    return run


def _write_rollouts(folder: Path, rng: random.Random, finished: bool) -> None:
    folder.mkdir(exist_ok=True)
    tasks = {
        "basic_arithmetic": [
            ("Calculate 17 + 4 * 9.", "53"),
            ("Calculate 81 - 27.", "54"),
            (HOSTILE, "7"),
        ],
        "spell_backward": [
            ("Spell this word backward: lantern", "nretnal"),
            ("Spell this word backward: mesh", "hsem"),
        ],
        "number_sorting": [("Sort these numbers in ascending order: 4, -7, 13, 2", "['-7', '2', '4', '13']")],
    }
    for phase, chance in (("eval_before", 0.4), ("rl", 0.5), ("eval_after", 0.7)):
        if phase == "eval_after" and not finished:
            continue
        lines = []
        for family, problems in tasks.items():
            for question, expected in problems * (phase != "rl") or problems[:1]:
                for _ in range(8):
                    right = rng.random() < chance
                    answer = expected if right else "".join(rng.sample(expected * 2, len(expected)))
                    lines.append(
                        {
                            "phase": phase, "step": 5, "version": 0, "family": family,
                            "question": question, "answer": answer, "expected": expected,
                            "reward": 1.0 if right else 0.0, "finish_reason": "stop",
                        }
                    )  # fmt: skip
        (folder / f"{phase}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Page(HTMLParser):
    """Parser that collects tags with attributes and visible text, and checks that tags are balanced."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="module")
def source(run_path: Path) -> str:
    return write_report(run_path).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def section(source: str, key: str) -> str:
    found = re.search(rf'<section id="{key}">(.*?)</section>', source, re.DOTALL)
    assert found, f"no section {key}"
    return found[1]


def table_text(path: Path) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        print_tables(load_run(path), console)
    return capture.get()


def test_a_finished_run_fills_every_section(source: str, page: Page) -> None:
    assert page.open == []
    for key in SECTIONS:
        content = section(source, key)
        assert "Empty:" not in content, key
        assert "<svg" in content or key in ("samples", "config"), key
    for heading in (
        "Staleness",
        "Trainer-sampler log-prob difference",
        "Importance ratio",
        "Throughput",
        "Entropy",
        "Kills",
    ):
        assert f"<h3>{heading}</h3>" in source
    assert len(source) < 1_500_000


def test_the_page_fetches_nothing_and_runs_nothing(source: str, page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href", "srcset", "action", "data"):
                assert value is not None and value.startswith("#"), (tag, name, value)
    assert "url(" not in source and "@import" not in source


def test_headline_and_tables_show_the_numbers_of_the_report(run_path: Path, page: Page) -> None:
    report = json.loads((run_path / "report.json").read_text())
    seen, terminal = page.text, table_text(run_path)
    for part in (
        report["before"],
        report["after"],
        *report["before"]["families"].values(),
        *report["after"]["families"].values(),
    ):
        for key in ("pass@1", "pass@8"):
            low, high = part[f"{key}_ci"]
            assert f"{100 * part[key]:.1f} {100 * low:.1f}–{100 * high:.1f}" in seen
            assert f"{100 * part[key]:.1f}  {100 * low:.1f}–{100 * high:.1f}" in terminal
    gain = 100 * (report["after"]["pass@1"] - report["before"]["pass@1"])
    assert f"{gain:+.1f} points" in seen and f"{gain:+.1f}" in terminal
    for words in ("7,012", "1.02, 2", "2.4e-7, 9.1e-6", "worker-1", "1.27 s"):
        assert words in terminal
    assert max(map(len, terminal.splitlines())) <= 80


def test_a_loss_is_shown_as_a_loss(tmp_path: Path) -> None:
    path = write_run(tmp_path / "worse", steps=20)
    report = json.loads((path / "report.json").read_text())
    report["before"], report["after"] = report["after"], report["before"]
    (path / "report.json").write_text(json.dumps(report))
    page = render(load_run(path))
    assert "\N{MINUS SIGN}17.7 points" in page and 'class="delta down"' in page
    assert "do not overlap: RL made it worse" in page


def test_hostile_text_stays_text(source: str, page: Page) -> None:
    assert "<script" not in source and "<img" not in source
    assert HOSTILE in "".join(page.words)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=20)
    for part in ("metrics.jsonl", "events.jsonl", "report.json"):
        text = (path / part).read_text()
        (path / part).write_text(text.replace("spell_backward", "<b id=x>").replace("worker-1", "<i>&'"))
    page = Page(render(load_run(path)))
    assert page.open == [] and "<b id=x>" in page.text
    assert not any(tag == "b" and attributes.get("id") == "x" for tag, attributes in page.tags)
    assert "<i>&' killed" in page.text


def test_kill_and_return_are_drawn_where_they_happened(run_path: Path, source: str) -> None:
    run = load_run(run_path)
    drawn = charts.marks(run)
    assert [mark.style for mark in drawn] == ["kill", "back"]
    assert 159 <= drawn[0].step <= 161 < drawn[1].step < 170
    assert section(source, "reward").count('class="rule kill"') == 2 + len(FAMILIES)  # wide, narrow, one per family
    lanes = section(source, "timeline")
    assert 'class="outage"' in lanes and "worker-1 killed" in lanes and "lease_expired" in lanes
    assert "Close up: around the kill" in lanes


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
    assert spans.lanes(run)["controller"] == []
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
    near = spans.versions(run, at - 1, at + 1)
    assert (at, 7) in near and (at + 9, 5) not in near
    drawn = timeline.overview(run)
    assert re.search(r"version \d+ published .* after the start", drawn) and re.search(r">v\d+<", drawn)


def test_invariants_are_on_the_page_and_a_broken_one_is_an_exit_status(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.txt").write_text("groups: 1\nstaleness: 0\n")
    events = [
        {"time": 1.0, "role": "driver", "event": "phase_begin", "phase": "rl"},
        {"time": 2.0, "role": "trainer", "event": "push", "seconds": 0.1, "version": 0},
        {"time": 3.0, "role": "trainer", "event": "update", "seconds": 0.1, "step": 0},
    ]
    (path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    row = {"phase": "rl", "step": 1, "time": 3.0, "reward": 0.5, "staleness_max": 0}
    (path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    good = CliRunner().invoke(command, [str(path), "--check"])
    assert good.exit_code == 0 and "ages within the bound" in good.output
    (path / "metrics.jsonl").write_text(json.dumps({**row, "staleness_max": 3}) + "\n")
    bad = CliRunner().invoke(command, [str(path), "--check"])
    assert bad.exit_code == 1 and "age 3; the bound is 0" in " ".join(bad.output.split())
    assert "age 3; the bound is 0" in (path / "report.html").read_text()


def test_a_run_without_a_kill_has_no_marks(tmp_path: Path) -> None:
    source = render(load_run(write_run(tmp_path / "calm", kill=False, steps=60)))
    assert 'class="rule' not in source and "<h3>Kills</h3>" not in source
    assert "Close up: a dozen steps" in source


def test_a_run_under_way_is_reported(tmp_path: Path) -> None:
    path = write_run(tmp_path / "young", steps=40, finished=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 40, "rew')
    source = write_report(path).read_text()
    page = Page(source)
    assert page.open == [] and "RL step 39" in page.text
    assert "Empty: nothing logged for this yet." in section(source, "tasks")
    assert "<svg" in section(source, "reward")
    assert "metrics.jsonl: 1 unreadable line skipped" in page.text
    assert "SFT step 199, RL step 39" in " ".join(table_text(path).split())


@pytest.mark.parametrize("part", ["config.txt", "metrics.jsonl", "events.jsonl", "report.json"])
def test_any_single_part_is_enough(tmp_path: Path, part: str) -> None:
    whole = write_run(tmp_path / "whole", steps=20)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / part).write_bytes((whole / part).read_bytes())
    assert Page(write_report(alone).read_text()).open == []
    assert table_text(alone)


def test_broken_and_odd_values_do_not_stop_the_report(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.mkdir()
    (path / "report.json").write_text('{"before": {"pass@1": ')
    rows = [
        {
            "phase": "rl",
            "step": 0,
            "time": 5.0,
            "reward": 0.5,
            "logprob_diff_mean": 0.0,
            "entropy": float("nan"),
        },
        {"phase": "rl", "step": 1, "time": 6.0, "reward": 0.25, "logprob_diff_mean": 0.0},
        {"phase": "rl", "step": 1, "time": 7.0, "reward": 0.75, "logprob_diff_mean": 0.0},
    ]
    lines = [json.dumps(row) for row in rows]
    (path / "metrics.jsonl").write_text("\n".join([lines[0], '{"torn', lines[1], "[1, 2]", lines[2]]) + "\n")
    (path / "events.jsonl").write_text(
        '{"role": "x", "event": "update"}\n{"time": 6.5, "event": "kill", "target": "w"}\n'
    )
    run = load_run(path)
    assert run.series("rl", "reward") == [(0.0, 0.5), (1.0, 0.75)], "of a repeated step the later row counts"
    assert run.series("rl", "entropy") == []
    assert run.outages[0].back is None
    assert any("report.json: not valid JSON" in note for note in run.notes)
    assert any("metrics.jsonl: 2 unreadable lines" in note for note in run.notes)
    assert Page(render(run)).open == []


def test_errors_name_the_path_and_what_was_expected(tmp_path: Path, run_path: Path) -> None:
    with pytest.raises(UserError, match=r"demos: no such directory; expected a run directory.*did you mean 'demo'"):
        load_run(run_path.parent / "demos")
    with pytest.raises(UserError, match=r"not a run directory; expected.*it holds runs.*demo"):
        load_run(run_path.parent)
    with pytest.raises(UserError, match=r"not a run directory; expected a run directory, one that holds config.txt"):
        load_run(tmp_path)
    with pytest.raises(UserError, match=r"config.txt: not a run directory"):
        load_run(run_path / "config.txt")


def test_the_command_writes_the_page_and_prints_the_table(tmp_path: Path) -> None:
    path = write_run(tmp_path / "demo", steps=20)
    result = CliRunner().invoke(command, [str(path)])
    assert result.exit_code == 0, result.output
    assert (path / "report.html").is_file() and "pass@8  mean" in result.output
    assert not list(path.glob(".report*"))
    failed = CliRunner().invoke(command, [str(tmp_path / "demi")])
    assert isinstance(failed.exception, UserError)


def test_hostile_rows_do_not_stop_the_report(tmp_path: Path) -> None:
    """Half of a surrogate pair, as a model may sample it, and a row nested deeper than the interpreter goes."""
    path = write_run(tmp_path / "odd", steps=20)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 20, "a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    (path / "config.txt").write_bytes(b"\xff\xfe\x00binary")
    for sample in (path / "rollouts").glob("*.jsonl"):
        with sample.open("a") as file:
            file.write('{"step": 20, "prompt": "\\ud800", "answer": "\\udfff", "reward": 0.0}\n')
    page = Page(write_report(path).read_text(encoding="utf-8"))
    assert page.open == [] and "metrics.jsonl: 1 unreadable line skipped" in page.text


def test_the_tables_are_printed_where_the_page_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run", steps=20)
    (path / "report.html").unlink(missing_ok=True)
    (path / "report.html").mkdir()  # not even root can replace a folder by a file
    assert main(["report", str(path)]) == 2
    printed = capsys.readouterr()
    assert "pass@1" in printed.out
    assert "cannot write the report" in printed.err and "--output" in printed.err
    assert main(["report", str(path), "--output", str(tmp_path / "elsewhere.html")]) == 0
    assert Page((tmp_path / "elsewhere.html").read_text(encoding="utf-8")).open == []


def test_terms_of_a_reward_and_failures_of_its_scorer_are_shown(tmp_path: Path):
    (tmp_path / "config.txt").write_text("verifier.scorer.sandbox.allow_unisolated: True\n")
    rows = [{"phase": "rl", "step": n, "time": n, "reward": 0.1, "reward_term/shortness": n / 4} for n in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    failed = {
        "event": "score",
        "role": "worker-0",
        "time": 2.0,
        "answers": 8,
        "failed": 3,
        "error": "error: KeyError: 1",
    }
    (tmp_path / "events.jsonl").write_text(json.dumps(failed) + "\n")
    run = load_run(tmp_path)
    assert run.notes == [
        "3 answers could not be scored; the last one: error: KeyError: 1",
        "answers may have run as code without isolation (allow_unisolated)",
    ]
    assert "Reward of shortness: 0.25 at first, 1.00 at last" in charts.term_multiples(run)
    assert charts.term_multiples(replace(run, metrics=[])) == ""
