"""Qwen 3 MoE and Mixtral: the dense blocks with a mixture of experts in each."""

from typing import Any

from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson
from models.huggingface.families.dense import ATTENTION, FEED_FORWARD, parts, read_shape, with_attention, write_shape
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


def _experts(json: ConfigJson) -> int:
    # transformers takes both names, and version 5 saves Qwen's under Mixtral's.
    return json.count(json.either("num_experts", "num_local_experts"))


def _read_qwen3(json: ConfigJson) -> Decoder.Config:
    json.only("hidden_act", "silu", "swish")
    json.ignore("max_window_layers")  # all layers have the window, or none
    router = SoftmaxRouter.Config(
        top_k=json.integer("num_experts_per_tok"),
        renormalise=json.flag("norm_topk_prob"),
        load_balance=json.number("router_aux_loss_coef"),
    )
    experts = Experts.Config(hidden=json.integer("moe_intermediate_size"))
    feed_forward = MoE.Config(num_experts=_experts(json), router=router, experts=experts)
    window = json.integer("sliding_window", None) if json.flag("use_sliding_window") else None
    cfg = with_attention(mixture(feed_forward, **read_shape(json, qk_norm=True)), json, (window,))
    dense = _dense_layers(json, cfg.num_layers)
    if dense:
        block = parts(cfg)[0]
        first = block.clone(feed_forward=SwiGLU.Config(hidden=json.integer("intermediate_size")))
        cfg.block = BlockPattern.Config(blocks=(block,), leading=first, num_leading=dense)
    return cfg


def _dense_layers(json: ConfigJson, layers: int) -> int:
    """Return the number of first layers without experts; refuse such layers behind others (ConfigJsonError)."""
    json.ignore("intermediate_size")
    step, named = json.integer("decoder_sparse_step"), json.array("mlp_only_layers", [])
    dense = [index for index in range(layers) if index in named or (index + 1) % step]
    if dense != list(range(len(dense))) or len(dense) == layers:
        field = "mlp_only_layers" if step == 1 else "decoder_sparse_step"
        raise json.error(field, f"layers without experts before all others, of {layers}", f"the layers {dense}")
    return len(dense)


def _write_qwen3(cfg: Decoder.Config) -> dict[str, Any]:
    feed_forward, router = softmax_mixture(cfg)
    window, first = parts(cfg)[1].window, cfg.block.leading if isinstance(cfg.block, BlockPattern.Config) else None
    dense: Any = None if first is None else first.feed_forward  # pyright: ignore[reportAttributeAccessIssue]
    return write_shape(
        cfg,
        num_experts=feed_forward.num_experts,
        num_experts_per_tok=router.top_k,
        norm_topk_prob=router.renormalise,
        moe_intermediate_size=feed_forward.experts.hidden,
        intermediate_size=feed_forward.experts.hidden * router.top_k if dense is None else dense.hidden,
        router_aux_loss_coef=router.load_balance,
        decoder_sparse_step=1,
        mlp_only_layers=list(range(cfg.block.num_leading)) if isinstance(cfg.block, BlockPattern.Config) else [],
        use_sliding_window=window is not None,
        **({} if window is None else {"sliding_window": window}),
    )


def _read_mixtral(json: ConfigJson) -> Decoder.Config:
    json.only("hidden_act", "silu", "swish")
    router = SoftmaxRouter.Config(
        top_k=json.integer("num_experts_per_tok"), load_balance=json.number("router_aux_loss_coef")
    )
    experts = Experts.Config(hidden=json.integer("intermediate_size"))
    feed_forward = MoE.Config(num_experts=_experts(json), router=router, experts=experts)
    return with_attention(mixture(feed_forward, **read_shape(json)), json, (json.integer("sliding_window", None),))


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


_QWEN3 = {**ATTENTION, **QWEN3, **FEED_FORWARD}
ARCHITECTURES = (
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _read_qwen3, _write_qwen3, _QWEN3),
    Architecture("MixtralForCausalLM", "mixtral", _read_mixtral, _write_mixtral, {**ATTENTION, **MIXTRAL}),
)
