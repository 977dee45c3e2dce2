"""Workloads of the bench of kernels: attention, grouped products, a low-rank network, and those of other files."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.attention.xla import mix
from axlearn_like.kernels.grouped_matmul import grouped_product
from axlearn_like.kernels.low_rank.feed_forward import GLUFactors, by_kernel
from tests.benches.kernels.ldpc.workload import LDPC
from tests.benches.kernels.policy_workloads import POLICY_WORKLOADS
from tests.benches.kernels.registry import DEVICE, HOST, SIMULATED, Arrays, Implementation, KernelWorkload, float32

# ---- causal attention: rows of 64 tokens, two key/value heads, four query heads of 32


def _attention_inputs(rows: int) -> Arrays:
    rng = np.random.default_rng(0)
    kv = (rows, 64, 2, 32)
    return rng.normal(size=(*kv[:3], 2, 32)), rng.normal(size=kv), rng.normal(size=kv)


def _attention_numpy(q: Any, k: Any, v: Any) -> Any:
    scores = np.einsum("btkqh,bskh->bkqts", q, k) * q.dtype.type(q.shape[-1] ** -0.5)
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bkqts,bskh->btkqh", weights, v)


def _attention_xla(q: Any, k: Any, v: Any) -> Any:
    causal = jnp.broadcast_to(jnp.tri(q.shape[1], dtype=bool), (q.shape[0], q.shape[1], q.shape[1]))
    return mix(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), causal, ScoreRules())


# ---- grouped products: rows of 128 in eight groups of uneven sizes


def _grouped_inputs(rows: int) -> Arrays:
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(rows, np.arange(1, 9) / 36).astype(np.int32)
    return rng.normal(size=(rows, 128)), rng.normal(size=(8, 128, 128)) * 128**-0.5, sizes


def _grouped_numpy(x: Any, w: Any, sizes: Any) -> Any:
    ends = np.cumsum(sizes)
    return np.concatenate([x[end - size : end] @ one for one, size, end in zip(w, sizes, ends, strict=True)])


# ---- a gated network of 64 numbers and 384 units, as factors of rank 16


def _low_rank_inputs(tokens: int) -> Arrays:
    rng = np.random.default_rng(0)
    shapes = [(64, 16), (16, 384), (64, 16), (16, 384), (384, 16), (16, 64)]
    return rng.normal(size=(tokens, 64)), *(rng.normal(size=shape) * shape[0] ** -0.5 for shape in shapes)


def _low_rank(xp: Any, x: Any, *factors: Any) -> Any:
    gate_a, gate_b, up_a, up_b, down_a, down_b = factors
    return _gated(xp, x @ gate_a @ gate_b, x @ up_a @ up_b) @ down_a @ down_b


def _gated(xp: Any, gate: Any, up: Any) -> Any:
    return gate / (1 + xp.exp(-gate)) * up


def _low_rank_kernel(x: Any, *factors: Any) -> Any:
    combine = functools.partial(_gated, jnp)
    return by_kernel(jnp.asarray(x), GLUFactors(*(jnp.asarray(one) for one in factors)), combine, interpret=True)


WORKLOADS = {
    "attention": KernelWorkload(
        _attention_inputs,
        float32,
        lambda *given: _attention_numpy(*(one.astype(np.float64) for one in given)),
        4e-6,
        (1, 4, 16, 64),
        {"numpy": Implementation(HOST, _attention_numpy), "xla": Implementation(DEVICE, _attention_xla)},
    ),
    "grouped": KernelWorkload(
        _grouped_inputs,
        float32,
        lambda x, w, sizes: _grouped_numpy(x.astype(np.float64), w.astype(np.float64), sizes),
        4e-6,
        (16, 64, 256, 1024),
        {
            "numpy": Implementation(HOST, _grouped_numpy),
            "xla": Implementation(DEVICE, lambda *given: grouped_product(*map(jnp.asarray, given))),
        },
    ),
    "low_rank": KernelWorkload(
        _low_rank_inputs,
        float32,
        lambda *given: _low_rank(np, *(one.astype(np.float64) for one in given)),
        8e-6,
        (16, 64, 256, 1024),
        {
            "numpy": Implementation(HOST, functools.partial(_low_rank, np)),
            "xla": Implementation(DEVICE, functools.partial(_low_rank, jnp)),
            "pallas": Implementation(SIMULATED, _low_rank_kernel),
        },
    ),
    **POLICY_WORKLOADS,
    "ldpc": LDPC,
}
