"""Weights of eight bits: what the decode program reads, and what drawing costs on this machine.

* `argument_ratio`: argument bytes of the compiled decode program, pages of 16 sequences of 512 tokens included, with
  matrices, embedding and head as int8 / as bfloat16: the largest of the models in `models`, which are compiled ahead of
  time for one chip of `chip`. None where there is no TPU compiler, see `reason`.
* `cpu_ratio`: CPU seconds per token, of the job's policy in float32, with such weights / without: on a CPU they become
  floats again in every step.
"""

import statistics
from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.layers.wrappers.quantised import StoredWeights
from mesh.cost.ahead_of_time import Memory, compile_step
from mesh.topology import find_compiler, parse_topology, topology_devices
from models.llama import llama
from models.qwen import qwen
from models.tiny import tiny
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.aot import engine_dispatches
from tools.bench.rollout.sections.bed import Bed, after_warm_up
from tools.bench.rollout.sections.speculation import timed

CHIP = "v6e:1x1"
WEIGHTS = StoredWeights.Config(vocabulary="int8")
WAYS = {"plain": None, "int8": WEIGHTS}


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the key `quantised`; medians over rounds."""
    drawing, compiled = _drawing(quick=quick)
    return {"quantised": {**_compiled(quick=quick), **drawing}, "warm_compiles": compiled}


def _compiled(*, quick: bool) -> dict[str, Any]:
    if find_compiler() is None:
        return {"argument_ratio": None, "reason": "the TPU compiler (libtpu, extra `aot`) is not installed"}
    # One with a head of its own, one whose head is the embedding.
    models: dict[str, ConfigBase] = {name: make(name) for name, make in MODELS.items()}
    if quick:
        models = {"tiny": tiny(vocab_size=1024, dim=256, hidden=512, num_layers=1).set(dtype="bfloat16")}
    found = {name: _program(model) for name, model in models.items()}
    return {"argument_ratio": max(one["argument_ratio"] for one in found.values()), "chip": CHIP, "models": found}


MODELS: dict[str, Any] = {"Llama-3.1-8B": llama, "Qwen2.5-1.5B": qwen}


def _program(model: ConfigBase) -> dict[str, Any]:
    """Return the sizes of a model's decode program, in bytes."""
    plans = {way: _memory(model, weights) for way, weights in WAYS.items()}
    return {
        "argument_ratio": plans["int8"].arguments / plans["plain"].arguments,
        "argument_bytes": {way: plan.arguments for way, plan in plans.items()},
        "temp_bytes": {way: plan.temp for way, plan in plans.items()},
    }


def _memory(model: ConfigBase, weights: StoredWeights.Config | None) -> Memory:
    sizes: dict[str, Any] = {"max_prompt": 256, "max_new": 256, "max_num_seqs": 16}
    cfg = RolloutEngine.Config(model=model, stop_tokens=(), weights=weights, **sizes)
    topology = parse_topology(CHIP)
    mesh, dispatches = engine_dispatches(cfg, topology_devices(topology))
    plain = next(one for one in dispatches if one.kind == "decode")
    memory = compile_step(plain.name, plain.trace, mesh, topology).memory
    assert memory is not None, "it fits"
    return memory


def _drawing(*, quick: bool) -> tuple[dict[str, Any], int]:
    bed = Bed(quick=quick)
    job = bed.job
    sizes: dict[str, Any] = {"max_num_seqs": job.rollouts, "max_prompt": job.prompt_tokens, "max_new": job.new_tokens}
    engines = {way: bed.engine(**sizes, weights=weights) for way, weights in WAYS.items()}

    def run() -> dict[str, float]:
        sized: dict[str, Any] = {"prompt_tokens": job.prompt_tokens, "samples": job.group}
        asked = [bed.request(job.new_tokens, **sized) for _ in range(job.prompts)]
        return {way: timed(engine, asked)[1].cpu / job.new_tokens_per_step for way, engine in engines.items()}

    rounds, compiled = after_warm_up(1 if quick else 5, run)
    figures = {
        "cpu_ratio": statistics.median(one["int8"] / one["plain"] for one in rounds),
        "tok_per_cpu_s": {way: statistics.median(1 / one[way] for one in rounds) for way in WAYS},
    }
    return {**figures, "rounds": len(rounds)}, compiled
