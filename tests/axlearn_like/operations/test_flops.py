"""Model FLOPs against the matrix products of a traced forward pass without any loop, and against published sizes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from axlearn_like.config import ConfigBase, Configurable, replace, set_path
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.aux import Aux
from axlearn_like.layers.base import Workload, bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.operations.flops import active_weights, causal_pairs, model_flops, rows_workload
from axlearn_like.operations.utilisation import step_flops
from experiments import registry
from mesh import UserError
from mesh.cost.arithmetic import products
from models.dense import dense
from models.llama import llama
from models.qwen import qwen
from tools.aot.run import tuning_of


def small(*, tied: bool):
    return dense(
        vocab_size=128, dim=64, hidden=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
        theta=1e4, eps=1e-5, tied=tied, qkv_bias=True, qk_norm=True,
    )  # fmt: skip


def traced_forward(cfg: Any, rows: int, length: int) -> float:
    """FLOPs of the matrix products that a traced forward pass has."""
    graphdef, params = split(build_abstract(cfg))

    def forward(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        return bind(graphdef, params)(tokens, PackedContext(positions, jnp.ones_like(tokens)))

    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return products(jax.make_jaxpr(forward)(params, tokens)).total


def every_pair(rows: int, length: int) -> Workload:
    """The plain attention computes the other half of the pairs too, and throws it away."""
    return rows_workload(rows, length)._replace(pairs=lambda window: rows * length * length)


def with_experts(cfg: Any) -> Any:
    experts = Experts.Config(hidden=48)
    cfg.block.feed_forward = MoE.Config(
        num_experts=8, router=SoftmaxRouter.Config(top_k=2), experts=experts, shared=SwiGLU.Config(hidden=40)
    )
    return cfg


def with_latents(cfg: Any) -> Any:
    cfg.block.attention = LatentAttention.Config(num_heads=4, nope_dim=16, rope_dim=8, value_dim=12)
    return cfg


@pytest.mark.parametrize(
    "cfg",
    [small(tied=True), small(tied=False), with_experts(small(tied=False)), with_latents(small(tied=True))],
    ids=["tied", "untied", "experts", "latents"],
)
def test_a_forward_pass_has_the_products_that_are_counted(cfg):
    rows, length = 2, 64
    traced = traced_forward(cfg, rows, length)
    assert traced == model_flops(cfg, every_pair(rows, length))
    assert model_flops(cfg, every_pair(rows, length), backward=True) == 3 * traced
    each = 3 * 4 * 2 * ((16 + 8 + 12) if isinstance(cfg.block.attention, LatentAttention.Config) else 2 * 32)
    assert traced - model_flops(cfg, rows_workload(rows, length)) == rows * length * (length - 1) / 2 * each


class Gated(SwiGLU):
    """A layer that this file alone knows: its forward pass has a product that no weight takes part in."""

    class Config(SwiGLU.Config):
        pass

    def __call__(self, x_btd: jax.Array, routing: Any = None) -> tuple[jax.Array, Aux]:
        y, aux = super().__call__(x_btd, routing)
        return y * jnp.einsum("btd,btd->bt", x_btd, y)[..., None], aux

    def flops(self, work: Workload) -> float:
        return super().flops(work) + 2.0 * work.tokens * self.gate_df.shape[0]


def test_a_new_layer_says_its_own():
    cfg = small(tied=True)
    cfg.block.feed_forward = Gated.Config(hidden=96)
    assert model_flops(cfg, every_pair(2, 64)) == traced_forward(cfg, 2, 64)
    assert model_flops(cfg, every_pair(2, 64)) - model_flops(small(tied=True), every_pair(2, 64)) == 3 * 2 * 128 * 64


@pytest.mark.numerics
def test_sizes_are_those_that_the_models_are_known_by():
    """Parameters in layers and head: config.json of each model, embeddings and vectors left out."""
    layers = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert active_weights(llama("Llama-3.1-8B")) == layers + 128_256 * 4096
    assert active_weights(qwen("QwQ-32B")) == pytest.approx(32.8e9 - 152_064 * 5120, rel=0.01)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("demo", 1840914432),
        ("demo_moe_sft", 1853300736),
        ("grpo_bench", 6741245952),
        ("llama2_70b", 277307876966400),
        ("llama2_7b", 26690998763520),
        ("llama31_8b", 30310045581312),
        ("qwen25_32b", 129088408780800),
        ("qwen3_30b_a3b", 12340854521856),
        ("qwq_32b_rl", 129088408780800),
    ],
)
def test_registered_experiments_keep_their_figures(name, flops):
    """7 rows of 96 tokens, forward and backward, as they were counted by the names of parameters."""
    assert model_flops(tuning_of(registry.get(name)).model, rows_workload(7, 96), backward=True) == flops


@pytest.mark.parametrize(("wrapped", "flops"), [(MoE.Config, 645488640), (Attention.Config, 615211008)])
def test_low_rank_factors_count_as_often_as_their_matrices(wrapped, flops):
    cfg = tuning_of(registry.get("demo_moe_sft")).model.clone()
    replace(cfg, wrapped, lambda inner: LoRA.Config(inner=inner))
    assert model_flops(cfg, rows_workload(7, 96)._replace(outputs=96)) == flops


class Table(Configurable):
    """A model of another library, say."""

    class Config(ConfigBase["Table"]):
        pass

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        pass


def test_a_model_that_is_no_layer_is_refused():
    with pytest.raises(UserError, match="FLOPs: expected the config of a Layer, got one of Table"):
        model_flops(Table.Config(), rows_workload(1, 1))
    assert step_flops(Table.Config(), 1, 1) is None


def test_pairs_are_the_causal_half_and_what_the_window_leaves():
    assert causal_pairs(1, 4) == 1 + 2 + 3 + 4
    assert causal_pairs(3, 100) == 3 * 5050
    assert causal_pairs(1, 5, window=2) == 1 + 2 + 2 + 2 + 2
    assert causal_pairs(1, 5, window=9) == causal_pairs(1, 5)
    cfg = small(tied=True)
    set_path(cfg, "block.attention.window", 2)
    less = model_flops(small(tied=True), rows_workload(1, 5)) - model_flops(cfg, rows_workload(1, 5))
    assert less == (15 - 9) * 3 * 4 * 2 * 2 * 32
