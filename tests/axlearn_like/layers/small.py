"""A small decoder for layer tests, and random parameters for any layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.norm import RMSNorm
from axlearn_like.layers.parameter_names import path_name


def small_decoder(**changes) -> Decoder.Config:
    attention = Attention.Config(num_heads=4, num_kv_heads=2, qk_norm=RMSNorm.Config())
    block = Block.Config(attention=attention, feed_forward=SwiGLU.Config(hidden=48))
    cfg = Decoder.Config(vocab_size=40, dim=32, num_layers=3, block=block)
    return cfg.set(**changes)


def initialise(cfg: Any, seed: int = 0):
    """(graph definition, parameters) with every parameter random, biases and scales too.

    Not as the layers begin: embeddings are so large that logits are not flat. Drawn by numpy, which compiles nothing.
    """
    graphdef, abstract = split(build_abstract(cfg))
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path_name(path).rpartition("/")[2]  # of a matrix in two factors, that of the factor
        noise = rng.normal(size=leaf.shape)
        values = 1 + 0.2 * noise if name == "scale" else noise * (0.5 if name == "weight_vd" else 0.18)
        return jnp.asarray(values, leaf.dtype)

    return graphdef, jax.tree_util.tree_map_with_path(draw, abstract)
