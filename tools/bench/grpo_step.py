"""`axl bench grpo_step`: CPU seconds of one GRPO step, ours and peers', taking turns in one run.

Each system is warm in a process of its own. A round asks each for one step while the others wait
idle, so that whatever else happens on the machine falls on all alike.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.grpo_job import GrpoJob
from tools.bench.peers.environments import EnvironmentFailed, Peer, ensure_environment
from tools.bench.step_worker import StepWorker, WorkerError

OURS = "ours"
WARM_UP_ROUNDS = 3
READY_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 300.0
_HERE = Path(__file__).resolve().parent
Say = Callable[[str], None]


@dataclass
class Measured:
    """What one system did: its ready line and the fields of its measured steps, warm-up left out.

    `error` says why it stopped before the end, and then its steps do not count.
    """

    ready: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None

    def median(self, name: str) -> float:
        """Median of a step field."""
        return statistics.median(step[name] for step in self.steps)

    def tokens_per_cpu_s(self) -> float:
        """Median of sampled tokens per CPU second of generation."""
        return statistics.median(step["new_tokens"] / step["gen_cpu_s"] for step in self.steps)


@dataclass(frozen=True)
class Command:
    """How to start a worker."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]


def worker_environ(**extra: str) -> dict[str, str]:
    """Environment that all workers share: CPU only, nothing of the caller's that changes figures.

    JAX's compilation cache on disk is off, so that a first step is a cold one.
    """
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "XLA_FLAGS")
    environ = {key: value for key, value in os.environ.items() if key not in dropped}
    return environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"} | extra


def our_command() -> Command:
    """Our own stack, with the interpreter that runs this."""
    root = str(_HERE.parents[1])  # holds the package `tools`, in a checkout and where installed
    return Command((sys.executable, "-m", "tools.bench.ours_grpo"), worker_environ(PYTHONPATH=root))


def peer_command(peer: Peer, say: Say) -> Command:
    """A peer in its own environment, which is made if need be.

    Raises:
        EnvironmentFailed: the environment cannot be made.
    """
    python = ensure_environment(peer, say)
    # Only this folder: the project's own packages must not shadow the peer's.
    environ = worker_environ(PYTHONPATH=str(_HERE), **peer.environ)
    return Command((str(python), str(_HERE / "peers" / peer.script)), environ)


def measure(commands: Mapping[str, Command], steps: int, say: Say) -> dict[str, Measured]:
    """Runs `steps` measured rounds of one step each, after the warm-up rounds.

    A worker that fails is left out from there on; the others go on.
    """
    results = {name: Measured() for name in commands}
    logs = Path(tempfile.mkdtemp(prefix="axl-bench-"))
    with contextlib.ExitStack() as stack:
        workers: dict[str, StepWorker] = {}
        for name, command in commands.items():  # one by one: a first step has the machine alone
            say(f"{name}: starting, first step")
            worker = StepWorker(name, command.argv, command.environ, logs / f"{name}.log", logs)
            stack.enter_context(worker)
            try:
                results[name].ready = worker.wait_ready(READY_TIMEOUT_S)
                workers[name] = worker
            except WorkerError as error:
                _leave_out(results[name], worker, error, say)
        for index in range(WARM_UP_ROUNDS + steps):
            if not workers:
                break
            for name in list(workers):
                try:
                    step = workers[name].step(STEP_TIMEOUT_S)
                except WorkerError as error:
                    _leave_out(results[name], workers.pop(name), error, say)
                    continue
                if index >= WARM_UP_ROUNDS:
                    results[name].steps.append(step)
            say(f"round {index + 1} of {WARM_UP_ROUNDS + steps} ({WARM_UP_ROUNDS} warm-up)")
    if all(result.error is None for result in results.values()):
        shutil.rmtree(logs)  # kept where an error points into it
    return results


