"""`axl bench rollout`: sampled tokens per CPU second of generation alone, ours and peers', interleaved in one run."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from mesh.errors import UserError
from tools.bench.harness.checkout import of_checkout
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import OURS, Measured, Others, Say, errors_of, measure_with_peers, ratio_over_rounds
from tools.bench.harness.protocol import GENERATION_FIELDS, use_one_core
from tools.bench.harness.sections import run_sections

BENCHMARK = "rollout"


def run(others: Others | None, rounds: int, say: Say, *, sections: str = "", quick: bool = False) -> dict[str, Any]:
    """Return everything that `--json` prints; systems that cannot be run are listed under `errors`.

    Raises:
        UserError: an unknown section, or one with peers; or `quick` without one.
    """
    where = machine()  # measured before our own load
    if sections or quick:
        if sections != "coupled" or others:
            raise UserError(f"--sections {sections!r}: expected coupled, without --peers; --quick is of that section")
        use_one_core()  # jax counts the cores when it is imported
        coupled = of_checkout("coupled", "--sections coupled")
        figures = coupled.measure(say, rounds=1 if quick else min(rounds, 3), quick=quick)
        return {"bench": BENCHMARK, "coupled": figures, "errors": {}, "machine": where, **circumstances()}
    steps = partial(measure_with_peers, "tools.bench.rollout.ours", others, rounds, say, GENERATION_FIELDS)
    found, missing = run_sections({"rounds": steps}, say)
    figures = summarise(found.get("rounds", {}), rounds)
    return {"bench": BENCHMARK, **figures, "missing": missing, "machine": where, **circumstances()}


def summarise(results: Mapping[str, Measured], rounds: int) -> dict[str, Any]:
    """Return the comparison's keys, from the measurements.

    `vs_<peer>` is the median over rounds of our tokens per CPU second divided by the peer's in the same
    round, above 1 where we are better, None unless both were measured.
    """
    done = {name: result for name, result in results.items() if result.error is None}
    versus = {
        f"vs_{name}": ratio_over_rounds(done.get(OURS), done.get(name), lambda step: step["new_tokens"] / step["cpu_s"])
        for name in results
        if name != OURS
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
