"""A zebra step has the gradients of the model on one mesh, by `jax.grad`; and its update, norms included."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SigmoidRouter, SoftmaxRouter
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.training.step import init_state
from axlearn_like.training.trainer import Trainer
from axlearn_like.training.updates.zebra.zebra import Zebra, first_by_group
from mesh import shard_batch
from mesh.rules import use_mesh
from mesh.sharding import split_rows
from tests.axlearn_like.layers.moe.test_moe_mesh import QUICK
from tests.axlearn_like.tiny import tiny_model, tiny_trainer
from tests.bounds import within
from tests.elsewhere import elsewhere

LEARNER = Learner.Config(optimizer=AdamW.Config(weight_decay=0.1), schedule=Constant.Config(lr=1e-2), clip_norm=0.1)


def mixture(*, aux: float = 0.0, router: Any = None, **changes: Any) -> Decoder.Config:
    model = tiny_model()
    assert isinstance(model.block, Block.Config)
    router = router or SoftmaxRouter.Config(top_k=2, load_balance=aux, z_loss=aux)
    feed = MoE.Config(num_experts=4, router=router, experts=Experts.Config(hidden=8))
    model.block.feed_forward = feed.set(**changes)
    return model


def trainer(model: Decoder.Config, **changes: Any) -> Trainer.Config:
    return tiny_trainer(4, model=model, mesh={}, evaluators=(), learner=LEARNER).set(**changes)


def furthest(tree: Any, other: Any) -> float:
    """The largest difference of an array from another, over the largest number there."""

    def apart(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(apart, tree, other)))


def compare(kind: str, mesh: dict[str, int], experts: dict[str, int], count: int, moved: list[int]) -> dict[str, Any]:
    """Differences of gradients, metrics and the state after an update from those of one mesh."""
    jax.config.update("jax_num_cpu_devices", 4)
    model = {
        "plain": mixture(),
        "losses": mixture(aux=0.01),
        "shared": mixture(aux=0.01, shared=SwiGLU.Config(hidden=8)),
        "sigmoid": mixture(router=SigmoidRouter.Config(top_k=2, sequence_balance=0.01)),
    }[kind]
    zebra = Zebra.Config(mesh=experts, microbatches=count, moved=tuple(moved))
    cfg = trainer(model, mesh=mesh, zebra=zebra)
    cfg.check()
    here, learner = cfg.check_sizes(), cfg.learner.build()
    with use_mesh(here):
        program = cfg.program(here, learner)
        program.step.check(program.state, cfg.batch(here))
        state = program.step.parted(program.step.begin(first_by_group(program, 3)(program.state["params"])))
        params = jax.tree.map(jnp.copy, program.step.gathered(state)["params"])
        batch = shard_batch(next(cfg.input.build()))
        loss = cfg.loss.build()

        def total(params: Any) -> jax.Array:
            if kind == "plain":  # the loss of one batch, whatever the microbatches
                return loss(bind(program.graphdef, params), batch)[0]
            parts = jax.tree.map(lambda x: split_rows(x, count), batch)
            every = [jax.tree.map(lambda x, at=at: x[at], parts) for at in range(count)]
            return sum((loss(bind(program.graphdef, params), one)[0] for one in every), jnp.zeros(()))

        wanted = jax.jit(jax.grad(total))(params)
        found, _ = program.step.gradients(state, batch)
        whole = program.step.whole({"step": 0, **_parts(found, state)})["params"]
        told = {"gradients": furthest(whole, wanted)}
        told["router"] = float(jnp.abs(wanted["layers"]["feed_forward"]["router"]["weight_de"]).max())
        one_mesh = trainer(model, mesh=mesh, microbatches=count).program(here, learner)
        after, metrics = one_mesh.step(init_state(params, learner), batch)
        state, others = program.step(state, batch)
        metrics.pop("expert_rounds_max")  # of the axis expert: a second round, where tokens prefer the same experts
        told["metrics"] = furthest({name: others[name] for name in metrics}, metrics)
        told["clipped"] = float(metrics["grad_norm"]) > 0.1
        # Adam divides a gradient by its size: where that is rounding alone, so is the update.
        told["params"] = furthest(program.step.gathered(state)["params"], after["params"])
        told["moments"] = furthest(program.step.gathered(state)["opt_state"]["optax"], after["opt_state"]["optax"])
    return told


def _parts(found: Any, state: Any) -> dict[str, Any]:
    names = ("attention", "experts")
    parts = zip(names, found, strict=True)
    return {name: {"params": part, "opt_state": state[name]["opt_state"]} for name, part in parts}


def check(told: dict[str, Any]) -> None:
    assert within(told["gradients"], 1e-5)  # of the largest of an array: sums of float32 in another order
    assert within(told["metrics"], 1e-5) and told["clipped"]
    assert within(told["moments"], 1e-5) and within(told["params"], 2e-3)
    assert told["router"] > 1e-4  # in "plain" by the weights of experts' outputs alone


@pytest.mark.slow
@pytest.mark.numerics
def test_gradients_and_update_are_those_of_one_mesh():
    check(elsewhere(compare, "losses", {}, {"expert": 1}, 2, [1, 0], environ=QUICK))


@pytest.mark.full
@pytest.mark.numerics
@pytest.mark.parametrize(("count", "moved"), [(1, [1]), (2, [0]), (4, [2, 1])])
def test_microbatches_change_no_gradient(count: int, moved: list[int]):
    check(elsewhere(compare, "plain", {}, {"expert": 1}, count, moved, environ=QUICK))


@pytest.mark.full
@pytest.mark.numerics
@pytest.mark.parametrize(
    ("kind", "mesh", "experts", "moved"),
    [
        ("shared", {}, {"expert": 2}, [2, 0]),
        ("sigmoid", {"data": 2}, {"expert": 2}, [0]),
        ("losses", {"fsdp": 2}, {"expert": 1}, [1]),
        ("shared", {"tensor": 2}, {"data": 2}, [1]),
        ("sigmoid", {"expert": 2}, {"tensor": 2}, [2]),
    ],
)
def test_groups_of_other_sizes_and_axes(kind: str, mesh: dict[str, int], experts: dict[str, int], moved: list[int]):
    check(elsewhere(compare, kind, mesh, experts, 2, moved, environ=QUICK))
