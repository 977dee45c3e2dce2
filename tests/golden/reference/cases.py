"""The models of tests/golden/reference/parity.py: one for each family, and variants of their configs."""

from typing import Any

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def longrope(original: int) -> dict[str, Any]:
    """A LongRoPE with other factors for sequences of more tokens than these."""
    return {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "short_factor": [1.0 + index / 8 for index in range(8)],
        "long_factor": [1.0 + index**2 / 4 for index in range(8)],
        "original_max_position_embeddings": original,
    }


# Name of the case -> (class of the model, of its config, its fields).
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_hidden_layers": 2, "rope_parameters": LLAMA3}),
    "llama_linear": (
        *("LlamaForCausalLM", "LlamaConfig"),
        {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
    ),
    "llama_dynamic": (
        *("LlamaForCausalLM", "LlamaConfig"),
        {
            "num_hidden_layers": 2,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"num_hidden_layers": 2, "rope_parameters": YARN, "head_dim": 8}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"num_hidden_layers": 2, "rope_parameters": ROPE}),
    "qwen3_moe": (
        *("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
        {"num_hidden_layers": 2, "rope_parameters": ROPE, "num_experts": 6, "norm_topk_prob": True, **MIXTURE},
    ),
    "mistral": (
        *("MistralForCausalLM", "MistralConfig"),
        {"num_hidden_layers": 2, "rope_parameters": ROPE, "sliding_window": 8},
    ),
    "mixtral": (
        *("MixtralForCausalLM", "MixtralConfig"),
        {"num_hidden_layers": 2, "rope_parameters": ROPE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma2": (
        *("Gemma2ForCausalLM", "Gemma2Config"),
        {
            "num_hidden_layers": 4,
            "rope_parameters": ROPE,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        *("Gemma3ForCausalLM", "Gemma3TextConfig"),
        {
            "num_hidden_layers": 5,  # a round and a rest
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gpt_oss": (
        *("GptOssForCausalLM", "GptOssConfig"),
        {
            "num_hidden_layers": 3,
            "rope_parameters": {**YARN, "truncate": False},
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 416}),
    "deepseek_v3": (
        *("DeepseekV3ForCausalLM", "DeepseekV3Config"),
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
            "head_dim": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_nextn_predict_layers": 0,
            **MIXTURE,
        },
    ),
    # Variants: what a family's config.json may say beside the rest.
    "llama_biases": (
        *("LlamaForCausalLM", "LlamaConfig"),
        {
            "num_hidden_layers": 2,
            "rope_parameters": ROPE,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "llama_longrope_short": (
        *("LlamaForCausalLM", "LlamaConfig"),
        {"num_hidden_layers": 2, "max_position_embeddings": 2048, "rope_parameters": longrope(512)},
    ),
    # Every sequence is longer than the original length, also that of the first token that is generated.
    "llama_longrope_long": (
        *("LlamaForCausalLM", "LlamaConfig"),
        {"num_hidden_layers": 2, "max_position_embeddings": 512, "rope_parameters": longrope(4)},
    ),
    "qwen2_windows": (
        *("Qwen2ForCausalLM", "Qwen2Config"),
        {
            "num_hidden_layers": 3,
            "rope_parameters": ROPE,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "qwen3_windows": (
        *("Qwen3ForCausalLM", "Qwen3Config"),
        {
            "num_hidden_layers": 3,
            "rope_parameters": ROPE,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    "qwen3_moe_dense": (
        *("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
        {
            "num_hidden_layers": 3,
            "rope_parameters": ROPE,
            "num_experts": 4,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            **MIXTURE,
        },
    ),
    "gemma2_own_head": (
        *("Gemma2ForCausalLM", "Gemma2Config"),
        {
            "num_hidden_layers": 2,
            "rope_parameters": ROPE,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 5.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3_own_head": (
        *("Gemma3ForCausalLM", "Gemma3TextConfig"),
        {
            "num_hidden_layers": 2,
            "layer_types": [SLIDING, FULL],
            "rope_parameters": {FULL: ROPE, SLIDING: {"rope_type": "default", "rope_theta": 100.0}},
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek_v3_predictors": (
        *("DeepseekV3ForCausalLM", "DeepseekV3Config"),
        {
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": ROPE,
            "rope_interleave": False,
            "head_dim": 8,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_nextn_predict_layers": 2,
            **MIXTURE,
        },
    ),
}
# transformers rotates all tokens of a call by the base of the longest: only rows within the original length are equal
# (and below it, for only then does it forget the base that it had while generating).
SHORT = {"llama_dynamic": ((15,), (12, 3), (9,))}
# Name of the case -> tensors of layers that transformers leaves out of the model, and files have: the predictors'.
UNUSED = {
    "deepseek_v3_predictors": {
        f"model.layers.{layer}.{name}": shape
        for layer in (2, 3)
        for name, shape in {"enorm.weight": (32,), "eh_proj.weight": (32, 64), "mlp.gate.weight": (4, 32)}.items()
    },
}
