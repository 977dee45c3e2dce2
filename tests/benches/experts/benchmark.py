"""`axl bench experts`: sections that can be measured one by one; what is not measured is null, with the reason."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from axlearn_like.layers.moe.placement import make_plan
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.sections import run_sections

SECTIONS = {"plans": 5.0, "engine": 60.0, "training": 90.0, "zebra": 150.0, "elastic": 1500.0}
_EXPONENT = 1.2  # exponent of Zipf's law
_FIGURES = ("busiest_to_mean", "plan_s", "identical", "zebra_ratio", "asymmetric_ratio")
_FIGURES += ("samples_vs_restart", "samples_vs_uniform", "engine_busiest_to_mean", "engine_identical")


def _plans(quick: bool) -> dict[str, Any]:
    """Return seconds of plans, and the busiest device under choices by Zipf's law that are drawn after the plan."""
    layers, experts, devices = (4 if quick else 48), 128, 16
    ranks = np.arange(1, experts + 1) ** -_EXPONENT
    loads = np.stack([np.random.default_rng(layer).permutation(ranks / ranks.sum()) for layer in range(layers)])
    drawn = np.stack([np.random.default_rng(99).multinomial(devices * 65_536, load) for load in loads])
    began, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(loads, devices, experts // devices + 2)
    model_s = time.perf_counter() - began
    home = drawn.reshape(layers, devices, -1).sum(axis=2)
    hosts = np.arange(1, 257) ** -_EXPONENT
    began = time.perf_counter()
    make_plan(hosts[None], 1024, 8)
    hosts_s = time.perf_counter() - began
    return {
        "busiest_to_mean": round(plan.busiest_to_mean(drawn), 4),
        "busiest_to_mean_without": round(float((home.max(axis=1) / home.mean(axis=1)).max()), 4),
        "plan_s": round(hosts_s, 4),
        "plan_of_model_s": round(model_s, 4),
        "plans_cpu_s": round(time.process_time() - cpu, 3),
    }


def _engine(quick: bool) -> dict[str, Any]:
    """Return figures of an engine with replicas, on four devices of a CPU."""
    return _elsewhere("engine", "engines", 4, "4" if quick else "32")


def _training(quick: bool) -> dict[str, Any]:
    """Return how far the losses of a trainer with replicas are from those without, on eight devices of a CPU."""
    return _elsewhere("training", "curves", 8, "4" if quick else "24")


def _zebra(quick: bool) -> dict[str, Any]:
    """Return how much faster a step is whose attention and experts are on two devices of a CPU, of a core each."""
    return _elsewhere("zebra", "zebra", 2, "2" if quick else "8", xla="--xla_cpu_multi_thread_eigen=false")


def _elsewhere(section: str, module: str, devices: int, argument: str, *, xla: str = "") -> dict[str, Any]:
    """Return the figures that a module prints, run with so many devices and flags of XLA; or why it could not."""
    environ = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {xla}".strip()
    command = [sys.executable, "-m", f"tests.benches.experts.{module}", argument]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        return {f"not_measured_{section}": " ".join(reason)}
    return json.loads(done.stdout.splitlines()[-1])


def _elastic(quick: bool) -> dict[str, Any]:
    """Return samples trained under kills, against a trainer that restarts, and one with equal groups of experts."""
    from tests.benches.experts import placements, survivors

    return {**survivors.figures(quick), **placements.figures(quick)}


# A section returns its figures; the argument asks for tiny jobs, which show that all runs.
_MEASURES: Mapping[str, Callable[[bool], dict[str, Any]]] = {
    "plans": _plans,
    "engine": _engine,
    "training": _training,
    "zebra": _zebra,
    "elastic": _elastic,
}


def run(sections: Sequence[str], say: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Return the figures of sections, `missing`: those that Ctrl-C has left out, and what was not measured and why."""
    where = machine()  # measured before our own load
    found, missing = run_sections({name: partial(_MEASURES[name], quick) for name in sections}, say)
    about = {"bench": "experts", "missing": missing, "machine": where, **circumstances()}
    figures = {figure: value for some in found.values() for figure, value in some.items()}
    left_out = dict.fromkeys([name for name in _FIGURES if name not in figures], "not among the sections of this run")
    return about | dict.fromkeys(_FIGURES) | figures | {"not_measured": left_out}
