"""A made-up run directory, and readers of what is reported about it."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.report import load_run
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
        row["maj@8"] = 0.9 * rate + 0.1
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
    event(now, "worker-0", "program", step=0, lanes=[["sample 0", [["draw", 0.0, 0.5], ["wait", 0.5, 0.9]]]])
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
                **{f"grad_norm/{group}": abs(rng.gauss(0.2, 0.05)) for group in ("attention", "embedding", "norms")},
                "lr": 8e-5 * min(1, step / 20), "entropy": rng.gauss(0.62 - 0.3 * progress, 0.01),
                "clip_fraction": abs(rng.gauss(0.012, 0.004)),
                "kl_old_new": abs(rng.gauss(0.002, 0.0007)),
                "staleness_mean": stale - 0.4, "staleness_max": stale,
                "logprob_diff_mean": 10 ** rng.gauss(-6.6, 0.08),
                "logprob_diff_max": 10 ** rng.gauss(-5.3, 0.12), "ratio_mean": rng.gauss(1, 0.004),
                "zero_variance_fraction": min(1, abs(rng.gauss(0.3 + 0.1 * progress, 0.05))),
                "truncation_fraction": abs(rng.gauss(0.02, 0.01)),
                "completion_length": rng.gauss(11.5, 0.5), "gen_tokens": 2950 + rng.gauss(0, 90),
                "completion_length/right": rng.gauss(10.8, 0.5), "completion_length/wrong": rng.gauss(12.9, 0.8),
                **({"completion_length/truncated": 24.0} if rng.random() < 0.3 else {}),
                "kl_mu_pi": abs(rng.gauss(0.003, 0.001)), "ess": 1 - abs(rng.gauss(0.01, 0.004)),
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


def section(source: str, key: str) -> str:
    found = re.search(rf'<section id="{key}">(.*?)</section>', source, re.DOTALL)
    assert found, f"no section {key}"
    return found[1]


def table_text(path: Path) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        print_tables(load_run(path), console)
    return capture.get()
