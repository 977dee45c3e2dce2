"""Attention over rows that are cut over devices; run in a process that has eight (see tests/elsewhere.py)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.context_parallel import zigzag
from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
from axlearn_like.kernels.attention.context_parallel.ring import Ring
from axlearn_like.kernels.attention.dispatch import AttentionParams, FirstSupported, attend
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.attention.splash import Splash
from mesh import make_mesh
from mesh.rules import constrain
from tests.axlearn_like.kernels.attention import reference

LENGTH = 32
MESHES = {
    "sequence 4 x fsdp 2": {"sequence": 4, "fsdp": 2},
    "data 2 x sequence 2 x tensor 2": {"data": 2, "sequence": 2, "tensor": 2},
}
RULES = {
    "causal": (ScoreRules(), False),
    "window, cap, sinks": (ScoreRules(window=9, soft_cap=2.0), True),
}


def value_and_grad(
    x: reference.Inputs, rules: ScoreRules, sinks: bool, kernel: Any, sequence: Any = None, order: str = ""
) -> Any:
    """Mixed values and gradients, rows straight again, under the mesh in force."""
    cp_size = jax.sharding.get_abstract_mesh().shape.get("sequence", 1)
    places = zigzag.order(x.q.shape[1], cp_size) if order == "zigzag" else np.arange(x.q.shape[1])
    back = np.argsort(places)
    if order == "zigzag":
        np.testing.assert_array_equal(back, zigzag.inverse(x.q.shape[1], cp_size))
    weights = np.random.default_rng(3).normal(size=(*x.q.shape[:-1], x.v.shape[-1])).astype(np.float32)

    def loss(q: Any, k: Any, v: Any, s: Any) -> Any:
        attention = AttentionParams(
            rules, kernel.build(), (sequence or AllGather.Config()).build(), s if sinks else None
        )
        layout: Any = order or "straight"
        segments = constrain(jnp.asarray(x.segments[:, places]), "batch", "length")
        if order == "zigzag":
            q, k, v = (a[:, places] for a in (q, k, v))
        out = attend(q, k, v, attention, segment_ids=segments, layout=layout)
        out = constrain(out, "batch", None, "heads", None, None)
        out = out[:, back] if order == "zigzag" else out
        return jnp.sum(out * weights), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(x.q, x.k, x.v, x.sinks)
    return [np.asarray(a) for a in (out, *grads[: 4 if sinks else 3])]


def differences() -> dict[str, float]:
    """Return, by case, the largest difference to one device, relative to the largest entry."""
    jax.config.update("jax_num_cpu_devices", 8)
    found = {}
    x = reference.inputs(batch=4, length=LENGTH, heads=(2, 2), width=4, value_width=6)
    for kind, (rules, sinks) in RULES.items():
        expected = value_and_grad(x, rules, sinks, FirstSupported.Config())
        for mesh, shape in MESHES.items():
            for sequence in (AllGather.Config(), Ring.Config()):
                for order in ("straight", "zigzag"):
                    if order == "straight" and (mesh, kind) != ("sequence 4 x fsdp 2", "causal"):
                        continue
                    with jax.set_mesh(make_mesh(shape)):
                        got = value_and_grad(x, rules, sinks, FirstSupported.Config(), sequence, order)
                    name = f"{mesh}, {kind}, {type(sequence).__qualname__.split('.')[0]}, {order}"
                    found[name] = max(map(_difference, got, expected))
    found.update(splash())
    return found


def splash() -> dict[str, float]:
    """The TPU kernel by the interpreter, on two devices that share rows of 512 tokens."""
    kernel = Splash.Config(block_q=128, block_kv=128, block_kv_compute=128, interpret=True)
    x = reference.inputs(batch=1, length=512, heads=(1, 2), width=32)
    found, rules = {}, ScoreRules(soft_cap=3.0)
    expected = value_and_grad(x, rules, True, FirstSupported.Config())
    for sequence in (AllGather.Config(), Ring.Config()):
        with jax.set_mesh(make_mesh({"sequence": 2}, jax.devices()[:2])):
            got = value_and_grad(x, rules, True, kernel, sequence, "zigzag")
        found[f"splash, {type(sequence).__qualname__.split('.')[0]}"] = max(map(_difference, got, expected))
    return found


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())
