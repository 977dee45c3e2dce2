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
    """A learner of one optimizer with a constant rate, without clipping."""
    return Learner.Config(optimizer=optimizer, schedule=Constant.Config(lr=lr), **{"clip_norm": None, **fields})


def close(a: Any, b: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def sharded_differences(text: str, mesh: dict[str, int], updates: int = 3, same_from: int = 0) -> dict[str, Any]:
    """Return how a learner on this mesh of eight devices differs from the same learner on one device.

    Args:
        text: the learner's config, as JSON.
        mesh: the sizes of the mesh axes.
        updates: how many updates both do.
        same_from: after as many updates, the mesh goes on from the parameters and the state of the one device: for
            state that is right but not unique, such as eigenvectors of eigenvalues that are equal.

    Returns:
        `apart`, the largest difference of a parameter at the end; `reached`, what the mesh had after `same_from`
        updates, and `given`, what it went on from: the optimizer state of both as {path: nested lists}; `spread`, the
        sharding of every array of state; `collectives`, how many the program of an update has, by kind.
    """
    from axlearn_like.config import from_text

    cfg: Any = from_text(json.loads(text))
    given = train(cfg, same_from)[:2]
    expected, _, _ = train(cfg, updates - same_from, given)
    built: Learner = cfg.build()
    with jax.set_mesh(make_mesh(mesh)):

        def put(tree: Any) -> Any:
            return jax.tree.map(lambda x, s: jax.device_put(x, s), tree, SPECS)

        params = put(arrays(0))
        state = jax.jit(built.init)(params)
        spread = {path: str(tuple(leaf.sharding.spec)) for path, leaf in _named(state) if leaf.ndim > 1}
        update = jax.jit(built.update)
        program = update.lower(params, state, params).compile().as_text() or ""
        for count in range(updates):
            if count == same_from > 0:
                reached = {path: leaf.tolist() for path, leaf in _named(state)}
                params, state = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), given, (params, state))
            params, state, _ = update(put(arrays(1 + count)), state, params)
    apart = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), params, expected)
    kinds = {kind: program.count(f" {kind}(") for kind in ("all-gather", "all-to-all", "all-reduce")}
    found = {"apart": max(jax.tree.leaves(apart)), "spread": spread, "collectives": kinds}
    if same_from:
        found |= {"reached": reached, "given": {path: leaf.tolist() for path, leaf in _named(given[1])}}
    return found


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
