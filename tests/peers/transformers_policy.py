"""The random policy of the small jobs in transformers' terms, for all workers on torch."""

# Imports that only the peer's environment can resolve:
# pyright: reportMissingImports=false
from __future__ import annotations

import torch
from grpo_step.job import GrpoJob
from transformers import Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS = 0, 1, 127


def build_model(job: GrpoJob) -> Qwen3ForCausalLM:
    """Return the random policy, float32."""
    torch.manual_seed(job.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=job.vocab,
            hidden_size=job.dim,
            intermediate_size=job.ffn,
            num_hidden_layers=job.layers,
            num_attention_heads=job.heads,
            num_key_value_heads=job.kv_heads,
            head_dim=job.head_dim,
            rms_norm_eps=job.norm_eps,
            rope_theta=job.rope_theta,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def parameter_count(model: torch.nn.Module) -> int:
    """Return the number of parameters of the model."""
    return sum(parameter.numel() for parameter in model.parameters())
