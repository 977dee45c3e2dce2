"""Layers whose matrices are held as factors: shapes, values, whitening, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.config import ConfigError
from axlearn_like.kernels.low_rank import feed_forward
from axlearn_like.layers.base import Workload, bind, build_abstract, split
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.contexts.paged import RowContext
from axlearn_like.layers.feed_forward import GLU, BiasedGLU, FeedForward, SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.wrappers.base import projected
from axlearn_like.layers.wrappers.low_rank import factorised as factorised_module
from axlearn_like.layers.wrappers.low_rank.factorised import (
    CalibrationRows,
    FactorisedWeights,
    factorised_config,
    factorised_params,
)
from axlearn_like.layers.wrappers.low_rank.matrices import FactorisedMatrix
from mesh.errors import UserError
from tests.axlearn_like.layers.small import initialise, small_decoder

TOKENS = np.random.default_rng(0).integers(0, 40, (8, 24)).astype(np.int32)
SMALLER = {"q_dkqh": 1, "out_kqhd": 3, "gate_df": 1, "up_df": 1, "down_fd": 1}  # at rank 12, with their input axes
LIVE = np.arange(24) < np.array([24, 3, 20, 24, 11, 24, 24, 1])[:, None]


def factorised(
    cfg: Any, how: FactorisedWeights.Config, params: Any, rows: CalibrationRows | None = None
) -> tuple[Any, Any]:
    """Return the graph definition and the parameters of a decoder with factors."""
    held = build_abstract(factorised_config(cfg, how))
    found = jax.jit(lambda params: factorised_params(build_abstract(cfg), held, params, rows))(params)
    graphdef, described = split(held)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, described)
    return graphdef, found


def hidden(graphdef: Any, params: Any) -> jax.Array:
    context = RowContext(jnp.broadcast_to(jnp.arange(24), TOKENS.shape))
    return jax.jit(lambda params: bind(graphdef, params).hidden(TOKENS, context).x)(params)


def truncated(weight: Any, inputs: int, rank: int) -> np.ndarray:
    """Return stacks of matrices without their smaller singular values, by numpy in float64."""
    layers, sizes = weight.shape[0], (int(np.prod(weight.shape[1 : 1 + inputs])), -1)
    u, values, v = np.linalg.svd(np.asarray(weight, np.float64).reshape(layers, *sizes), full_matrices=False)
    return ((u[..., :rank] * values[:, None, :rank]) @ v[:, :rank]).reshape(weight.shape).astype(np.float32)


@pytest.mark.numerics
@pytest.mark.full
def test_every_layer_computes_with_the_best_matrices_of_the_rank():
    """Kinds of blocks that share a stack, and a leading one of another shape; a matrix that stays whole."""
    block = small_decoder().block
    leading = block.clone(feed_forward=FeedForward.Config(hidden=40))
    wide = [block.clone(feed_forward=GLU.Config(hidden=48, activation=one)) for one in ("gelu_tanh", "relu")]
    cfg = small_decoder(block=BlockPattern.Config(blocks=tuple(wide), leading=leading, num_leading=1), num_layers=5)
    plain, params = initialise(cfg)
    graphdef, found = factorised(cfg, FactorisedWeights.Config(rank=12), params)
    expected = {name: dict(value) for name, value in params.items()}
    for name in ("leading", "layers"):
        for layer in ("attention", "feed_forward"):
            own = params[name][layer]
            matrices = {key: truncated(own[key], inputs, 12) for key, inputs in SMALLER.items() if key in own}
            expected[name][layer] = {**own, **matrices}
            kept = found[name][layer]["inner"]
            assert all(isinstance(kept[key], FactorisedMatrix) for key in matrices)
    assert found["layers"]["attention"]["inner"]["k_dkh"].shape == (4, 32, 2, 8)  # 12 x (32 + 16) numbers are no fewer
    np.testing.assert_allclose(hidden(graphdef, found), hidden(plain, expected), atol=2e-4)


@pytest.mark.full
def test_whitening_has_the_least_error_for_the_inputs_of_the_text():
    cfg = small_decoder(num_layers=2)
    plain, params = initialise(cfg)
    rows = CalibrationRows(TOKENS, LIVE)
    ways = {True: rows, False: None}
    found = {way: factorised(cfg, FactorisedWeights.Config(rank=6), params, text) for way, text in ways.items()}
    exact = hidden(plain, params)
    errors = {way: np.linalg.norm(np.where(LIVE[..., None], hidden(*one) - exact, 0)) for way, one in found.items()}
    assert errors[True] < 0.9 * errors[False]
    # The inputs of the first queries are known without the rest: those of tokens that are no padding, once each.
    model = bind(plain, params)
    embedded = model.embedding(TOKENS, jnp.float32)
    x = np.asarray(model.blocks()[0].attention_norm(embedded), np.float64)[LIVE]
    weight = np.asarray(params["layers"]["attention"]["q_dkqh"][0], np.float64).reshape(32, -1)
    held = found[True][1]["layers"]["attention"]["inner"]["q_dkqh"]
    product = np.asarray(held.a[0], np.float64) @ np.asarray(held.b[0], np.float64).reshape(6, -1)
    least = np.linalg.norm(np.linalg.svd(x @ weight, compute_uv=False)[6:])
    assert least <= np.linalg.norm(x @ (weight - product)) <= 1.01 * least


def test_flops_and_numbers_are_those_of_the_factors():
    plain = SwiGLU.Config(dim=64, hidden=256)
    layer = build_abstract(FactorisedWeights.Config(inner=plain, share=0.25))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(split(layer)[1]))
    assert 0.2 * 3 * 64 * 256 < numbers <= 0.25 * 3 * 64 * 256
    assert layer.flops(Workload(10, 10, lambda _: 0.0)) == 2 * 10 * numbers
    assert dict(projected(layer.inner)).keys() == {"gate_df", "up_df", "down_fd"}


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize(("kind", "by_kernel"), [(GLU, 1), (SwiGLU, 1), (BiasedGLU, 0)])
def test_the_kernel_computes_whole_layers_or_leaves_them_to_xla(kind: Any, by_kernel: int, monkeypatch: Any):
    called: list[Any] = []

    original = feed_forward.by_kernel

    def simulated(*arrays: Any) -> jax.Array:
        called.append(arrays)
        return original(*arrays, interpret=True)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 40, 16)), jnp.float32)
    how = FactorisedWeights.Config(inner=kind.Config(dim=16, hidden=128), rank=4)
    graphdef, params = initialise(how)
    expected = bind(graphdef, params)(x)[0]
    monkeypatch.setattr(factorised_module, "platform", lambda: "tpu")
    monkeypatch.setattr(feed_forward, "by_kernel", simulated)
    found = bind(graphdef, params)(x)[0]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert len(called) == by_kernel


def test_what_cannot_be_factorised_is_refused_by_name():
    plain = SwiGLU.Config(dim=8, hidden=12)
    with pytest.raises(ConfigError, match=r"rank: expected one with which factors are smaller .* 12 x 8, got 8"):
        FactorisedWeights.Config(inner=plain, rank=8).build(rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"share: expected a share, above 0 and below 1, got 1"):
        FactorisedWeights.Config(inner=plain, share=1.0).check()
    mixture = MoE.Config(dim=8, num_experts=2, router=SoftmaxRouter.Config(top_k=1), experts=Experts.Config(hidden=4))
    with pytest.raises(UserError, match=r"experts/.* of MoE is not multiplied as two factors.*other `layers`"):
        build_abstract(FactorisedWeights.Config(inner=mixture, rank=1))
