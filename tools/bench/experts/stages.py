"""Seconds of attention and of experts for a microbatch in a layer of a small mixture, forward and backward."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_like.layers.base import bind, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Block
from models.moe import tiny_moe

_ROWS, _LENGTH, _DIM = 4, 128, 96


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """Medians of rounds, in seconds; `backward` is the backward pass over the forward one, `nbytes` those of rows."""

    attention: float
    experts: float
    transfer: float
    backward: float
    nbytes: int

    def figures(self) -> dict[str, float]:
        """Return the figures of a benchmark."""
        names = ("attention", "experts", "transfer")
        return {f"{name}_s": round(getattr(self, name), 6) for name in names} | {"backward": round(self.backward, 2)}


def measure_stages(rounds: int) -> StageTimes:
    """Return the times of a block of the demo's mixture on this process's device; a transfer is a copy in memory."""
    cfg = tiny_moe(vocab_size=64, dim=_DIM, num_heads=3, num_kv_heads=1, expert_hidden=128).block
    assert isinstance(cfg, Block.Config)
    graphdef, params = split(cfg.clone(dim=_DIM).build(rngs=nnx.Rngs(0)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(_ROWS, _LENGTH, _DIM)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(_LENGTH), (_ROWS, _LENGTH))
    context = PackedContext(positions, jnp.ones_like(positions))

    def attention(params: Any, x: jax.Array) -> jax.Array:
        block = bind(graphdef, params)
        return x + block.attention(block.attention_norm(x), context, None)[0]

    def experts(params: Any, x: jax.Array) -> jax.Array:
        block = bind(graphdef, params)
        return x + block.feed_forward(block.feed_forward_norm(x))[0]

    forward, whole = {}, {}
    for name, stage in (("attention", attention), ("experts", experts)):
        forward[name] = _seconds(jax.jit(stage), (params, x), rounds)
        whole[name] = _seconds(jax.jit(jax.grad(_scalar(stage), argnums=(0, 1))), (params, x), rounds)
    rows, into = np.asarray(x), np.empty_like(x)
    transfer = _seconds(lambda: np.copyto(into, rows), (), rounds)
    backward = max(0.5, sum(whole.values()) / sum(forward.values()) - 1)
    return StageTimes(forward["attention"], forward["experts"], transfer, backward, rows.nbytes)


def _scalar(stage: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, jax.Array], jax.Array]:
    return lambda params, x: jnp.sum(jnp.sin(stage(params, x)))


def _seconds(function: Any, args: tuple[Any, ...], rounds: int) -> float:
    """Return the median over rounds; the first call, which compiles, does not count."""
    jax.block_until_ready(function(*args))
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(function(*args))
        found.append(time.perf_counter() - began)
    return statistics.median(found)
