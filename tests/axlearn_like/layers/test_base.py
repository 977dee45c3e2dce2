"""Layers described without their values: what `jax.eval_shape` of building them gives."""

import contextlib
from typing import Any

import jax
import pytest
from flax import nnx

from axlearn_like.config import label, record_resolved
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.wrappers.lora import LoRA
from mesh import UserError, make_mesh
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


def test_layers_that_are_built_afterwards_have_their_values():
    cfg = small_decoder(num_layers=1)
    build_abstract(cfg)
    _, params = split(cfg.build(rngs=nnx.Rngs(0)))
    assert all(leaf.any() for leaf in jax.tree.leaves(params))


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
