"""Qwen 3 MoE and Mixtral: the dense blocks with a mixture of experts in each."""

from functools import partial
from typing import Any

from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson
from models.huggingface.families.dense import parts, read_shape, sections, with_rope, write_shape
from models.huggingface.rows import Row
from models.moe import mixture

_LAYER = "model.layers.{}"

QWEN3: dict[str, Row] = {
    "feed_forward.router.weight_de": Row(f"{_LAYER}.mlp.gate.weight", "e,d"),
    "feed_forward.experts.gate_edf": Row(f"{_LAYER}.mlp.experts.{{}}.gate_proj.weight", "f,d"),
    "feed_forward.experts.up_edf": Row(f"{_LAYER}.mlp.experts.{{}}.up_proj.weight", "f,d"),
    "feed_forward.experts.down_efd": Row(f"{_LAYER}.mlp.experts.{{}}.down_proj.weight", "d,f"),
}
MIXTRAL: dict[str, Row] = {
    "feed_forward.router.weight_de": Row(f"{_LAYER}.block_sparse_moe.gate.weight", "e,d"),
    "feed_forward.experts.gate_edf": Row(f"{_LAYER}.block_sparse_moe.experts.{{}}.w1.weight", "f,d"),
    "feed_forward.experts.up_edf": Row(f"{_LAYER}.block_sparse_moe.experts.{{}}.w3.weight", "f,d"),
    "feed_forward.experts.down_efd": Row(f"{_LAYER}.block_sparse_moe.experts.{{}}.w2.weight", "d,f"),
}


def softmax_mixture(cfg: Decoder.Config) -> tuple[MoE.Config, SoftmaxRouter.Config]:
    """Return the mixture of the blocks, and its router. AttributeError: they have none, or another kind."""
    feed_forward: Any = parts(cfg)[0].feed_forward
    router = feed_forward.router
    if not (isinstance(feed_forward, MoE.Config) and isinstance(router, SoftmaxRouter.Config)):
        raise AttributeError("a mixture of another kind")
    return feed_forward, router


def _read_qwen3(json: ConfigJson) -> Decoder.Config:
    json.only("hidden_act", "silu", "swish")
    json.only("use_sliding_window", False)
    json.only("decoder_sparse_step", 1)
    json.only("mlp_only_layers", [])
    # The width of blocks without experts, of which there are none.
    json.ignore("sliding_window", "max_window_layers", "intermediate_size")
    router = SoftmaxRouter.Config(
        top_k=json.integer("num_experts_per_tok", 8),
        renormalise=json.flag("norm_topk_prob", False),
        load_balance=json.number("router_aux_loss_coef", 0.001),
    )
    experts = Experts.Config(hidden=json.integer("moe_intermediate_size"))
    # transformers 5 saves it under Mixtral's name.
    count = json.count("num_experts" if "num_experts" in json else "num_local_experts")
    feed_forward = MoE.Config(num_experts=count, router=router, experts=experts)
    return with_rope(mixture(feed_forward, **read_shape(json, qk_norm=True)), json)


def _write_qwen3(cfg: Decoder.Config) -> dict[str, Any]:
    feed_forward, router = softmax_mixture(cfg)
    return write_shape(
        cfg,
        num_experts=feed_forward.num_experts,
        num_experts_per_tok=router.top_k,
        norm_topk_prob=router.renormalise,
        moe_intermediate_size=feed_forward.experts.hidden,
        intermediate_size=feed_forward.experts.hidden * router.top_k,
        router_aux_loss_coef=router.load_balance,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    )


def _read_mixtral(json: ConfigJson) -> Decoder.Config:
    json.only("hidden_act", "silu", "swish")
    router = SoftmaxRouter.Config(
        top_k=json.integer("num_experts_per_tok", 2), load_balance=json.number("router_aux_loss_coef", 0.001)
    )
    experts = Experts.Config(hidden=json.integer("intermediate_size"))
    feed_forward = MoE.Config(num_experts=json.count("num_local_experts", 8), router=router, experts=experts)
    cfg = with_rope(mixture(feed_forward, **read_shape(json)), json, theta=1e6)
    parts(cfg)[1].window = json.integer("sliding_window", None)
    return cfg


def _write_mixtral(cfg: Decoder.Config) -> dict[str, Any]:
    feed_forward, router = softmax_mixture(cfg)
    return write_shape(
        cfg,
        num_local_experts=feed_forward.num_experts,
        num_experts_per_tok=router.top_k,
        intermediate_size=feed_forward.experts.hidden,
        router_aux_loss_coef=router.load_balance,
        sliding_window=parts(cfg)[1].window,
    )


ARCHITECTURES = (
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _read_qwen3, _write_qwen3, partial(sections, feed_forward=QWEN3)),
    Architecture(
        "MixtralForCausalLM", "mixtral", _read_mixtral, _write_mixtral, partial(sections, feed_forward=MIXTRAL)
    ),
)