def summarise(results: Mapping[str, Measured], steps: int) -> dict[str, Any]:
    """The result that `--json` prints.

    The best peer is the one with the lowest median CPU seconds a step; the ratio is the median over
    rounds of our CPU seconds by the best peer's in the same round, None without both.
    """
    done = {name: result for name, result in results.items() if result.error is None}
    ours = done.get(OURS)
    peers = {name: result for name, result in done.items() if name != OURS}
    best = min(peers, key=lambda name: peers[name].median("cpu_s"), default=None)
    ratio = None
    if ours is not None and best is not None:
        pairs = zip(ours.steps, peers[best].steps, strict=True)
        ratio = statistics.median(our["cpu_s"] / their["cpu_s"] for our, their in pairs)
    return {
        "bench": "grpo_step",
        "ours_cpu_s_per_step": ours and ours.median("cpu_s"),
        "ours_wall_s_per_step": ours and ours.median("wall_s"),
        "ours_gen_tok_per_cpu_s": ours and ours.tokens_per_cpu_s(),
        "ours_first_step_s": ours and ours.ready["first_step_s"],
        "ours_version": ours and ours.ready["version"],
        "peers": {name: _figures(result) for name, result in peers.items()},
        "best_peer": best,
        "ratio_to_best_peer": ratio,
        "steps": steps,
        "parameters": {name: result.ready["parameters"] for name, result in done.items()},
        "cpu_s_by_round": {name: [s["cpu_s"] for s in r.steps] for name, r in done.items()},
        "reward_last": {name: result.steps[-1]["reward"] for name, result in done.items()},
        "errors": {name: r.error for name, r in results.items() if r.error is not None},
        "machine": machine(),
    }


def run(peers: Sequence[Peer], steps: int, say: Say) -> dict[str, Any]:
    """Measures our stack and `peers`, interleaved; what cannot be run stands under `errors`."""
    commands = {OURS: our_command()}
    unmade: dict[str, Measured] = {}
    for peer in peers:
        try:
            commands[peer.name] = peer_command(peer, say)
        except EnvironmentFailed as error:
            say(f"left out: {error}")
            unmade[peer.name] = Measured(error=str(error))
    return summarise(measure(commands, steps, say) | unmade, steps)


def succeeded(result: Mapping[str, Any], peers: Sequence[Peer]) -> bool:
    """Whether what was asked for can be read off the result: ours, and one peer if any."""
    ours = result["ours_cpu_s_per_step"] is not None
    return ours and (not peers or result["ratio_to_best_peer"] is not None)


def machine() -> dict[str, Any]:
    """Where it ran: usable cores, processor model, load over one minute."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cores": cores, "cpu": model, "load": round(os.getloadavg()[0], 2)}


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the table for people: system, CPU s, wall s, tokens/CPU s, first step s, version."""
    ours = {
        "cpu_s_per_step": result["ours_cpu_s_per_step"],
        "wall_s_per_step": result["ours_wall_s_per_step"],
        "gen_tok_per_cpu_s": result["ours_gen_tok_per_cpu_s"],
        "first_step_s": result["ours_first_step_s"],
        "version": result["ours_version"],
    }
    systems = {} if ours["cpu_s_per_step"] is None else {OURS: ours}
    return [
        [
            name,
            f"{figures['cpu_s_per_step']:.3f}",
            f"{figures['wall_s_per_step']:.3f}",
            f"{figures['gen_tok_per_cpu_s']:,.0f}",
            f"{figures['first_step_s']:.1f}",
            figures["version"],
        ]
        for name, figures in (systems | result["peers"]).items()
    ]


def describe_job(job: GrpoJob | None = None) -> str:
    """The job in one line."""
    job = job or GrpoJob()
    return (
        f"{job.layers} layers x {job.dim}, {job.prompts} prompts x {job.group}, "
        f"{job.prompt_tokens} + {job.new_tokens} tokens, float32, CPU"
    )


def _figures(result: Measured) -> dict[str, Any]:
    return {
        "cpu_s_per_step": result.median("cpu_s"),
        "wall_s_per_step": result.median("wall_s"),
        "gen_tok_per_cpu_s": result.tokens_per_cpu_s(),
        "first_step_s": result.ready["first_step_s"],
        "start_s": result.ready["start_s"],
        "version": result.ready["version"],
    }


def _leave_out(result: Measured, worker: StepWorker, error: WorkerError, say: Say) -> None:
    result.error = str(error)
    say(f"left out: {error}")
    worker.close(grace_s=0.1)
