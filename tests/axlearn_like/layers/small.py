"""A small decoder for layer tests."""

import jax
from flax import nnx

from axlearn_like.layers.attention import Attention
from axlearn_like.layers.base import split
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.norm import RMSNorm


def small_decoder(**changes) -> Decoder.Config:
    attention = Attention.Config(num_heads=4, num_kv_heads=2, qk_norm=RMSNorm.Config())
    block = Block.Config(attention=attention, feed_forward=SwiGLU.Config(hidden=48))
    cfg = Decoder.Config(vocab_size=40, dim=32, num_layers=3, block=block)
    return cfg.set(**changes)


def initialise(cfg: Decoder.Config, seed: int = 0):
    """(graph definition, parameters) with embeddings large enough that logits are not flat."""
    cfg = cfg.clone()
    cfg.embedding.init_std = 0.5
    return split(cfg.build(rngs=nnx.Rngs(jax.random.key(seed))))
