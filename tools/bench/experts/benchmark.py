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

from axlearn_like.layers.moe.placement.balance import make_plan
from axlearn_like.layers.moe.placement.plan import Domains
from mesh.cost.zebra import DeviceGroups, ZebraShape, asymmetric_ratio, break_even_bandwidth, zebra_ratio
from tools.bench.experts.stages import measure_stages
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.sections import run_sections

SECTIONS = {"plans": 5.0, "training": 90.0, "zebra": 30.0}
_EXPONENT = 1.2  # exponent of Zipf's law
_FIGURES = ("busiest_to_mean", "plan_s", "identical", "zebra_ratio", "asymmetric_ratio")
_FIGURES += ("samples_vs_restart", "samples_vs_uniform")
_NOT_MEASURED = {
    "samples_vs_restart": "a trainer that loses a process starts again from its checkpoint: there is no elastic one",
    "samples_vs_uniform": "there is no elastic trainer, so none whose placement could be uniform",
}


def _plans(quick: bool) -> dict[str, Any]:
    """Return seconds of plans, and the busiest device under choices by Zipf's law that are drawn after the plan."""
    layers, experts, devices = (4 if quick else 48), 128, 16
    ranks = np.arange(1, experts + 1) ** -_EXPONENT
    loads = np.stack([np.random.default_rng(layer).permutation(ranks / ranks.sum()) for layer in range(layers)])
    drawn = np.stack([np.random.default_rng(99).multinomial(devices * 65_536, load) for load in loads])
    began, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(loads, Domains(devices, 1, experts // devices + 2))
    model_s = time.perf_counter() - began
    home = drawn.reshape(layers, devices, -1).sum(axis=2)
    seconds = {}
    for threshold in (1, 2):
        hosts = np.arange(1, 257) ** -_EXPONENT
        start = time.perf_counter()
        make_plan(hosts[None], Domains(1024, 1, 8), threshold)
        seconds[threshold] = time.perf_counter() - start
    return {
        "busiest_to_mean": round(plan.busiest_to_mean(drawn), 4),
        "busiest_to_mean_without": round(float((home.max(axis=1) / home.mean(axis=1)).max()), 4),
        "plan_s": round(max(seconds.values()), 4),
        "plan_balanced_s": round(seconds[1], 4),
        "plan_surviving_s": round(seconds[2], 4),
        "plan_of_model_s": round(model_s, 4),
        "plans_cpu_s": round(time.process_time() - cpu, 3),
    }


def _training(quick: bool) -> dict[str, Any]:
    """Return how far the losses of a trainer with replicas are from those without, on eight devices of a CPU."""
    environ = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tools.bench.experts.curves", "4" if quick else "24"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        return {"identical": None, "not_measured_training": " ".join(reason)}
    return json.loads(done.stdout.splitlines()[-1])


def _zebra(quick: bool) -> dict[str, Any]:
    """Return ratios by the schedule, of stage times measured here and of equal ones; no two groups ran at once."""
    measured = measure_stages(rounds=2 if quick else 8)
    layers, batches = 24, 4
    found = ZebraShape(layers, batches, measured.attention, measured.experts, measured.transfer, measured.backward)
    equal = found._replace(experts=found.attention)
    # At 4:3 by assumption: one of 32 experts takes attention's devices half as long as its own.
    four_to_three = ZebraShape(layers, batches, 3.0, 4.0)
    groups = DeviceGroups(4, 4, 32, 0.25, 0.5, most=10**6)
    return {
        "zebra_ratio": round(zebra_ratio(equal), 3),
        "zebra_ratio_as_measured": round(zebra_ratio(found), 3),
        "asymmetric_ratio": round(asymmetric_ratio(four_to_three, groups), 3),
        "zebra_by": "schedule fed with stage times of one process; asymmetric_ratio of times by assumption",
        "break_even_bytes_per_s": round(break_even_bandwidth(found, measured.nbytes)),
        **measured.figures(),
    }


# A section returns its figures; the argument asks for tiny jobs, which show that all runs.
_MEASURES: Mapping[str, Callable[[bool], dict[str, Any]]] = {"plans": _plans, "training": _training, "zebra": _zebra}


def run(sections: Sequence[str], say: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Return the figures of sections, `missing`: those that Ctrl-C has left out, and what was not measured and why."""
    where = machine()  # measured before our own load
    found, missing = run_sections({name: partial(_MEASURES[name], quick) for name in sections}, say)
    about = {"bench": "experts", "missing": missing, "machine": where, **circumstances()}
    figures = {figure: value for some in found.values() for figure, value in some.items()}
    left_out = dict.fromkeys([name for name in _FIGURES if name not in figures], "not among the sections of this run")
    return about | dict.fromkeys(_FIGURES) | figures | {"not_measured": left_out | _NOT_MEASURED}
