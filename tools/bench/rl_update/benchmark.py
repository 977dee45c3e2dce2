"""CPU seconds of a policy update by packed rows beside one by padded rows, and the tokens that each wastes.

Completions have log-normal lengths (sigma 1), cut at the 97th percentile, which is `max_new`: those of a reasoning
model are distributed like that. Both layouts get the same groups, and take turns in one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.training.step import State
from mesh import make_mesh, shard_batch
from rl.objective.presets import dapo
from rl.roles.headers import header_of
from rl.roles.messages import Group, Prompt, Rollout, Score, contents_of
from rl.training.batching import PackedRows, PaddedRows, arrange, fill_packed, fill_padded
from rl.training.packing import Packing
from rl.training.trainer import PolicyTrainer
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.rl_update import shared_prefix

GROUPS, SAMPLES, MAX_PROMPT, MAX_NEW = 32, 8, 17, 256
MICROBATCHES = 8  # of the padded update: 8,256 tokens each
PERCENTILE_97 = 1.8808  # of the normal distribution, in standard deviations
VOCAB = 512

Update = Callable[[list[Group]], dict[str, float]]


def run_sections(rounds: int, sections: Sequence[str]) -> dict[str, Any]:
    """Measure the sections of these names: `packing` (`run`) and `shared_prefix`."""
    result: dict[str, Any] = run(rounds) if "packing" in sections else {"bench": "rl_update", "rounds": rounds}
    if "shared_prefix" in sections:
        result["shared_prefix"] = shared_prefix.measure(rounds)
    return {**result, "machine": machine(), **circumstances()}


def run(rounds: int = 3, *, groups: int = GROUPS, samples: int = SAMPLES, max_new: int = MAX_NEW) -> dict[str, Any]:
    """Make `rounds` updates in each layout, alternating, after one of each that compiles.

    Returns:
        `wasted_tokens` and `wasted_tokens_padded`: of the tokens computed, the fraction that is padding or a prompt
        that another row has, too; means over rounds. `cpu_s` and `cpu_s_padded`: medians, host included.
        `cpu_ratio_to_padded`: the median over rounds of their quotient. `grad_norm_ratio`: of the first updates, which
        begin with the same parameters.
    """
    with jax.set_mesh(make_mesh()):
        sizes = (groups, samples, max_new)
        updates = {"packed": _update(*sizes, packed=True), "padded": _update(*sizes, packed=False)}
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in updates}
        for index in range(rounds + 1):
            batch = make_groups(index, groups, samples, max_new)
            for name, update in updates.items():
                began = time.process_time()
                figures = update(batch)
                measured[name].append({**figures, "cpu_s": time.process_time() - began})
    packed, padded = (measured[name][1:] for name in ("packed", "padded"))
    ratios = [ours["cpu_s"] / theirs["cpu_s"] for ours, theirs in zip(packed, padded, strict=True)]
    return {
        "bench": "rl_update",
        "wasted_tokens": round(statistics.mean(row["wasted_tokens"] for row in packed), 4),
        "wasted_tokens_padded": round(statistics.mean(row["wasted_tokens"] for row in padded), 4),
        "cpu_ratio_to_padded": round(statistics.median(ratios), 3),
        "cpu_s": round(statistics.median(row["cpu_s"] for row in packed), 3),
        "cpu_s_padded": round(statistics.median(row["cpu_s"] for row in padded), 3),
        "grad_norm_ratio": measured["packed"][0]["grad_norm"] / measured["padded"][0]["grad_norm"],
        "rounds": rounds,
        "job": f"{groups} prompts x {samples}, {MAX_PROMPT} + {max_new} tokens",
        "machine": machine(),
        **circumstances(),
    }


def make_groups(seed: int, groups: int, samples: int, max_new: int) -> list[Group]:
    """Return scored groups of random tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(np.minimum(rng.standard_normal((groups, samples)), PERCENTILE_97) - PERCENTILE_97) * max_new
    return [_group(rng, number, [int(length) for length in np.ceil(row)]) for number, row in enumerate(lengths)]


def _group(rng: np.random.Generator, number: int, lengths: list[int]) -> Group:
    prompt = Prompt(number, "random", rng.integers(0, VOCAB, rng.integers(1, MAX_PROMPT + 1)).astype(np.int32))
    rollouts = [
        Rollout(
            prompt_id=number,
            sample_id=sample,
            tokens=rng.integers(0, VOCAB, length).astype(np.int32),
            logprobs=np.full(length, -np.log(VOCAB), np.float32),
            versions=np.zeros(length, np.int32),
            action_mask=np.ones(length, bool),
            finish_reason="stop",
        )
        for sample, length in enumerate(lengths)
    ]
    return Group(prompt, tuple(rollouts), tuple(Score(float(rng.uniform())) for _ in lengths))


def _update(groups: int, samples: int, max_new: int, *, packed: bool) -> Update:
    """Return an update of a new policy, as the trainer makes it: from groups on the host to the new parameters."""
    rows: dict[str, Any] = (
        {"packing": Packing.Config(rows=2)} if packed else {"microbatches": min(MICROBATCHES, groups)}
    )
    cfg = PolicyTrainer.Config(
        model=_policy(),
        learner=Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-4), clip_norm=1.0),
        objective=dapo().set(old_policy="current"),
        max_prompt=MAX_PROMPT,
        max_new=max_new,
        temperature=1.0,
        row_multiple=groups,
        **rows,
    )
    program, objective, packing = cfg.program(make_mesh()), cfg.objective.build(), cfg.build_packing()
    state: list[State] = [jax.jit(program.init)(jax.random.key(0))]
    layout = PaddedRows(**cfg.sizes()) if packing is None else PackedRows(packing)

    def update(batch: list[Group]) -> dict[str, float]:
        contents = contents_of(batch)
        arranged = arrange([header_of(group) for group in batch], objective, layout)
        arrays: list[Any] = []
        for one in arranged.microbatches:
            if packing is None:
                filled = fill_padded(one.rows, arranged.prepared, contents, MAX_PROMPT, max_new, samples)
            else:
                filled = fill_packed(one.rows, one.length, arranged.prepared, contents, packing)
            arrays.append(shard_batch(filled))
        state[0], metrics = program.step(state[0], arrays[0] if packing is None else arrays)
        jax.block_until_ready(state[0])
        return {"grad_norm": float(metrics["grad_norm"]), "wasted_tokens": arranged.figures["wasted_tokens"]}

    return update


def _policy() -> Decoder.Config:
    attention = Attention.Config(num_heads=4, num_kv_heads=2, head_dim=32)
    block = Block.Config(attention=attention, feed_forward=SwiGLU.Config(hidden=384))
    return Decoder.Config(vocab_size=VOCAB, dim=128, num_layers=4, block=block)
