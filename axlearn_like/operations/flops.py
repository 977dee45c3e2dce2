"""Model FLOPs: what a decoder's mathematics asks for, whatever a program recomputes or wastes.

A multiplication with an addition counts two. Only matrix products count: those with weights, found by the shapes of the
parameters, and the two of attention, per pair of a query and a key that it may see (so causal attention over n tokens
counts n (n + 1) / 2 pairs: the causal factor is one half, exactly). Norms, activations, rotations and the optimizer do
not count. The backward pass counts twice the forward pass. This is the count of PaLM (arXiv 2204.02311, appendix B)
but for the causal half.
"""

import math
from typing import Any

import jax
from flax import nnx

from axlearn_like.config import ConfigBase
from axlearn_like.layers.base import split
from mesh.errors import UserError


def causal_pairs(rows: int, length: int, window: int | None = None) -> float:
    """Pairs of a query and a key in `rows` rows of `length` tokens that are not packed.

    Args:
        rows: of a batch.
        length: of each.
        window: tokens that a query sees, its own included; None: all before it.
    """
    seen = min(window or length, length)
    return rows * (seen * (seen + 1) / 2 + (length - seen) * seen)


def window_of(model: ConfigBase) -> int | None:
    """Of a decoder's attention, if it has one."""
    return _fields(getattr(getattr(model, "block", None), "attention", None)).get("window")


def decoder_flops(
    model: ConfigBase, *, tokens: float, head_tokens: float, pairs: float, backward: bool = False
) -> float:
    """FLOPs of one pass over tokens, on all devices together.

    Args:
        model: config of a decoder.
        tokens: that go through the layers.
        head_tokens: that go through the output head.
        pairs: of a query and a key, in each layer.
        backward: whether gradients are taken too.

    Raises:
        UserError: the model has parameters or attention that this module cannot count.
    """
    layers, head = matrix_sizes(model)
    forward = 2.0 * (tokens * layers + head_tokens * head) + pairs * pair_flops(model)
    return forward * (3 if backward else 1)


def matrix_sizes(model: ConfigBase) -> tuple[float, float]:
    """Numbers in the weights that a token meets, of all layers together and of the head.

    Of the experts of a layer (weights whose first axis is "e", as in `gate_edf`) it meets `top_k`.
    """
    abstract = jax.eval_shape(lambda: split(model.build(rngs=nnx.Rngs(0)))[1])
    top_k = {cfg.top_k for cfg in _feed_forwards(model)}
    layers = head = table = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        words = names[-1].split("_")
        if {"bias", "scale"} & set(words):
            continue
        size = float(math.prod(leaf.shape))
        if names[0] == "embedding":
            table += size
        elif names[0] == "head":
            head += size
        elif names[0] == "layers" and words[-1].startswith("e") and len(words[-1]) > 2:
            if len(top_k) != 1:
                raise UserError(f"flops: {'.'.join(names)} holds experts; expected one `top_k` in the model's config")
            layers += size * min(top_k) / leaf.shape[1]  # [layers, experts, ...]
        elif names[0] == "layers" and leaf.ndim >= 3:  # [layers, in, out]
            layers += size
    return layers, head or table


def pair_flops(model: ConfigBase) -> float:
    """FLOPs of a pair of a query and a key in all layers: their product, and its part in the sum over values.

    Raises:
        UserError: the attention is of a kind that has no sizes of this name.
    """
    attention = _fields(getattr(getattr(model, "block", None), "attention", None))
    layers = _fields(model).get("num_layers")
    heads, width = attention.get("num_heads"), 2 * (attention.get("head_dim") or 0)
    if "value_dim" in attention:  # latent attention: keys and values are of different widths
        width = attention["nope_dim"] + attention["rope_dim"] + attention["value_dim"]
    elif heads and not width:
        width = 2 * (_fields(model).get("dim", 0) // heads)
    if not (heads and width and layers):
        raise UserError("flops: expected model.block.attention with num_heads and head_dim, and model.num_layers")
    return 2.0 * layers * heads * width


def _feed_forwards(model: ConfigBase) -> list[Any]:
    from axlearn_like.config import walk_configs

    return [cfg for _, cfg in walk_configs(model) if "top_k" in vars(cfg)]


def _fields(cfg: Any) -> dict[str, Any]:
    if cfg is None:
        return {}
    return {**_fields(vars(cfg).get("inner")), **vars(cfg)}  # of a wrapped layer, too
