"""One train step on each of several meshes of eight devices; run in a process that has them.

    python -m tests.axlearn_like.sharded RESULTS.npz
"""

import contextlib
import sys
from typing import Any

import jax
import numpy as np
from flax import nnx

from axlearn_like.config_edit import set_path
from axlearn_like.kernels.attention.ring import Ring
from axlearn_like.layers.base import split
from axlearn_like.layers.embedding import Head
from axlearn_like.layers.pipeline import Pipeline
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.losses import SupervisedLoss, make_supervised_loss
from axlearn_like.train_step import init_state, make_train_step
from mesh import make_mesh, shard_batch, to_named_sharding
from tests.axlearn_like.layers.small import small_decoder

# None: no mesh at all, which is what the others are compared with.
MESHES: dict[str, dict[str, int] | None] = {
    "none": None,
    "one": {},
    "fsdp": {"fsdp": 8},
    "fsdp_tensor": {"fsdp": 4, "tensor": 2},
    "data_fsdp_tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "pipeline_fsdp": {"pipeline": 2, "fsdp": 4},
    "sequence_fsdp": {"sequence": 4, "fsdp": 2},
    "ring": {"data": 2, "sequence": 2, "tensor": 2},
    "pipeline_tensor": {"pipeline": 2, "data": 2, "tensor": 2},
}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")


def make_batch() -> dict[str, np.ndarray]:
    """Sixteen packed rows of two documents and some padding."""
    rng = np.random.default_rng(0)
    rows, length, first, second = 16, 16, 9, 6
    segments = np.repeat(np.array([1] * first + [2] * second + [0]), rows).reshape(length, rows).T
    weights = (segments > 0) * rng.random((rows, length))
    return {
        "tokens": rng.integers(0, 40, (rows, length)).astype(np.int32),
        "targets": rng.integers(0, 40, (rows, length)).astype(np.int32),
        "positions": np.tile(np.array([*range(first), *range(second), 0], np.int32), (rows, 1)),
        "segment_ids": segments.astype(np.int32),
        "weights": (weights / weights.sum()).astype(np.float32),
    }


def train_step(shape: dict[str, int] | None, microbatches: int, sequence: Any = None) -> dict[str, Any]:
    """Loss, gradients and new parameters of one step, and how the program communicates."""
    mesh = None if shape is None else make_mesh(shape)
    cfg = small_decoder(num_layers=2, head=Head.Config(), pipeline=Pipeline.Config(microbatches=4))
    cfg.embedding.init_std = 0.5
    if sequence is not None:
        set_path(cfg, "block.attention.sequence", sequence)
    learner = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-3), clip_norm=None).build()
    graphdefs = []

    def init(key: jax.Array) -> Any:
        graphdef, params = split(cfg.build(rngs=nnx.Rngs(key)))
        graphdefs.append(graphdef)
        return init_state(params, learner)

    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        abstract = jax.eval_shape(init, jax.random.key(3))
        where = jax.tree.map(lambda a: a.sharding, to_named_sharding(abstract, mesh)) if mesh else None
        state = jax.jit(init, out_shardings=where)(jax.random.key(3))
        born = jax.device_get(state["params"])
        shards = max(len({s.index for s in leaf.addressable_shards}) for leaf in jax.tree.leaves(state["params"]))
        # The head in chunks on every mesh, whole without one.
        loss = SupervisedLoss.Config(chunks=1 if mesh is None else 2).build()
        step = make_train_step(make_supervised_loss(graphdefs[0], loss), learner, microbatches)
        batch = shard_batch(make_batch())
        program = step.lower(state, batch).compile()  # pyright: ignore[reportFunctionMemberAccess]
        text = program.as_text()
        state, metrics = program(state, batch)
    moment = state["opt_state"]["optax"][0][0].mu
    return {
        "loss": metrics["loss"],
        "born": born,
        # Adam's first moment after one step is (1 - b1) times the gradient.
        "gradient": jax.tree.map(lambda m: np.asarray(m) / (1 - AdamW.Config().b1), moment),
        "shards": shards,
        "collectives": {name: text.count(f" {name}(") + text.count(f" {name}-start(") for name in COLLECTIVES},
    }


def main(path: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    arrays = {}
    for name, shape in MESHES.items():
        # Accumulation once, where all kinds of axes meet.
        sequence = Ring.Config() if name == "ring" else None
        found = train_step(shape, microbatches=2 if name == "data_fsdp_tensor" else 1, sequence=sequence)
        for key, leaf in jax.tree_util.tree_leaves_with_path(found):
            arrays[f"{name}/{jax.tree_util.keystr(key, simple=True, separator='.')}"] = np.asarray(leaf)
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
