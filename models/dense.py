"""The dense decoder that Llama and Qwen share; the families differ only in the arguments."""

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.attention.rope import Llama3Scaling, Rope
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.embedding import Head
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.norm import RMSNorm


def dense(
    *,
    vocab_size: int,
    dim: int,
    hidden: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    theta: float,
    eps: float,
    head_dim: int | None = None,
    tied: bool = False,
    scaling: Llama3Scaling.Config | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    max_length: int | None = None,
) -> Decoder.Config:
    """Pre-norm blocks of grouped-query attention and SwiGLU.

    Args:
        vocab_size: rows of the embedding, with those that no token uses.
        hidden: width of the feed-forward network.
        theta: base of the rotary wavelengths.
        head_dim: width of one head; None: dim / num_heads.
        tied: True if the embedding is the output head too.
        max_length: positions that the model was made for.
    """
    attention = Attention.Config(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim or dim // num_heads,
        qkv_bias=qkv_bias,
        qk_norm=RMSNorm.Config(eps=eps) if qk_norm else None,
        rope=Rope.Config(theta=theta, scaling=scaling, max_length=max_length),
    )
    feed_forward = SwiGLU.Config(hidden=hidden)
    return Decoder.Config(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        block=Block.Config(norm=RMSNorm.Config(eps=eps), attention=attention, feed_forward=feed_forward),
        norm=RMSNorm.Config(eps=eps),
        head=None if tied else Head.Config(),
    )
