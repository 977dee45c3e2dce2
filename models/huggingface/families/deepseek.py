"""DeepSeek-V3 and R1: latent attention, dense blocks first, then mixtures with biases that balance them."""

from typing import Any

from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.attention.rope import InterleavedRope, Rope
from axlearn_like.layers.block_pattern import BlockPattern, first_block
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SigmoidRouter
from axlearn_like.layers.norm import RMSNorm
from models.deepseek import latent_mixture
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson
from models.huggingface.families.dense import FEED_FORWARD, read_sizes
from models.huggingface.families.mixtures import QWEN3
from models.huggingface.rope import read_rope, write_rope
from models.huggingface.rows import Row

_LAYER = "model.layers.{}"
_PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers")
_ROWS: dict[str, Row] = {
    **FEED_FORWARD,
    **QWEN3,
    "attention_norm.scale": Row(f"{_LAYER}.input_layernorm.weight", "d"),
    "attention.q_dkqh": Row(f"{_LAYER}.self_attn.q_proj.weight", "kqh,d"),
    "attention.q_down_dr": Row(f"{_LAYER}.self_attn.q_a_proj.weight", "r,d"),
    "attention.q_norm.scale": Row(f"{_LAYER}.self_attn.q_a_layernorm.weight", "d"),
    "attention.q_up_rkqh": Row(f"{_LAYER}.self_attn.q_b_proj.weight", "kqh,r"),
    "attention.kv_down_dr": Row(f"{_LAYER}.self_attn.kv_a_proj_with_mqa.weight", "r,d"),
    "attention.kv_norm.scale": Row(f"{_LAYER}.self_attn.kv_a_layernorm.weight", "d"),
    "attention.k_up_rkh": Row(f"{_LAYER}.self_attn.kv_b_proj.weight", "k[h],r"),
    "attention.v_up_rkh": Row(f"{_LAYER}.self_attn.kv_b_proj.weight", "k[h],r", part=1),
    "attention.out_kqhd": Row(f"{_LAYER}.self_attn.o_proj.weight", "d,kqh"),
    "feed_forward_norm.scale": Row(f"{_LAYER}.post_attention_layernorm.weight", "d"),
    "feed_forward.router.balance_bias_e": Row(f"{_LAYER}.mlp.gate.e_score_correction_bias", "e"),
    "feed_forward.shared.gate_df": Row(f"{_LAYER}.mlp.shared_experts.gate_proj.weight", "f,d"),
    "feed_forward.shared.up_df": Row(f"{_LAYER}.mlp.shared_experts.up_proj.weight", "f,d"),
    "feed_forward.shared.down_fd": Row(f"{_LAYER}.mlp.shared_experts.down_proj.weight", "d,f"),
}


def _read(json: ConfigJson) -> Decoder.Config:
    json.only("hidden_act", "silu")
    json.only("attention_bias", False)
    json.only("moe_layer_freq", 1)
    json.only("scoring_func", "sigmoid")
    json.only("topk_method", "noaux_tc")
    # Heads of keys are those of queries, and their width is said by its parts; the second prediction is left out.
    json.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux")
    json.ignore("router_aux_loss_coef", *_PREDICTORS)
    rope = read_rope(json)
    if json.flag("rope_interleave"):
        rope = InterleavedRope.Config(theta=rope.theta, scaling=rope.scaling, max_length=rope.max_length)
    attention = LatentAttention.Config(
        num_heads=json.integer("num_attention_heads"),
        q_rank=json.integer("q_lora_rank", None),
        kv_rank=json.integer("kv_lora_rank"),
        nope_dim=json.integer("qk_nope_head_dim"),
        rope_dim=json.count("qk_rope_head_dim"),
        value_dim=json.integer("v_head_dim"),
        norm=RMSNorm.Config(eps=1e-6),
        rope=rope,
    )
    cfg = latent_mixture(
        **read_sizes(json),
        hidden=json.integer("intermediate_size"),
        num_dense=json.layers("first_k_dense_replace", least=0),
        attention=attention,
        feed_forward=_read_mixture(json),
    )
    return cfg.set(head=None) if json.flag("tie_word_embeddings") else cfg


def _read_mixture(json: ConfigJson) -> MoE.Config:
    width, shared = json.integer("moe_intermediate_size"), json.count("n_shared_experts", least=0)
    router = SigmoidRouter.Config(
        top_k=json.integer("num_experts_per_tok"),
        renormalise=json.flag("norm_topk_prob"),
        scale=json.number("routed_scaling_factor"),
        groups=json.integer("n_group"),
        groups_kept=json.integer("topk_group"),
    )
    return MoE.Config(
        num_experts=json.count(json.either("n_routed_experts", "num_local_experts")),
        router=router,
        experts=Experts.Config(hidden=width),
        shared=SwiGLU.Config(hidden=shared * width) if shared else None,
    )


def _write(cfg: Decoder.Config) -> dict[str, Any]:
    block: Any = first_block(cfg.block)
    attention, mixture = block.attention, block.feed_forward
    if not (
        isinstance(attention, LatentAttention.Config)
        and isinstance(mixture, MoE.Config)
        and isinstance(mixture.router, SigmoidRouter.Config)
        and isinstance(attention.rope, Rope.Config)
    ):
        raise AttributeError("blocks of another kind")
    router, shared = mixture.router, mixture.shared
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.dim,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "rope_interleave": isinstance(attention.rope, InterleavedRope.Config),
        "moe_intermediate_size": mixture.experts.hidden,
        "n_routed_experts": mixture.num_experts,
        "n_shared_experts": shared.hidden // mixture.experts.hidden if isinstance(shared, SwiGLU.Config) else 0,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": router.renormalise,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.groups_kept,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": cfg.head is None,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": block.norm.eps,
        "max_position_embeddings": attention.rope.max_length or 4096,
        **_leading(cfg, mixture),
        **write_rope(attention.rope),
    }


def _leading(cfg: Decoder.Config, mixture: MoE.Config) -> dict[str, Any]:
    """Return the fields of the dense blocks."""
    if not isinstance(cfg.block, BlockPattern.Config):
        return {"first_k_dense_replace": 0, "intermediate_size": 4 * mixture.experts.hidden}
    dense = cfg.block.leading
    if not (isinstance(dense, Block.Config) and isinstance(dense.feed_forward, SwiGLU.Config)):
        raise AttributeError("first blocks of another kind")
    return {"first_k_dense_replace": cfg.block.num_leading, "intermediate_size": dense.feed_forward.hidden}


ARCHITECTURES = (Architecture("DeepseekV3ForCausalLM", "deepseek_v3", _read, _write, _ROWS, predictors=_PREDICTORS),)
