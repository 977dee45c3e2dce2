"""Workloads of what surrounds a policy: its head, adapters by row, and the int8 codec of weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.policy_head.statistics import policy_statistics
from axlearn_like.kernels.policy_head.sums import HeadRules
from axlearn_like.layers.linear import project
from axlearn_like.layers.wrappers.low_rank.matrices import RowAdapted
from rl.parameter_server.codecs.int8 import BLOCK, Int8Codec
from tests.benches.kernels.registry import DEVICE, HOST, Arrays, Implementation, KernelWorkload, float32

_WORDS = 4096


# ---- the head: log-probability of a word, and entropy, of tokens of 64 numbers over 4,096 words


def _head_inputs(tokens: int) -> Arrays:
    rng = np.random.default_rng(0)
    return rng.normal(size=(tokens, 64)), rng.normal(size=(64, _WORDS)) * 0.3, rng.integers(0, _WORDS, tokens)


def _head(xp: Any, x: Any, weight: Any, targets: Any) -> Any:
    logits = x @ weight
    logits = logits - logits.max(axis=-1, keepdims=True)
    exponentials = xp.exp(logits)
    total = exponentials.sum(axis=-1)
    chosen = xp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0] - xp.log(total)
    return xp.stack([chosen, xp.log(total) - (exponentials * logits).sum(axis=-1) / total])


def _head_tiles(x: Any, weight: Any, targets: Any) -> Any:
    found = policy_statistics(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(targets, jnp.int32), HeadRules(tile=512))
    return jnp.stack([found.logprob, found.entropy])


# ---- a matrix of 256 by 256 with one of eight LoRA updates of rank 8 for each row of 16 tokens


def _lora_inputs(rows: int) -> Arrays:
    rng = np.random.default_rng(0)
    shapes = [(rows, 16, 256), (256, 256), (8, 256, 8), (8, 8, 256)]
    return *(rng.normal(size=shape) * shape[-2] ** -0.5 for shape in shapes), rng.integers(0, 8, rows)


def _lora_numpy(x: Any, weight: Any, a: Any, b: Any, slots: Any) -> Any:
    y = x @ weight
    for slot in np.unique(slots):
        own = slots == slot
        y[own] += x[own] @ a[slot] @ b[slot]
    return y


def _lora_float64(x: Any, weight: Any, a: Any, b: Any, slots: Any) -> Any:
    return _lora_numpy(x.astype(float), weight.astype(float), a.astype(float), b.astype(float), slots)


def _lora_xla(x: Any, weight: Any, a: Any, b: Any, slots: Any) -> Any:
    rows = [jnp.take(jnp.asarray(one), jnp.asarray(slots), axis=0) for one in (a, b)]
    return project(jnp.asarray(x), RowAdapted(jnp.asarray(weight), *rows))


# ---- weights as int8 with a scale for each 128 entries, and back; the reference are the weights


def _codec_inputs(rows: int) -> Arrays:
    return (np.random.default_rng(0).normal(size=(rows, BLOCK)),)


def _codec_numpy(x: Any) -> Any:
    codec, values = Int8Codec(), np.ascontiguousarray(x, np.float32)
    return codec.decode(codec.encode(values), shape=values.shape, dtype=values.dtype)


def _codec_xla(x: Any) -> Any:
    scales = jnp.abs(x).max(axis=1, keepdims=True) / 127
    return jnp.rint(x / scales).astype(jnp.int8).astype(jnp.float32) * scales


POLICY_WORKLOADS = {
    "head": KernelWorkload(
        _head_inputs,
        float32,
        lambda x, weight, targets: _head(np, x.astype(np.float64), weight.astype(np.float64), targets),
        4e-6,
        (16, 64, 256, 1024),
        {
            "numpy": Implementation(HOST, lambda *given: _head(np, *given)),
            "xla": Implementation(DEVICE, lambda *given: _head(jnp, *map(jnp.asarray, given))),
            "tiles": Implementation(DEVICE, _head_tiles),
        },
    ),
    "lora": KernelWorkload(
        _lora_inputs,
        float32,
        _lora_float64,
        4e-6,
        (1, 4, 16, 64),
        {"numpy": Implementation(HOST, _lora_numpy), "xla": Implementation(DEVICE, _lora_xla)},
    ),
    "codec": KernelWorkload(
        _codec_inputs,
        float32,
        lambda x: x.astype(np.float64),
        4e-3,  # half a step is 1/254 of the largest entry of a block
        (64, 512, 4096, 16384),
        {"numpy": Implementation(HOST, _codec_numpy), "xla": Implementation(DEVICE, _codec_xla)},
    ),
}
