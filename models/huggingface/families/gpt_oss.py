"""gpt-oss, whose experts lie in one tensor for each matrix, with gate and up alternating."""

from typing import Any

from axlearn_like.config import config_items
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.block_pattern import BlockPattern, first_block
from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.moe.experts import BiasedExperts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import BiasedSoftmaxRouter
from models.gpt_oss import sink_mixture
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson
from models.huggingface.families.dense import ATTENTION, read_sizes, write_sizes
from models.huggingface.families.patterns import read_kinds, write_kinds
from models.huggingface.rope import read_rope, write_rope
from models.huggingface.rows import Row

_LAYER = "model.layers.{}"
_ROWS: dict[str, Row] = {
    **ATTENTION,
    "attention.sinks_kq": Row(f"{_LAYER}.self_attn.sinks", "kq"),
    "feed_forward.router.weight_de": Row(f"{_LAYER}.mlp.router.weight", "e,d"),
    "feed_forward.router.bias_e": Row(f"{_LAYER}.mlp.router.bias", "e"),
    "feed_forward.experts.gate_edf": Row(f"{_LAYER}.mlp.experts.gate_up_proj", "e,d,f[]"),
    "feed_forward.experts.up_edf": Row(f"{_LAYER}.mlp.experts.gate_up_proj", "e,d,f[]", part=1),
    "feed_forward.experts.gate_bias_ef": Row(f"{_LAYER}.mlp.experts.gate_up_proj_bias", "e,f[]"),
    "feed_forward.experts.up_bias_ef": Row(f"{_LAYER}.mlp.experts.gate_up_proj_bias", "e,f[]", part=1),
    "feed_forward.experts.down_efd": Row(f"{_LAYER}.mlp.experts.down_proj", "e,f,d"),
    "feed_forward.experts.down_bias_ed": Row(f"{_LAYER}.mlp.experts.down_proj_bias", "e,d"),
}


def _read(json: ConfigJson) -> Decoder.Config:
    # The first says what the experts always are, the others what other fields say.
    json.ignore("hidden_act", "experts_per_token", "initial_context_length")
    heads = json.integer("num_attention_heads")
    cfg = sink_mixture(
        **read_sizes(json),
        hidden=json.integer("intermediate_size"),
        heads=(heads, json.integer("num_key_value_heads"), json.count("head_dim")),
        num_experts=json.count(json.either("num_local_experts", "num_experts")),
        top_k=json.integer("num_experts_per_tok"),
        rope=read_rope(json),
        window=json.integer("sliding_window"),
        kinds=read_kinds(json, (True, False)),
        limit=json.number("swiglu_limit", positive=True),
        alpha=json.number("swiglu_alpha"),
        load_balance=json.number("router_aux_loss_coef"),
    )
    if not json.flag("attention_bias"):
        blocks: Any = cfg.block.blocks if isinstance(cfg.block, BlockPattern.Config) else (cfg.block,)
        for block in blocks:
            block.set(attention=Attention.Config(**{**dict(config_items(block.attention)), "qkv_bias": False}))
    return cfg.set(head=None) if json.flag("tie_word_embeddings") else cfg


def _write(cfg: Decoder.Config) -> dict[str, Any]:
    block: Any = first_block(cfg.block)
    attention, mixture = block.attention, block.feed_forward
    if not (
        isinstance(mixture, MoE.Config)
        and isinstance(mixture.experts, BiasedExperts.Config)
        and isinstance(mixture.router, BiasedSoftmaxRouter.Config)
    ):
        raise AttributeError("a mixture of another kind")
    return {
        **write_sizes(cfg, 131_072),
        "intermediate_size": mixture.experts.hidden,
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.router.top_k,
        "experts_per_token": mixture.router.top_k,
        "router_aux_loss_coef": mixture.router.load_balance,
        "swiglu_limit": mixture.experts.limit,
        "swiglu_alpha": mixture.experts.alpha,
        "hidden_act": "silu",
        **write_kinds(cfg),
        **write_rope(attention.rope),
    }


# 4-bit numbers lie along the inputs of a matrix, so that these are its last axis.
_PACKED = {"e,d,f[]": "e,f[],d", "e,f,d": "e,d,f"}

ARCHITECTURES = (Architecture("GptOssForCausalLM", "gpt_oss", _read, _write, _ROWS, packed=_PACKED),)
