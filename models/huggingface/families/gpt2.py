"""GPT-2, whose matrices are stored [in, out], with queries, keys and values in one."""

from typing import Any

from axlearn_like.layers.decoder import Decoder
from axlearn_like.layers.embedding import PositionedEmbedding
from axlearn_like.layers.feed_forward import FeedForward
from models.gpt2 import layer_norm_decoder
from models.huggingface.architecture import Architecture
from models.huggingface.config_json import ConfigJson
from models.huggingface.families.patterns import segment_sections
from models.huggingface.rows import Row, Section

_LAYER = "transformer.h.{}"
_ROOT: dict[str, Row] = {
    "embedding.weight_vd": Row("transformer.wte.weight", "v,d"),
    "embedding.positions_vd": Row("transformer.wpe.weight", "v,d"),
    "norm.scale": Row("transformer.ln_f.weight", "d"),
    "norm.bias": Row("transformer.ln_f.bias", "d"),
}
_ROWS: dict[str, Row] = {
    "attention_norm.scale": Row(f"{_LAYER}.ln_1.weight", "d"),
    "attention_norm.bias": Row(f"{_LAYER}.ln_1.bias", "d"),
    "attention.q_dkqh": Row(f"{_LAYER}.attn.c_attn.weight", "d,[kqh]"),
    "attention.k_dkh": Row(f"{_LAYER}.attn.c_attn.weight", "d,[kh]", part=1),
    "attention.v_dkh": Row(f"{_LAYER}.attn.c_attn.weight", "d,[kh]", part=2),
    "attention.q_bias_kqh": Row(f"{_LAYER}.attn.c_attn.bias", "[kqh]"),
    "attention.k_bias_kh": Row(f"{_LAYER}.attn.c_attn.bias", "[kh]", part=1),
    "attention.v_bias_kh": Row(f"{_LAYER}.attn.c_attn.bias", "[kh]", part=2),
    "attention.out_kqhd": Row(f"{_LAYER}.attn.c_proj.weight", "kqh,d"),
    "attention.out_bias_d": Row(f"{_LAYER}.attn.c_proj.bias", "d"),
    "feed_forward_norm.scale": Row(f"{_LAYER}.ln_2.weight", "d"),
    "feed_forward_norm.bias": Row(f"{_LAYER}.ln_2.bias", "d"),
    "feed_forward.up_df": Row(f"{_LAYER}.mlp.c_fc.weight", "d,f"),
    "feed_forward.up_bias_f": Row(f"{_LAYER}.mlp.c_fc.bias", "f"),
    "feed_forward.down_fd": Row(f"{_LAYER}.mlp.c_proj.weight", "f,d"),
    "feed_forward.down_bias_d": Row(f"{_LAYER}.mlp.c_proj.bias", "d"),
}


def _read(json: ConfigJson) -> Decoder.Config:
    json.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    json.only("scale_attn_weights", True)
    json.only("scale_attn_by_inverse_layer_idx", False)
    json.only("tie_word_embeddings", True)
    # Of other heads and of dropout; `n_ctx` is `n_positions` again.
    json.ignore("n_ctx", "attn_pdrop", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout")
    json.ignore("summary_proj_to_labels", "summary_type", "summary_use_proj")
    dim = json.integer("n_embd", 768)
    return layer_norm_decoder(
        vocab_size=json.integer("vocab_size", 50_257),
        max_length=json.integer("n_positions", 1024),
        dim=dim,
        num_layers=json.count("n_layer", 12),
        num_heads=json.integer("n_head", 12),
        hidden=json.integer("n_inner", 4 * dim),
        eps=json.number("layer_norm_epsilon", 1e-5, positive=True),
    )


def _write(cfg: Decoder.Config) -> dict[str, Any]:
    block: Any = cfg.block
    if not (
        isinstance(block.feed_forward, FeedForward.Config) and isinstance(cfg.embedding, PositionedEmbedding.Config)
    ):
        raise AttributeError("layers of another kind")
    return {
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.embedding.max_length,
        "n_embd": cfg.dim,
        "n_layer": cfg.num_layers,
        "n_head": block.attention.num_heads,
        "n_inner": block.feed_forward.hidden,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": block.norm.eps,
        "tie_word_embeddings": True,
        # transformers would have token 50,256 end a text, whatever the vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _sections(cfg: Decoder.Config) -> tuple[Section, ...]:
    return segment_sections(cfg, _ROOT, _ROWS)


ARCHITECTURES = (
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        _read,
        _write,
        _sections,
        copies={"lm_head.weight": "transformer.wte.weight"},
        vocabulary=("transformer.wte.weight", "lm_head.weight"),
        base_prefix="transformer.",
        ignored=("*.attn.bias", "*.attn.masked_bias"),  # masks
    ),
)
