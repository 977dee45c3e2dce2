"""The gain of a group that shares its prompt: FLOPs, temporary memory and CPU seconds beside separate rows.

One prompt with its samples, all of one length, forward and backward pass of the policy's loss, compiled once for each
layout: every sample in a row of its own behind a copy of the prompt; the group in one row, padded (`GroupContext`); the
group as a packed row of trees. Samples of the forked group share their first quarter, halves of them the second, and
pairs the third: what is left of an answer is a quarter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import split
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from mesh import make_mesh
from mesh.cost.arithmetic import products
from rl.objective import Objective
from rl.objective.presets import dapo
from rl.roles.headers import header_of
from rl.roles.messages import Group, Prompt, Rollout, Score, contents_of
from rl.training.batching import Batch, PackedRows, arrange, fill_packed, pack_groups
from rl.training.packing import Packing
from rl.training.program import make_packed_loss, make_policy_loss

SAMPLES, ANSWER, RATIOS = 8, 64, (1, 4, 16)
VOCAB = 512
SEPARATE, ROW, TREE = "separate", "row", "tree"


class Layout(NamedTuple):
    """A group in one layout: the compiled gradient, its arguments, the FLOPs of its products and the bytes beside them.

    Attributes:
        tokens: in all rows.
    """

    gradient: Callable[..., Any]
    batch: Batch
    tokens: int
    flops: float
    temp_bytes: int


def measure(
    rounds: int = 3, *, samples: int = SAMPLES, answer: int = ANSWER, ratios: Sequence[int] = RATIOS
) -> dict[str, Any]:
    """Measure groups whose prompts are `ratios` times as long as an answer, and a forked one of the first ratio.

    Returns:
        By group, as "4:1" or "1:1 forked", and layout: tokens, flops, temp_bytes, cpu_s (median over rounds), and
        of the layouts with a shared prompt `to_separate`: the same as fractions of those of separate rows, and how far
        their gradient's norm is from that of separate rows, relative.
    """
    names = [(ratio, False) for ratio in ratios] + [(ratios[0], True)]
    with jax.set_mesh(make_mesh()):
        return {
            f"{ratio}:1{' forked' if forked else ''}": _compared(
                make_group(samples, answer, ratio, forked=forked), rounds
            )
            for ratio, forked in names
        }


def make_group(samples: int, answer: int, ratio: int, *, forked: bool) -> Group:
    """Return a scored group of random tokens."""
    rng = np.random.default_rng(ratio)
    prompt = Prompt(0, "random", rng.integers(0, VOCAB, ratio * answer + 1).astype(np.int32))
    tokens = rng.integers(0, VOCAB, (samples, answer)).astype(np.int32)
    if forked:
        for part, parties in enumerate((1, 2, 4)):
            at, each = slice(part * answer // 4, (part + 1) * answer // 4), max(1, samples // parties)
            for sample in range(samples):
                tokens[sample, at] = tokens[sample // each * each, at]
    rollouts = [
        Rollout(
            prompt_id=0,
            sample_id=sample,
            tokens=own,
            logprobs=np.full(answer, -np.log(VOCAB), np.float32),
            versions=np.zeros(answer, np.int32),
            action_mask=np.ones(answer, bool),
            finish_reason="stop",
        )
        for sample, own in enumerate(tokens)
    ]
    return Group(prompt, tuple(rollouts), tuple(Score(float(rng.uniform())) for _ in rollouts))


def _compared(group: Group, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each layout, which take turns."""
    model = _policy()
    graphdef, params = split(model.build(rngs=nnx.Rngs(0)))
    layouts = {name: _layout(name, group, graphdef, params) for name in (SEPARATE, ROW, TREE)}
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    norms: dict[str, float] = {}
    for _ in range(rounds + 1):  # the first is not measured
        for name, layout in layouts.items():
            began = time.process_time()
            slopes = jax.block_until_ready(layout.gradient(params, layout.batch))
            seconds[name].append(time.process_time() - began)
            norms[name] = float(np.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(slopes))))
    found: dict[str, dict[str, Any]] = {
        name: {
            "tokens": layout.tokens,
            "flops": layout.flops,
            "temp_bytes": layout.temp_bytes,
            "cpu_s": round(statistics.median(seconds[name][1:]), 4),
        }
        for name, layout in layouts.items()
    }
    whole = found[SEPARATE]
    for name in (ROW, TREE):
        ratios = {key: round(float(found[name][key] / whole[key]), 4) for key in whole}
        found[name]["to_separate"] = {**ratios, "grad_norm_error": abs(norms[name] / norms[SEPARATE] - 1)}
    return found


def _layout(name: str, group: Group, graphdef: Any, params: Any) -> Layout:
    objective = dapo().set(old_policy="current").build()
    prompt, answer = len(group.prompt.tokens), len(group.rollouts[0].tokens)
    sizes: dict[str, Any] = {"max_prompt": prompt, "max_new": answer}
    if name == TREE:
        batch = _tree(group, objective, sizes)
        loss = make_packed_loss(graphdef, objective, 1.0, answer)
    else:
        batch, _ = pack_groups([group], objective, **sizes, samples_per_row=1 if name == SEPARATE else None)
        loss = make_policy_loss(graphdef, objective, 1.0)
    gradient = jax.jit(jax.grad(lambda params, batch: loss(params, batch)[0]))
    traced = gradient.trace(params, batch)
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    tokens = batch["prefix"].size + batch["inputs"].size
    return Layout(compiled, batch, tokens, products(traced.jaxpr).total, memory.temp_size_in_bytes)


def _tree(group: Group, objective: Objective, sizes: dict[str, Any]) -> Batch:
    """Return the group's row of trees, exactly as long as its tokens."""
    header = header_of(group)
    tokens = header.tree.distinct({n: rollout.length for n, rollout in enumerate(header.rollouts)})
    length = max(tokens, sizes["max_new"])
    packing = Packing.Config(lengths=(length,), completions=len(group.rollouts), tree=True).build(**sizes)
    arranged = arrange([header], objective, PackedRows(packing))
    (microbatch,) = arranged.microbatches
    return fill_packed(microbatch.rows, length, arranged.prepared, contents_of([group]), packing)


def _policy() -> Decoder.Config:
    attention = Attention.Config(num_heads=4, num_kv_heads=2, head_dim=32)
    block = Block.Config(attention=attention, feed_forward=SwiGLU.Config(hidden=384))
    return Decoder.Config(vocab_size=VOCAB, dim=128, num_layers=4, block=block)
