"""Some steps of supervised training and of RL in this process, beside what the compiled programs would take at best.

The bound of a program is the longer of two times: its matrix products (as jax traced them) at the speed of products
that was measured here, and the bytes that it moves (as the compiler laid it out) at the measured bandwidth.
"""

import statistics
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import jax

from axlearn_like.operations.flops import count_parameters
from axlearn_like.operations.memory import device_memory
from axlearn_like.operations.utilisation import peak_flops
from axlearn_like.run.metrics import read_rows
from mesh.cost.arithmetic import products
from mesh.cost.hlo import parse
from mesh.cost.program import Program
from mesh.cost.traffic import operations
from mesh.errors import install_hint
from tools.bench.doctor.checks import Finding
from tools.bench.doctor.host import GIB
from tools.bench.doctor.speed import accelerated, matrix_speed, memory_speed
from tools.bench.doctor.supervised import train_bench
from tools.bench.grpo_step.job import GrpoJob

Options = Mapping[str, Any]
_WRONG = "run axl doctor --only attention,paged_decode,policy_head,numerics --json, and send the output"
_SLOW = "the checks bandwidth and matrix say what the device itself reaches; send the output of axl doctor --json"


def bound_of(program: Program, dtype: str) -> tuple[float, float]:
    """Return the least seconds of a program whose products are of this type, and the bytes that each device moves."""
    with jax.set_mesh(program.mesh):
        traced = program.trace()
        text = traced.lower().compile().as_text() or ""
    flops = products(traced.jaxpr).total / program.mesh.size
    moved = sum(one.times * one.bytes for one in operations(parse(text)))
    own = 1 if accelerated() else jax.device_count() / program.mesh.size  # devices of a CPU share it
    return max(flops / matrix_speed(dtype), moved / memory_speed()) / own, moved


def _sizes() -> tuple[Literal["float32", "bfloat16"], dict[str, int]]:
    """Return type and sizes of a model that fills an accelerator sensibly; a CPU's is tiny."""
    if not accelerated():
        return "float32", {"layers": 2}
    small = (device_memory(jax.devices()[0]) or 0) < 30 * GIB
    return "bfloat16", {"layers": 4 if small else 10, "dim": 2048, "ffn": 8192, "heads": 16}


def sft_step(options: Options) -> Finding:
    """Train a decoder on random tokens for some steps, by the Trainer that `axl train` runs."""
    (dtype, sizes), devices, peak = _sizes(), jax.device_count(), peak_flops(jax.devices())
    if accelerated():
        sizes |= {"length": 2048, "vocab": 16384}
    cfg = train_bench(batch=(8 if accelerated() else 4) * devices, dtype=dtype, **sizes)
    cfg.set(num_steps=12 if accelerated() else 6, mesh={"fsdp": -1})
    with tempfile.TemporaryDirectory(prefix="axl-doctor-") as folder:
        cfg.build().run(Path(folder, "run"), progress=False)
        rows = read_rows(Path(folder, "run", "metrics.jsonl"))
    seconds = statistics.median(row["step_seconds"] for row in rows[2:])
    program = cfg.programs(jax.devices())["train"]()
    tokens = program.rows * program.length
    reached, bound = program.flops / devices / seconds, bound_of(program, dtype)[0]
    used = f"MFU {reached / peak:.0%}" if peak else f"{reached / matrix_speed(dtype):.0%} of the speed of matrix"
    first, last = (float("nan") if row["loss"] is None else row["loss"] for row in (rows[0], rows[-1]))
    value = (
        f"{count_parameters(cfg.model) / 1e6:,.0f} M parameters, {dtype}: {tokens / seconds:,.0f} tokens/s, {used}, "
        f"{bound / seconds:.0%} of the compiler's bound; loss {first:.3f} to {last:.3f}"
    )
    figures = {"tokens_per_second": tokens / seconds, "step_seconds": seconds, "bound_seconds": bound}
    if not last < first - 0.02:  # batches differ by less
        return Finding("fail", f"{value}, which does not fall", _WRONG, figures)
    slow = accelerated() and bound < 0.3 * seconds
    return Finding("warn" if slow else "ok", value, _SLOW * slow, figures | {"mfu": peak and reached / peak})


def rl_step(options: Options) -> Finding:
    """Improve a random policy by GRPO for three updates, all roles in this process, as `--runtime inprocess`."""
    if find_spec("psutil") is None:
        return Finding("skip", "psutil is not installed", install_hint("rl"))
    from rl.runtime.run import RLRun
    from tools.bench.grpo_step.ours import experiment_config

    dtype, sizes = _sizes()
    if accelerated():
        job = GrpoJob(prompt_tokens=128, new_tokens=256, kv_heads=8, head_dim=128, **sizes)
    else:
        job = GrpoJob(prompts=2, group=4, new_tokens=32, dim=128, ffn=384, heads=4, **sizes)
    cfg = experiment_config(job).set(num_steps=3)
    cfg.policy.set(dtype=dtype, scan_unroll=1, remat="everything")
    with tempfile.TemporaryDirectory(prefix="axl-doctor-") as folder:
        RLRun(cfg.build(), say=lambda line: None).run(Path(folder, "run"), runtime="inprocess")
        rows, events = (read_rows(Path(folder, "run", f"{name}.jsonl")) for name in ("metrics", "events"))
    drawn, updated = (min(one["seconds"] for one in events if one["event"] == name) for name in ("generate", "update"))
    turns = job.new_tokens / cfg.engine.steps_per_dispatch
    bound, moved = (turns * figure for figure in bound_of(cfg.programs(jax.devices()[:1])["decode"](), dtype))
    drift, most = (rows[0][f"logprob_diff_{name}"] for name in ("max", "max_bound"))
    speed, reached = job.new_tokens_per_step / drawn, moved / drawn
    value = (
        f"{job.rollouts} rollouts of {job.new_tokens}: {speed:,.0f} tokens/s, decoding {reached / 1e9:,.1f} GB/s, "
        f"{bound / drawn:.0%} of the compiler's bound; an update takes {updated:.2f} s; log-probabilities of sampler "
        f"and trainer differ by {drift:.0e}"
    )
    figures = {"tokens_per_second": speed, "decode_bytes_per_second": reached, "update_seconds": updated}
    if not all(row["loss"] is not None and not row["skipped"] for row in rows):
        return Finding("fail", f"{value}; an update was skipped, or its loss is not finite", _WRONG, figures)
    if drift > most:
        return Finding("warn", f"{value}, expected at most {most:.0e}", _WRONG, figures)
    return Finding("ok", value, "", figures)
