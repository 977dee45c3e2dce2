"""Layers described without their values: what `jax.eval_shape` of building them gives."""

import contextlib
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_like.config import label, record_resolved
from axlearn_like.layers.base import Params, build_abstract, first_params, split
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import FeedForward
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.wrappers.lora import LoRA
from mesh import UserError, make_mesh, to_named_sharding
from tests.axlearn_like.layers.small import small_decoder


def mixed() -> Decoder.Config:
    """Wrapped layers, experts, and a first layer that is a stack of its own."""
    cfg = small_decoder(num_layers=3, dtype="bfloat16")
    assert isinstance(cfg.block, Block.Config)
    experts = MoE.Config(num_experts=4, router=SoftmaxRouter.Config(top_k=2), experts=Experts.Config(hidden=8))
    adapted = cfg.block.clone(attention=LoRA.Config(inner=cfg.block.attention, rank=2), feed_forward=experts)
    return cfg.set(block=BlockPattern.Config(blocks=(adapted,), leading=cfg.block, num_leading=1))


def leaves(params: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype, leaf.sharding) for path, leaf in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "shape"),
    [(small_decoder(), None), (mixed(), {"fsdp": 2, "expert": 2, "tensor": 2})],
    ids=["dense", "mixed"],
)
def test_a_layer_is_described_as_it_would_be_built(cfg: Decoder.Config, shape: dict[str, int] | None):
    mesh = None if shape is None else make_mesh(shape, jax.devices()[:1] * 8).abstract_mesh
    with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
        graphdef, params = split(build_abstract(cfg))
        expected, wanted = split(jax.eval_shape(lambda: cfg.build(rngs=nnx.Rngs(0))))
    assert graphdef == expected and hash(graphdef) == hash(expected)  # programs are shared by it
    assert leaves(params) == leaves(wanted)
    assert mesh is None or any(leaf.sharding.spec != () for leaf in jax.tree.leaves(params))


@pytest.mark.slow
def test_layers_that_are_built_afterwards_have_their_values():
    cfg = small_decoder(num_layers=1)
    build_abstract(cfg)
    _, params = split(cfg.build(rngs=nnx.Rngs(0)))
    assert all(leaf.any() for leaf in jax.tree.leaves(params))


@pytest.mark.numerics
@pytest.mark.slow
@pytest.mark.parametrize("cfg", [small_decoder(dim=24), mixed()], ids=["dense", "mixed"])
def test_a_layer_that_is_built_at_once_has_the_values_of_a_program_and_compiles_none(
    cfg: Decoder.Config, caplog: pytest.LogCaptureFixture
):
    """Within one program of all layers XLA may round the last bit otherwise, as it does with AVX-512."""
    with jax.log_compiles():
        built = split(cfg.build(rngs=nnx.Rngs(5)))[1]
    assert "_truncated_normal" not in caplog.text
    program = jax.jit(lambda: split(cfg.build(rngs=nnx.Rngs(5)))[1])()
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-6, strict=True), program, built)


@pytest.mark.slow
@pytest.mark.parametrize("magnitudes", [False, True])
def test_first_parameters_are_those_of_one_program_to_the_bit(magnitudes: bool):
    """A stack of wrapped layers. With magnitudes, norms of what is drawn, a program makes them."""
    inner = FeedForward.Config(dim=6, hidden=4, activation="relu")
    cfg = LoRA.Config(inner=inner, match="up*", rank=2, magnitudes=magnitudes)

    def build(key: jax.Array) -> Params:
        return split(jax.vmap(lambda key: cfg.build(rngs=nnx.Rngs(key)))(jax.random.split(key, 2)))[1]

    mesh = make_mesh()
    with jax.set_mesh(mesh):
        like = to_named_sharding(jax.eval_shape(build, jax.random.key(0)), mesh)
        found, wanted = first_params(build, 3, like), jax.jit(build)(jax.random.key(3))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), found, wanted)
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(lambda leaf: leaf.sharding, like)


def test_an_equal_layer_is_described_without_building_it_again(monkeypatch: pytest.MonkeyPatch):
    built: list[int] = []
    init = Decoder.__init__
    monkeypatch.setattr(Decoder, "__init__", lambda *args, **kwargs: (built.append(1), init(*args, **kwargs))[1])
    cfg = small_decoder(num_layers=1, dim=24)
    first = split(build_abstract(cfg))
    assert split(build_abstract(cfg.clone())) == first and len(built) == 1
    with jax.sharding.use_abstract_mesh(make_mesh({"fsdp": 2}, jax.devices()[:1] * 2).abstract_mesh):
        _, sharded = split(build_abstract(cfg))
    assert leaves(sharded) != leaves(first[1]) and len(built) == 2
    assert split(build_abstract(cfg.set(num_layers=2))) != first and len(built) == 3  # edited since
    with record_resolved() as resolved:
        build_abstract(cfg)
    assert resolved.built and len(built) == 4  # a record of what is built has it


def test_an_error_names_the_path_of_the_layer_that_is_described():
    cfgs = [small_decoder(num_layers=1), small_decoder(num_layers=1)]
    for cfg, path in zip(cfgs, ("model", "teacher"), strict=True):
        label(cfg, path)
        with (
            jax.sharding.use_abstract_mesh(make_mesh({"tensor": 8}, jax.devices()[:1] * 8).abstract_mesh),
            pytest.raises(UserError) as error,
        ):
            build_abstract(cfg)
        assert any(path in note for note in error.value.__notes__) or path in str(error.value)
