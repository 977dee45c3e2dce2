"""gpt-oss, as its `config.json` files describe it (model card: arXiv 2508.10925).

Every other block sees 128 tokens; heads have sinks; all projections have biases; experts have a clamped SwiGLU.
"""

from functools import partial
from typing import Any

from axlearn_like.layers.attention.grouped_query import BiasedAttention
from axlearn_like.layers.attention.rope import Rope
from axlearn_like.layers.attention.rope_scaling import YarnScaling
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.embedding import Head
from axlearn_like.layers.moe.experts import BiasedExperts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import BiasedSoftmaxRouter
from axlearn_like.layers.norm import RMSNorm
from models.family import Family

_GPT_OSS: dict[str, dict[str, int]] = {
    "gpt-oss-20b": {"num_layers": 24, "num_experts": 32},
    "gpt-oss-120b": {"num_layers": 36, "num_experts": 128},
}


def _gpt_oss(**size: Any) -> Decoder.Config:
    yarn = YarnScaling.Config(factor=32.0, original_length=4096, truncate=False)
    return sink_mixture(
        vocab_size=201_088,
        dim=2880,
        hidden=2880,
        heads=(64, 8, 64),
        top_k=4,
        rope=Rope.Config(theta=150_000.0, scaling=yarn, max_length=131_072),
        **size,
    )


def sink_mixture(
    *,
    vocab_size: int,
    dim: int,
    hidden: int,
    num_layers: int,
    heads: tuple[int, int, int],
    num_experts: int,
    top_k: int,
    rope: Rope.Config,
    window: int = 128,
    kinds: tuple[bool, ...] = (True, False),
    limit: float = 7.0,
    alpha: float = 1.702,
    load_balance: float = 0.001,
    eps: float = 1e-5,
) -> Decoder.Config:
    """The shape of gpt-oss.

    Args:
        vocab_size: rows of the embedding and of the head.
        hidden: width of one expert.
        heads: query heads, key/value heads, and their width.
        window: tokens that blocks with a window see.
        kinds: True for each block of a round that has a window.
        limit: bound of gate and up before the activation.
        alpha: slope of the activation's sigmoid.
    """
    num_heads, num_kv_heads, head_dim = heads
    router = BiasedSoftmaxRouter.Config(top_k=top_k, load_balance=load_balance)
    experts = BiasedExperts.Config(hidden=hidden, limit=limit, alpha=alpha)
    attention = BiasedAttention.Config(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=rope, sinks=True
    )
    norm = RMSNorm.Config(eps=eps)
    block = Block.Config(
        norm=norm, attention=attention, feed_forward=MoE.Config(num_experts=num_experts, router=router, experts=experts)
    )
    blocks = tuple(block.clone(attention=attention.clone(window=window if local else None)) for local in kinds)
    return Decoder.Config(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        block=blocks[0] if len(blocks) == 1 else BlockPattern.Config(blocks=blocks),
        norm=norm.clone(),
        head=Head.Config(),
    )


gpt_oss = Family("gpt-oss model", {name: partial(_gpt_oss, **size) for name, size in _GPT_OSS.items()})
