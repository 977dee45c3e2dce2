"""Experts on several devices: the results of one device, whatever the mesh; run in a process that has eight."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import BiasedExperts, Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import BiasedSoftmaxRouter, SoftmaxRouter
from axlearn_like.layers.moe.routing import CHOOSE, PADDING
from mesh import make_mesh, shard_batch, to_named_sharding
from tests.axlearn_like.layers.small import initialise, small_decoder
from tests.bounds import within
from tests.elsewhere import elsewhere

pytestmark = pytest.mark.numerics

# Compiling is all that takes time here.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
MESHES: dict[str, dict[str, int]] = {
    "expert_fsdp": {"expert": 4, "fsdp": 2},
    "data_expert_tensor": {"data": 2, "expert": 2, "tensor": 2},
    "fsdp": {"fsdp": 8},
}
CFG = MoE.Config(
    dim=16,
    num_experts=8,
    router=SoftmaxRouter.Config(top_k=3, load_balance=0.1, z_loss=0.01),
    experts=Experts.Config(hidden=24),
    shared=SwiGLU.Config(hidden=8),
)
# With a mean that is not zero, tokens prefer the same experts.
X = np.random.default_rng(0).normal(1.0, size=(8, 6, 16)).astype(np.float32)


def results(
    shape: dict[str, int] | None, cfg: MoE.Config, live: int | None = None, *, differentiate: bool = True
) -> tuple[Any, Any]:
    """Outputs, loss, metrics and gradients on the host, and the compiled program; padding is behind `live` tokens."""
    mesh = make_mesh(shape) if shape else None
    _, params = initialise(cfg)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        graphdef, abstract = split(build_abstract(cfg))
        if mesh:
            where = to_named_sharding(abstract, mesh)
            params = jax.tree.map(lambda p, a: jax.device_put(p, a.sharding), params, where)

        marks = np.broadcast_to(np.where(np.arange(6) < (live or 6), CHOOSE, PADDING)[:, None], (8, 6, 1))
        routing = None if live is None else shard_batch(np.asarray(marks, np.int32))

        def loss(params: Any, x: jax.Array) -> Any:
            y, aux = bind(graphdef, params)(x, routing)
            return jnp.mean(jnp.sin(3 * y)) + sum(aux.losses.values()), (y, aux)

        x = shard_batch(X)
        function = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True) if differentiate else _without_gradient(loss)
        program = jax.jit(function).lower(params, x).compile()
        (total, (y, aux)), grads = program(params, x)
        found = {"loss": total, "y": y, "losses": aux.losses, "metrics": aux.metrics, "grads": grads}
        return jax.device_get(found), program.as_text()


def _without_gradient(loss: Any) -> Any:
    return lambda *args: (loss(*args), ())


def apart(one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one, other)


def compare(meshes: list[str]) -> dict[str, Any]:
    """Mesh -> largest differences from one device, and collectives."""
    jax.config.update("jax_num_cpu_devices", 8)
    expected, _ = results(None, CFG)
    found = {}
    for name in meshes:
        there, text = results(MESHES[name], CFG)
        sizes = jax.tree.map(lambda a: float(np.abs(a).max()), expected["grads"])
        found[name] = {
            **apart(expected, there),
            "smallest_gradient": min(jax.tree.leaves(sizes)),
            "all_to_all": text.count(" all-to-all("),
        }
    return found


def compare_rounds() -> dict[str, Any]:
    """Differences from one device where places are few, with padding behind tokens and without."""
    jax.config.update("jax_num_cpu_devices", 8)
    narrow = CFG.clone(experts=CFG.experts.clone(capacity_factor=0.5))
    there, _ = results(MESHES["expert_fsdp"], narrow)
    rounds = apart(results(None, CFG)[0], there)
    rounds["number"] = float(there["metrics"]["expert_rounds_max"])
    padded, _ = results(
        MESHES["expert_fsdp"], CFG.clone(experts=narrow.experts, shared=None), live=2, differentiate=False
    )
    alone = results(None, CFG.clone(shared=None), differentiate=False)[0]["y"]
    padding = {
        "y": float(np.abs(padded["y"] - alone)[:, :2].max()),
        "behind": float(np.abs(padded["y"][:, 2:]).max()),
        "rounds": float(padded["metrics"]["expert_rounds_max"]),
    }
    return {"rounds": rounds, "padded": padding}


def compare_biased() -> dict[str, Any]:
    jax.config.update("jax_num_cpu_devices", 8)
    biased = MoE.Config(
        dim=16, num_experts=4, router=BiasedSoftmaxRouter.Config(top_k=2), experts=BiasedExperts.Config(hidden=8)
    )
    return apart(*(results(shape, biased)[0] for shape in (None, MESHES["data_expert_tensor"])))


def ragged_for_tpus() -> int:
    """Ragged exchanges in the gradient of a decoder that computes everything again, as it would be given to TPUs."""
    jax.config.update("jax_num_cpu_devices", 8)
    cfg = small_decoder(num_layers=2, remat="everything")
    assert isinstance(cfg.block, Block.Config)
    cfg.block.feed_forward = CFG.clone(dim=cfg.dim)
    mesh = make_mesh({"expert": 4, "fsdp": 2})
    with jax.set_mesh(mesh):
        graphdef, abstract = split(build_abstract(cfg))
        tokens = shard_batch(np.zeros((8, 4), np.int32))

        def loss(params: Any) -> jax.Array:
            return jnp.sum(bind(graphdef, params)(tokens, PackedContext(tokens, tokens)))

        traced = jax.jit(jax.grad(loss)).trace(to_named_sharding(abstract, mesh))
        return traced.lower(lowering_platforms=("tpu",)).as_text().count("@ragged_all_to_all(")


@pytest.fixture(scope="module")
def rounds() -> dict[str, Any]:
    return elsewhere(compare_rounds, environ=QUICK)


def assert_same(found: dict[str, Any], *, collective: bool) -> None:
    differences = {name: found[name] for name in ("loss", "y", "losses", "metrics", "grads")}
    assert differences["metrics"].pop("expert_rounds_max") <= 1  # a second, where tokens prefer the same experts
    assert within(max(jax.tree.leaves(differences)), 1e-5), differences
    assert found["smallest_gradient"] > 1e-3
    assert (found["all_to_all"] > 0) is collective  # tokens travel only where experts lie apart


def test_outputs_losses_metrics_and_gradients_are_those_of_one_device():
    found = elsewhere(compare, ["expert_fsdp"], environ=QUICK)
    assert_same(found["expert_fsdp"], collective=True)


@pytest.mark.full
def test_they_are_on_other_meshes_too():
    found = elsewhere(compare, list(MESHES), environ=QUICK)
    for mesh, axes in MESHES.items():
        assert_same(found[mesh], collective="expert" in axes)


@pytest.mark.full
def test_experts_with_biases_give_the_results_of_one_device_too():
    found = elsewhere(compare_biased, environ=QUICK)
    differences = {name: found[name] for name in ("loss", "y", "grads")}
    assert within(max(jax.tree.leaves(differences)), 1e-5), differences


@pytest.mark.full
def test_tpus_send_only_the_rows_there_are():
    # In line there and back, once more when computed again, and both in the gradient; the loops of further rounds
    # have as many, and in the gradient the way there again.
    assert elsewhere(ragged_for_tpus) == 6 + 7


def test_padding_is_sent_nowhere_and_takes_no_places(rounds):
    """A third of the tokens: they fit into the half of the mean that a round takes, or need one more."""
    assert rounds["padded"]["rounds"] < rounds["rounds"]["number"] and rounds["padded"]["behind"] == 0
    assert within(rounds["padded"]["y"], 1e-5)


def test_rows_beyond_the_capacity_are_taken_in_further_rounds(rounds):
    """Half of the mean at a time, where tokens prefer the same experts: three rounds or more, the same gradients."""
    differences = {name: rounds["rounds"][name] for name in ("loss", "y", "losses", "grads")}
    assert within(max(jax.tree.leaves(differences)), 1e-5), differences
    assert rounds["rounds"]["number"] >= 3
