"""DeepSeek-V3 and R1, as their `config.json` files describe them (technical report: arXiv 2412.19437).

Latent attention, three dense blocks, then mixtures of experts whose load is balanced by biases. The block that predicts
a second token is not part of the model.
"""

from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.layers.attention.latent import LatentAttention
from axlearn_like.layers.attention.rope import InterleavedRope, Rope
from axlearn_like.layers.attention.rope_scaling import YarnScaling, magnitude
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.embedding import Head
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.norm import RMSNorm
from models.family import Family
from models.moe import deepseek_v3_feed_forward


def _deepseek() -> Decoder.Config:
    yarn = YarnScaling.Config(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
    attention = LatentAttention.Config(
        num_heads=128, q_rank=1536, rope=InterleavedRope.Config(scaling=yarn, max_length=163_840)
    )
    return latent_mixture(
        vocab_size=129_280,
        dim=7168,
        hidden=18_432,
        num_layers=61,
        num_dense=3,
        attention=attention,
        feed_forward=deepseek_v3_feed_forward(),
    )


def latent_mixture(
    *,
    vocab_size: int,
    dim: int,
    hidden: int,
    num_layers: int,
    num_dense: int,
    attention: LatentAttention.Config,
    feed_forward: ConfigBase[Any],
    eps: float = 1e-6,
) -> Decoder.Config:
    """Latent attention; dense blocks, then mixtures.

    Args:
        vocab_size: rows of the embedding and of the head.
        hidden: width of the feed-forward network of dense blocks.
        num_dense: blocks that are dense, the first ones.
        attention: the attention of all blocks; its `scale` is set by its YaRN scaling.
        feed_forward: the feed-forward layer of the other blocks.
    """
    attention.scale = score_scale(attention)
    mixture = Block.Config(norm=RMSNorm.Config(eps=eps), attention=attention, feed_forward=feed_forward)
    dense = mixture.clone(feed_forward=SwiGLU.Config(hidden=hidden))
    block = BlockPattern.Config(blocks=(mixture,), leading=dense, num_leading=num_dense) if num_dense else mixture
    return Decoder.Config(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        block=block,
        norm=RMSNorm.Config(eps=eps),
        head=Head.Config(),
    )


def score_scale(attention: LatentAttention.Config) -> float | None:
    """Return the scale of scores with YaRN's correction, which DeepSeek applies to scores, not to the rotation."""
    scaling = attention.rope.scaling if isinstance(attention.rope, Rope.Config) else None
    if not isinstance(scaling, YarnScaling.Config) or not scaling.mscale_all_dim:
        return None
    width = attention.nope_dim + attention.rope_dim
    return width**-0.5 * magnitude(scaling.factor, scaling.mscale_all_dim) ** 2


deepseek = Family("DeepSeek model", {"DeepSeek-V3": _deepseek, "DeepSeek-R1": _deepseek})
