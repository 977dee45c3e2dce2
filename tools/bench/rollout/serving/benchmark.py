"""`axl bench serve`: a server started with an empty compilation cache, under load from the moment it serves."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.run.child_group import ChildGroup
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import Say
from tools.bench.harness.processes import ROOT, Command, MeasurementFailed, run_command
from tools.bench.rollout.serving.client import Load, cpu_seconds

START_S = 900.0  # limit of the time to "serving"
LEVELS = {"1": 8, "8": 32, "50": 100}  # requests at once: requests of a pass
PROMPT, NEW = 48, 64  # tokens
SIZES = (f"max_prompt_tokens={PROMPT}", f"max_new_tokens={NEW}", "engine.max_num_seqs=64")


@dataclasses.dataclass(frozen=True)
class Job:
    """A model to serve, and the load on it."""

    name: str = "demo"  # an experiment, whose random weights are served
    sets: tuple[str, ...] = SIZES  # edits of it
    warmup: str = "full"  # value of `axl serve --warmup`
    passes: int = 5  # passes of each level
    # Requests of a pass, by how many are made at once
    levels: Mapping[str, int] = dataclasses.field(default_factory=lambda: LEVELS)
    seed: int = 0  # seed of the order and the prompts


@dataclasses.dataclass(frozen=True)
class Started:
    """A server, its port, and what it took to serve."""

    process: subprocess.Popen[str]
    port: int
    seconds: float
    cpu_s: float


def run(job: Job, say: Say) -> dict[str, Any]:
    """Start a server twice, and load it after the first start; returns the figures of docs/benchmarks/index.md.

    Raises:
        MeasurementFailed: the server did not start, or a request failed.
    """
    with tempfile.TemporaryDirectory(prefix="axl-bench-serve-") as folder:
        say(f"{job.name}: start with an empty compilation cache")
        with serving(job, Path(folder)) as cold:
            say(f"serving after {cold.seconds:.1f} s; {job.passes} passes of each of {', '.join(job.levels)} at once")
            sizes: dict[str, Any] = {"passes": job.passes, "levels": dict(job.levels), "seed": job.seed}
            load = Load(cold.port, cold.process.pid, job.name, **sizes, prompt=PROMPT, new=NEW)
            argv = (sys.executable, "-m", "tools.bench.rollout.serving.client")
            found = run_command(Command(argv, _environ(Path(folder))), said=json.dumps(dataclasses.asdict(load)))
        say("start again, with the programs of the first on disk")
        with serving(job, Path(folder)) as again:
            pass
    starts = {"startup_s": cold.seconds, "startup_cpu_s": cold.cpu_s}
    starts |= {"cached_startup_s": again.seconds, "cached_startup_cpu_s": again.cpu_s}
    about = {"bench": "serve", "warmup": job.warmup, "machine": machine(), **circumstances()}
    return {**about, **figures(found), **starts}


def figures(passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what passes were like, the first of which is one request: of each level the worst pass."""
    (first, *rest), levels = passes, sorted({one["at_once"] for one in passes})
    by_level = {str(level): [one for one in rest if one["at_once"] == level] for level in levels}
    times = sorted(seconds for one in passes for seconds in one["first_s"])
    alone = [seconds for one in by_level["1"] for seconds in one["all_s"]]
    return {
        "tokens_per_s": {
            level: min(one["tokens"] / one["seconds"] for one in some) for level, some in by_level.items()
        },
        "median_tokens_per_s": {
            level: statistics.median(one["tokens"] / one["seconds"] for one in some) for level, some in by_level.items()
        },
        "tokens_per_cpu_s": {
            level: sum(one["tokens"] for one in some) / max(0.01, sum(one["cpu_s"] for one in some))
            for level, some in by_level.items()
        },
        "p50_first_token_s": statistics.median(times),
        "p99_first_token_s": times[min(len(times) - 1, int(0.99 * len(times)))],
        "slowest_first_token_s": times[-1],
        "first_request_ratio": first["all_s"][0] / statistics.median(alone),
    }


@contextlib.contextmanager
def serving(job: Job, cache: Path) -> Iterator[Started]:
    """Run `axl serve` on a free port until the end of the block, with a compilation cache.

    Raises:
        MeasurementFailed: it ended, or did not serve in time.
    """
    argv = [sys.executable, "-m", "tools.cli", "serve", job.name, "--random-weights", "--port", "0"]
    argv += ["--warmup", job.warmup, *(word for edit in job.sets for word in ("--set", edit))]
    log, began = cache / "server.log", time.perf_counter()
    with log.open("w") as out:
        process = ChildGroup(argv, stdout=out, stderr=subprocess.STDOUT, env=_environ(cache), text=True)
    try:
        while (found := re.search(r"^serving .*:(\d+)/v1", log.read_text(), re.MULTILINE)) is None:
            if process.poll() is not None or time.perf_counter() - began > START_S:
                raise MeasurementFailed(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield Started(process, int(found[1]), time.perf_counter() - began, cpu_seconds(process.pid))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environ(cache: Path) -> dict[str, str]:
    """Return the environment of server and client: the caller's, with this compilation cache and our packages."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "AXL_COMPILATION_CACHE": str(cache / "programs"), "PYTHONPATH": path}
