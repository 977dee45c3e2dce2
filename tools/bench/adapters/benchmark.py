"""Many adapters in one batch beside one adapter after another, and beside the base alone: the same requests, drawn.

The loop is as fast as a loop can be: all adapters are in place already, and each turn's rows are those of one adapter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.wrappers.adapters import Adapter, Factors, matrices
from rl.roles.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.request import Request
from tools.bench.harness.circumstances import circumstances, machine

ADAPTERS, RANK, PROMPT, NEW = 32, 8, 32, 16
WIDTH, LAYERS, VOCAB = 768, 2, 2048
BENCHMARK = "adapters"


def run(
    rounds: int = 5,
    say: Callable[[str], None] = lambda line: None,
    *,
    adapters: int = ADAPTERS,
    width: int = WIDTH,
    new: int = NEW,
) -> dict[str, Any]:
    """Draw one completion for each adapter, in all three ways in turn, after what compiles.

    Returns:
        `speedup_over_loop` and `overhead_to_base` by CPU seconds, and `..._wall` by the clock: medians over rounds of
        the quotients within a round (less 1 for the overhead). `cpu_s` and `wall_s` of each way: medians.
    """
    model = _model(width)
    ways = _ways(model, adapters, new)
    measured: list[dict[str, tuple[float, float]]] = []
    for index in range(rounds):
        say(f"round {index + 1} of {rounds}")
        measured.append({name: _timed(way) for name, way in ways.items()})
        say("CPU s: " + ", ".join(f"{name} {cpu:.2f}" for name, (cpu, _) in measured[-1].items()))

    def quotient(part: int, over: str, under: str) -> float:
        return statistics.median(row[over][part] / row[under][part] for row in measured)

    return {
        "bench": BENCHMARK,
        "speedup_over_loop": round(quotient(0, "loop", "mixed"), 2),
        "speedup_over_loop_wall": round(quotient(1, "loop", "mixed"), 2),
        "overhead_to_base": round(quotient(0, "mixed", "base") - 1, 3),
        "overhead_to_base_wall": round(quotient(1, "mixed", "base") - 1, 3),
        "cpu_s": {name: round(statistics.median(row[name][0] for row in measured), 3) for name in ways},
        "wall_s": {name: round(statistics.median(row[name][1] for row in measured), 3) for name in ways},
        "rounds": rounds,
        "job": (
            f"{adapters} adapters of rank {RANK} on all matrices of {LAYERS} layers of width {width}, "
            f"{PROMPT} + {new} tokens for each"
        ),
        "machine": machine(),
        **circumstances(),
    }


def _ways(model: Decoder.Config, adapters: int, new: int) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name."""
    cfg = RolloutEngine.Config(model=model, stop_tokens=(), max_prompt=PROMPT, max_new=new, max_num_seqs=adapters)
    cfg.set(enable_prefix_caching=False, keep_completions=False)
    weights = split(model.build(rngs=nnx.Rngs(0)))[1]
    plain, adapted = cfg.build(), cfg.build(adapters=AdapterLimits(slots=adapters, rank=RANK))
    names = [f"adapter {number}" for number in range(adapters)]
    for engine in (plain, adapted):
        engine.set_weights(weights, 0)
    for seed, name in enumerate(names):
        adapted.load_adapter(name, random_adapter(model, seed))
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, "random", rng.integers(0, VOCAB, PROMPT).astype(np.int32)) for i in range(adapters)]
    requests = [Request(prompt, adapter=name) for prompt, name in zip(prompts, names, strict=True)]
    for _ in range(2):  # what is compiled, and what is allocated once
        plain.generate([Request(prompt) for prompt in prompts])
        adapted.generate(requests)
        adapted.generate(requests[:1])
    return {
        "base": lambda: plain.generate([Request(prompt) for prompt in prompts]),
        "mixed": lambda: adapted.generate(requests),
        "loop": lambda: [adapted.generate([request]) for request in requests],
    }


def random_adapter(model: Decoder.Config, seed: int) -> Adapter:
    """Return an adapter of every matrix, whose updates are a tenth as large as the matrices."""
    rng = np.random.default_rng(seed)
    built = build_abstract(model)

    def factors(layers: int, inputs: int, outputs: int) -> Factors:
        a = rng.standard_normal((layers, inputs, RANK), np.float32) * inputs**-0.5
        return Factors(a, 0.1 * RANK**-0.5 * rng.standard_normal((layers, RANK, outputs), np.float32))

    return Adapter({path: factors(one.layers, one.inputs, one.outputs) for path, one in matrices(built)})


def _timed(way: Callable[[], Any]) -> tuple[float, float]:
    """Return CPU and wall seconds."""
    cpu, wall = time.process_time(), time.monotonic()
    way()
    return time.process_time() - cpu, time.monotonic() - wall


def _model(width: int) -> Decoder.Config:
    attention = Attention.Config(num_heads=width // 64, num_kv_heads=width // 128, head_dim=64)
    block = Block.Config(attention=attention, feed_forward=SwiGLU.Config(hidden=3 * width))
    return Decoder.Config(vocab_size=VOCAB, dim=width, num_layers=LAYERS, block=block)
