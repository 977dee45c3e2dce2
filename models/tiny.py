"""Small decoders in the Qwen 3 shape for laptops, demos and tests."""

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.norm import RMSNorm


def tiny(
    *,
    vocab_size: int,
    dim: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int = 384,
) -> Decoder.Config:
    """Pre-norm, grouped-query attention with qk-norm, SwiGLU, tied head; 0.8 M parameters with 272 tokens."""
    attention = Attention.Config(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, qk_norm=RMSNorm.Config()
    )
    return Decoder.Config(
        scan_unroll=num_layers,
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        block=Block.Config(attention=attention, feed_forward=SwiGLU.Config(hidden=hidden)),
    )
