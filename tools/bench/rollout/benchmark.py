"""`axl bench rollout`: sampled tokens per CPU second of generation alone, ours and peers', and more of our engine.

The result has sections, each a dict with keys of its own: the comparison with peers (`peers`), interleaved in one
run, and those of `rollout_sections`, one after the other, each alone in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mesh.errors import UserError, did_you_mean
from tools.bench.grpo.job import GrpoJob
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.environments import Peer, peers_of
from tools.bench.harness.interleave import OURS, Measured, Say, measure_with_peers, median_over_rounds, our_command
from tools.bench.harness.protocol import GENERATION_FIELDS
from tools.bench.rollout.sections import SECTIONS

BENCHMARK = "rollout"
PEERS = "peers"  # the name of the comparison among sections
_SECTION_TIMEOUT_S = 3600.0


def find_sections(names: Iterable[str], *, peers: bool) -> list[str]:
    """Return the sections of these names in the order in which they run; without names all of our engine's.

    Args:
        names: as on the command line.
        peers: whether peers were requested, which adds the comparison with them.

    Raises:
        UserError: a name is not that of a section.
    """
    known = (PEERS, *SECTIONS)
    asked = list(names)
    for name in asked:
        if name not in known:
            raise UserError(f"benchmark {BENCHMARK} has no section {name!r}{did_you_mean(name, known)}")
    chosen = set(asked or SECTIONS) | ({PEERS} if peers else set())
    return [name for name in known if name in chosen]


def run(
    peers: Sequence[Peer], rounds: int, say: Say, *, sections: Sequence[str] = (PEERS,), quick: bool = False
) -> dict[str, Any]:
    """Return everything that `--json` prints.

    Args:
        peers: systems of the comparison, if `sections` names it.
        rounds: of the comparison.
        say: called with one line about progress.
        sections: by name.
        quick: tiny jobs, as a smoke test; the comparison has one round.
    """
    where = machine()  # before we load it ourselves
    result: dict[str, Any] = {"bench": BENCHMARK, "sections": list(sections), "quick": quick}
    if PEERS in sections:
        result |= compare(peers, 1 if quick else rounds, say)
    ours = {name: run_section(name, say, quick=quick) for name in sections if name in SECTIONS}
    return result | merge(ours, result.get("errors", {})) | {"machine": where, **circumstances()}


def run_section(name: str, say: Say, *, quick: bool) -> dict[str, Any]:
    """Measure one section of `rollout_sections` in a process of its own; return {"error": why} if that failed."""
    say(f"{name}: {SECTIONS[name]}")
    command = our_command("tools.bench.rollout.sections")
    environ = {key: value for key, value in command.environ.items() if key != "JAX_ENABLE_COMPILATION_CACHE"}
    argv = [*command.argv, name, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(
            argv, env=environ, capture_output=True, text=True, timeout=_SECTION_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"{name}: not done within {_SECTION_TIMEOUT_S:g} s"}
    if done.returncode:
        reason = "\n".join(done.stderr.splitlines()[-8:])
        say(f"{name} failed: {reason}")
        return {"error": f"{name}: ended with status {done.returncode}\n{reason}"}
    return json.loads(done.stdout.splitlines()[-1])


def merge(sections: Mapping[str, Mapping[str, Any]], errors: Mapping[str, str]) -> dict[str, Any]:
    """Merge the sections' keys; `warm_compiles` is the sum of theirs, and `errors` has the sections that failed."""
    done = {name: part for name, part in sections.items() if "error" not in part}
    failed = {name: part["error"] for name, part in sections.items() if "error" in part}
    merged: dict[str, Any] = {}
    for part in done.values():
        merged |= {key: value for key, value in part.items() if key != "warm_compiles"}
    if done:
        by_section = {name: part["warm_compiles"] for name, part in done.items()}
        merged |= {"warm_compiles": sum(by_section.values()), "warm_compiles_by_section": by_section}
    return merged | {"errors": {**errors, **failed}}


def compare(peers: Sequence[Peer], rounds: int, say: Say) -> dict[str, Any]:
    """Measure the section of the comparison: our engine and `peers`, interleaved, on `GrpoJob`'s rollouts."""
    results = measure_with_peers(BENCHMARK, "tools.bench.rollout.ours", peers, rounds, say, GENERATION_FIELDS)
    return summarise(results, rounds)


def summarise(results: Mapping[str, Measured], rounds: int) -> dict[str, Any]:
    """Return the comparison's keys, from the measurements.

    `vs_<peer>` is the median over rounds of our tokens per CPU second divided by the peer's in the same
    round, above 1 where we are better, None unless both were measured.
    """
    done = {name: result for name, result in results.items() if result.error is None}
    ours = done.get(OURS)
    return {
        "tok_per_cpu_s": {name: _tok_per_cpu_s(result) for name, result in done.items()},
        **{f"vs_{name}": _versus(ours, done.get(name)) for name in peers_of(BENCHMARK)},
        "rounds": rounds,
        "systems": {name: _figures(result) for name, result in done.items()},
        "errors": {name: r.error for name, r in results.items() if r.error is not None},
    }


def succeeded(result: Mapping[str, Any], peers: Sequence[Peer]) -> bool:
    """Return whether the result has all that was requested: every section, our figures, and one peer if any."""
    if any(name in result["errors"] for name in result["sections"]):
        return False
    if PEERS not in result["sections"]:
        return True
    versus = [result[f"vs_{peer.name}"] for peer in peers]
    return OURS in result["systems"] and (not peers or any(ratio is not None for ratio in versus))


def describe_job(job: GrpoJob | None = None) -> str:
    """Describe the job in one line."""
    job = job or GrpoJob()
    return (
        f"{job.layers} layers x {job.dim}, {job.prompts} prompts x {job.group}, "
        f"{job.prompt_tokens} + {job.new_tokens} tokens with log-probabilities, float32, one core"
    )


def _tok_per_cpu_s(result: Measured) -> float:
    return result.median_ratio("new_tokens", "cpu_s")


def _versus(ours: Measured | None, theirs: Measured | None) -> float | None:
    if ours is None or theirs is None:
        return None
    return median_over_rounds(
        ours,
        theirs,
        lambda our, their: (our["new_tokens"] / our["cpu_s"]) / (their["new_tokens"] / their["cpu_s"]),
    )


def _figures(result: Measured) -> dict[str, Any]:
    return {
        "cpu_s": result.median("cpu_s"),
        "wall_s": result.median("wall_s"),
        "cpu_s_by_round": [step["cpu_s"] for step in result.steps],
        "new_tokens": result.steps[-1]["new_tokens"],
        "first_step_s": result.ready["first_step_s"],
        "first_step_cpu_s": result.ready["first_step_cpu_s"],
        "start_s": result.ready["start_s"],
        "parameters": result.ready["parameters"],
        "version": result.ready["version"],
    }
