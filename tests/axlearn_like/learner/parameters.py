"""A small tree of parameters and gradients, named and stacked as our models' are, and eight devices for it."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from axlearn_like.learner import Constant, Learner
from mesh import make_mesh

DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
SHAPES = {
    "embedding": {"weight_vd": (24, 16)},
    "layers": {
        "attention": {"q_dkqh": (4, 16, 2, 2, 4), "out_kqhd": (4, 2, 2, 4, 16)},
        "moe": {"up_edf": (3, 2, 16, 12)},
        "norm": {"scale": (4, 16)},
    },
}
SPECS = {
    "embedding": {"weight_vd": P("tensor", "fsdp")},
    "layers": {
        "attention": {"q_dkqh": P(None, "fsdp", "tensor"), "out_kqhd": P(None, "tensor", None, None, "fsdp")},
        "moe": {"up_edf": P(None, "expert", "fsdp", "tensor")},
        "norm": {"scale": P()},
    },
}


def arrays(seed: int, scale: float = 1.0) -> dict[str, Any]:
    """Normal float32 arrays of SHAPES."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: (scale * rng.normal(size=s)).astype(np.float32), SHAPES, is_leaf=_is_shape)


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def train(cfg: Learner.Config, updates: int = 3, start: Any = None) -> tuple[Any, Any, list[Any]]:
    """Parameters, optimizer state and metrics after some updates with the gradients `arrays(1)`, `arrays(2)` ..."""
    learner: Learner = cfg.build()
    fresh = jax.tree.map(jnp.asarray, arrays(0))
    params, state = start or (fresh, learner.init(fresh))
    update, metrics = jax.jit(learner.update), []
    for _ in range(updates):
        grads = jax.tree.map(jnp.asarray, arrays(1 + int(state["applied"])))
        params, state, found = update(grads, state, params)
        metrics.append(jax.device_get(found))
    return params, state, metrics


def learner(optimizer: Any, lr: float = 0.1, **fields: Any) -> Learner.Config:
    """Of one optimizer with a constant rate, without clipping."""
    return Learner.Config(optimizer=optimizer, schedule=Constant.Config(lr=lr), **{"clip_norm": None, **fields})


def close(a: Any, b: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def sharded_differences(text: str, mesh: dict[str, int]) -> dict[str, Any]:
    """Of a config's learner on this mesh of eight devices from the same on one; and how its program communicates."""
    from axlearn_like.config import from_text

    cfg: Any = from_text(json.loads(text))
    expected, _, _ = train(cfg)
    built: Learner = cfg.build()
    with jax.set_mesh(make_mesh(mesh)):

        def put(tree: Any) -> Any:
            return jax.tree.map(lambda x, s: jax.device_put(x, s), tree, SPECS)

        params = put(arrays(0))
        state = jax.jit(built.init)(params)
        spread = {
            jax.tree_util.keystr(path, simple=True, separator="/"): str(tuple(leaf.sharding.spec))
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
            if leaf.ndim > 1
        }
        update = jax.jit(built.update)
        program = update.lower(params, state, params).compile().as_text() or ""
        for seed in (1, 2, 3):
            params, state, _ = update(put(arrays(seed)), state, params)
    apart = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), params, expected)
    kinds = {kind: program.count(f" {kind}(") for kind in ("all-gather", "all-to-all", "all-reduce")}
    return {"apart": max(jax.tree.leaves(apart)), "spread": spread, "collectives": kinds}
