"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"), the teaching model.

LayerNorm, learned positions, biases everywhere, a plain feed-forward network, a tied head.
"""

from functools import partial
from typing import Any

from axlearn_like.layers.attention.grouped_query import BiasedAttention
from axlearn_like.layers.attention.rope import NoPositions
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.embedding import PositionedEmbedding
from axlearn_like.layers.feed_forward import FeedForward
from axlearn_like.layers.norm import LayerNorm
from models.family import Family

_GPT2: dict[str, dict[str, Any]] = {
    "GPT-2-124M": {"dim": 768, "num_layers": 12, "num_heads": 12},
    "GPT-2-355M": {"dim": 1024, "num_layers": 24, "num_heads": 16},
    "GPT-2-774M": {"dim": 1280, "num_layers": 36, "num_heads": 20},
    "GPT-2-1.5B": {"dim": 1600, "num_layers": 48, "num_heads": 25},
}


def layer_norm_decoder(
    *,
    vocab_size: int,
    max_length: int,
    dim: int,
    num_layers: int,
    num_heads: int,
    hidden: int | None = None,
    eps: float = 1e-5,
) -> Decoder.Config:
    """The shape of GPT-2; `max_length` positions, a feed-forward network of four times the width unless said."""
    norm = LayerNorm.Config(eps=eps)
    attention = BiasedAttention.Config(num_heads=num_heads, rope=NoPositions.Config())
    feed_forward = FeedForward.Config(hidden=hidden or 4 * dim, activation="gelu_tanh")
    return Decoder.Config(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        embedding=PositionedEmbedding.Config(max_length=max_length),
        block=Block.Config(norm=norm.clone(), attention=attention, feed_forward=feed_forward),
        norm=norm,
    )


_gpt2 = partial(layer_norm_decoder, vocab_size=50_257, max_length=1024)
gpt2 = Family("GPT-2 model", {name: partial(_gpt2, **shape) for name, shape in _GPT2.items()})
