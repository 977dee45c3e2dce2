"""`axl bench rollout`: sampled tokens per CPU second of generation alone, ours and peers', and more of our engine.

The result has sections, each a dict with keys of its own: the comparison with peers (`peers`), interleaved in one
run, and those of our engine, one after the other, each alone in a process of its own on one core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.environments import Peer, peers_of
from tools.bench.harness.interleave import OURS, Measured, Say, errors_of, measure_with_peers, ratio_over_rounds
from tools.bench.harness.protocol import GENERATION_FIELDS
from tools.bench.harness.sections import run_sections
from tools.bench.rollout.sections import SECTIONS

BENCHMARK = "rollout"
PEERS = "peers"  # the name of the comparison among sections


def run(
    peers: Sequence[Peer], rounds: int, say: Say, *, sections: Sequence[str], quick: bool = False
) -> dict[str, Any]:
    """Return everything that `--json` prints.

    Args:
        peers: systems of the comparison, if `sections` names it.
        rounds: rounds of the comparison.
        say: called with one line about progress.
        sections: by name.
        quick: tiny jobs, as a smoke test; the comparison has one round.
    """
    where = machine()  # measured before our own load
    result: dict[str, Any] = {"bench": BENCHMARK, "sections": list(sections), "quick": quick, "errors": {}}
    if PEERS in sections:
        rounds = 1 if quick else rounds
        results = measure_with_peers(BENCHMARK, "tools.bench.rollout.ours", peers, rounds, say, GENERATION_FIELDS)
        result |= summarise(results, rounds)
    chosen = {name: what for name, what in SECTIONS.items() if name in sections}
    flags = ["--one-core", *(["--quick"] if quick else [])]
    parts, errors = run_sections("tools.bench.rollout.sections", chosen, say, *flags)
    compiled = {name: part.pop("warm_compiles") for name, part in parts.items()}
    for part in parts.values():
        result |= part
    if compiled:
        result |= {"warm_compiles": sum(compiled.values()), "warm_compiles_by_section": compiled}
    return result | {"errors": result["errors"] | errors, "machine": where, **circumstances()}


def summarise(results: Mapping[str, Measured], rounds: int) -> dict[str, Any]:
    """Return the comparison's keys, from the measurements.

    `vs_<peer>` is the median over rounds of our tokens per CPU second divided by the peer's in the same
    round, above 1 where we are better, None unless both were measured.
    """
    done = {name: result for name, result in results.items() if result.error is None}
    versus = {
        f"vs_{name}": ratio_over_rounds(done.get(OURS), done.get(name), lambda step: step["new_tokens"] / step["cpu_s"])
        for name in peers_of(BENCHMARK)
    }
    return {
        "tok_per_cpu_s": {name: result.median_ratio("new_tokens", "cpu_s") for name, result in done.items()},
        **versus,
        "rounds": rounds,
        "systems": {name: _figures(result) for name, result in done.items()},
        "errors": errors_of(results),
    }


def _figures(result: Measured) -> dict[str, Any]:
    ready = ("first_step_s", "first_step_cpu_s", "start_s", "parameters", "version")
    return {
        "cpu_s": result.median("cpu_s"),
        "wall_s": result.median("wall_s"),
        "cpu_s_by_round": [step["cpu_s"] for step in result.steps],
        "new_tokens": result.steps[-1]["new_tokens"],
        **{name: result.ready[name] for name in ready},
    }
