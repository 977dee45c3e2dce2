"""Compilation of the decode program without any cache, as a first run on a machine has it.

The program decodes as many rows as the job has rollouts, on windows of 512 and of 2,048 keys, by samplers with a
temperature alone. By keys of a window: CPU seconds of all threads, of tracing, of lowering and of compiling, and how
many fused operations the compiled program has. A small program is compiled first, so imports count for none.
"""

import time
from collections.abc import Callable
from typing import Any

import jax

from mesh.programs.compilation import without_compilation_cache
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.aot import engine_dispatches
from tools.bench.rollout.sections.bed import Bed

KEYS, QUICK_KEYS, WARM_UP_KEYS = (512, 2048), (64, 512), 32


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure the key `cold_compile`. Everything here compiles, so nothing counts as compiled after a warm-up."""
    bed = Bed(quick=quick)
    jax.clear_caches()  # of what was traced by other sections
    with without_compilation_cache():
        _compile(bed, WARM_UP_KEYS)
        windows = {str(keys): _compile(bed, keys) for keys in (QUICK_KEYS if quick else KEYS)}
    return {"cold_compile": {"rows": bed.job.rollouts, "windows": windows}, "warm_compiles": 0}


def _compile(bed: Bed, keys: int) -> dict[str, float]:
    sizes: dict[str, Any] = {"max_prompt": keys // 2, "max_new": keys // 2, "max_num_seqs": bed.job.rollouts}
    cfg = RolloutEngine.Config(model=bed.policy, stop_tokens=(), **sizes)
    mesh, dispatches = engine_dispatches(cfg, jax.devices()[:1])
    decode = next(one for one in dispatches if one.kind == "decode" and one.plain)
    with jax.set_mesh(mesh):
        traced, trace = _spent(decode.trace)
        lowered, lower = _spent(traced.lower)
        compiled, compiling = _spent(lowered.compile)
    spent = {"trace_cpu_s": trace, "lower_cpu_s": lower, "compile_cpu_s": compiling}
    return {"cpu_s": sum(spent.values()), **spent, "fused_operations": fused_operations(compiled.as_text())}


def fused_operations(text: str) -> int:
    """Return the number of fusions that an optimised program of HLO calls."""
    return sum(" fusion(" in line for line in text.splitlines())


def _spent(run: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return run(), time.process_time() - began
