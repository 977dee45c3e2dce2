"""One train step on each of several meshes of eight devices; run in a process that has them.

python -m tests.axlearn_like.training.step_mesh RESULTS.npz MESHES
"""

import contextlib
import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from axlearn_like.config import set_path
from axlearn_like.kernels.attention.context_parallel.ring import Ring
from axlearn_like.layers.base import split
from axlearn_like.layers.embedding import Head
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.pipeline import Pipeline
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.training.losses import SupervisedLoss, make_supervised_loss
from axlearn_like.training.step import init_state, make_train_step
from mesh import make_mesh, shard_batch, to_named_sharding
from mesh.rules import MeshAxes, use_mesh
from tests.axlearn_like.layers.small import small_decoder


class Case(NamedTuple):
    """A mesh, and what else is particular.

    Attributes:
        mesh: None: no mesh at all, which is what the others are compared with.
        slices: slices of the mesh.
        experts: whether the feed-forward layers are mixtures.
        ring: whether keys and values go round over the axis `sequence`, instead of being gathered.
        microbatches: number of microbatches whose gradients are accumulated.
        rules: axis rules where not the default ones.
    """

    mesh: dict[str, int] | None
    slices: dict[str, int] | None = None
    experts: bool = False
    ring: bool = False
    microbatches: int = 1
    rules: Mapping[str, MeshAxes] | None = None


# Meshes of every run: all kinds of axes meet, with accumulation once.
MESHES = {
    "none": Case(None),
    "data_fsdp_tensor": Case({"data": 2, "fsdp": 2, "tensor": 2}, slices={"data": 2}, microbatches=2),
    "ring": Case({"data": 2, "sequence": 2, "tensor": 2}, ring=True),
}
# With these every axis is alone once, and every pair of the six is together on one mesh.
MORE = {
    "none": Case(None),
    "one": Case({}),
    "fsdp": Case({"fsdp": 8}),
    "fsdp_tensor": Case({"fsdp": 4, "tensor": 2}),
    "rules": Case({"data": 2, "fsdp": 2, "tensor": 2}, rules={"embed": ("data", "fsdp"), "residual": None}),
    "sequence_fsdp": Case({"sequence": 4, "fsdp": 2}),
    "pipeline_fsdp": Case({"pipeline": 2, "fsdp": 4}),
    "pipeline_tensor": Case({"pipeline": 2, "data": 2, "tensor": 2}),
    "data": Case({"data": 8}),
    "pipeline": Case({"pipeline": 2}),
    "sequence": Case({"sequence": 8}),
    "tensor": Case({"tensor": 2}),
    "fsdp_over_slices": Case({"data": 2, "fsdp": 4}, slices={"fsdp": 2}),
    "pipeline_sequence": Case({"pipeline": 2, "sequence": 4}),
    "pipeline_ring": Case({"pipeline": 2, "sequence": 2, "fsdp": 2}, ring=True),
}
EXPERTS = {
    "none": Case(None, experts=True),
    "expert": Case({"expert": 8}, experts=True),
    "pipeline_expert_fsdp": Case({"pipeline": 2, "expert": 2, "fsdp": 2}, experts=True),
    "expert_sequence": Case({"expert": 4, "sequence": 2}, experts=True),
    "expert_ring": Case({"expert": 2, "sequence": 2, "tensor": 2}, experts=True, ring=True),
    "data_expert": Case({"data": 2, "expert": 4}, experts=True),
    "expert_rules": Case({"data": 2, "fsdp": 2, "expert": 2}, experts=True, rules={"embed": ("data", "fsdp")}),
    "pipeline_expert_tensor": Case({"pipeline": 2, "expert": 2, "tensor": 2}, experts=True),
}
SETS = {"meshes": MESHES, "more": MORE, "experts": EXPERTS}
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


def train_step(case: Case) -> dict[str, Any]:
    """Loss, gradients and new parameters of one step, and how the program communicates."""
    devices = jax.devices()[: math.prod((case.mesh or {}).values())]
    mesh = None if case.mesh is None else make_mesh(case.mesh, devices, slices=case.slices)
    cfg = small_decoder(num_layers=2, head=Head.Config(), pipeline=Pipeline.Config(microbatches=4))
    cfg.embedding.init_std = 0.5
    if case.ring:
        set_path(cfg, "block.attention.context_parallel", Ring.Config())
    if case.experts:  # with a loss that is a mean over the rows: load balance is of each microbatch of a pipeline
        router = SoftmaxRouter.Config(top_k=2, load_balance=0.0, z_loss=0.01)
        mixture = MoE.Config(num_experts=8, router=router, experts=Experts.Config(hidden=24))
        set_path(cfg, "block.feed_forward", mixture)
    learner = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-3), clip_norm=None).build()
    graphdefs = []

    def init(key: jax.Array) -> Any:
        graphdef, params = split(cfg.build(rngs=nnx.Rngs(key)))
        graphdefs.append(graphdef)
        return init_state(params, learner)

    with use_mesh(mesh, case.rules) if mesh else contextlib.nullcontext():
        abstract = jax.eval_shape(init, jax.random.key(3))
        where = jax.tree.map(lambda a: a.sharding, to_named_sharding(abstract, mesh)) if mesh else None
        state = jax.jit(init, out_shardings=where)(jax.random.key(3))
        born = jax.device_get(state["params"])
        shards = max(len({s.index for s in leaf.addressable_shards}) for leaf in jax.tree.leaves(state["params"]))
        # The head in chunks on every mesh, whole without one.
        loss = SupervisedLoss.Config(chunks=1 if mesh is None else 2).build()
        step = make_train_step(make_supervised_loss(graphdefs[0], loss), learner, case.microbatches)
        batch = shard_batch(make_batch())
        program = step.lower(state, batch).compile()  # pyright: ignore[reportFunctionMemberAccess]
        text = program.as_text()
        state, metrics = program(state, batch)
    moment = state["opt_state"]["optax"][0][0].mu
    return {
        "loss": metrics["loss"],
        "born": born,
        "new": jax.device_get(state["params"]),
        # Adam's first moment after one step is (1 - b1) times the gradient.
        "gradient": jax.tree.map(lambda m: np.asarray(m) / (1 - AdamW.Config().b1), moment),
        "shards": shards,
        "collectives": {name: text.count(f" {name}(") + text.count(f" {name}-start(") for name in COLLECTIVES},
    }


def main(path: str, which: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    arrays = {}
    for name, case in SETS[which].items():
        found = train_step(case)
        for key, leaf in jax.tree_util.tree_leaves_with_path(found):
            arrays[f"{name}/{jax.tree_util.keystr(key, simple=True, separator='.')}"] = np.asarray(leaf)
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
