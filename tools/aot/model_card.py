"""Sizes and costs of a model by arithmetic: parameters, FLOPs and cache of a token, kernels.

Nothing is compiled or allocated.
"""

import dataclasses
from typing import Any

from axlearn_like.kernels.attention.dispatch import explain
from axlearn_like.kernels.paged_attention.rows import check_rules
from axlearn_like.layers.base import Workload, build_abstract
from axlearn_like.layers.contexts.latents import expands_latents
from axlearn_like.layers.decoder import Decoder
from axlearn_like.operations.flops import active_weights, count_parameters, model_flops, rows_workload
from mesh.errors import UserError
from rl.rollout.config import decodes_in_windows

PLATFORMS = ("tpu", "gpu", "cpu")


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """Sizes and costs of a model."""

    parameters: int  # all of them; a tied head counts once
    active: int  # numbers in the matrices that a token is multiplied with, those of the head included
    layers: int  # number of them
    dim: int  # model width
    vocab_size: int  # rows of the embedding
    length: int  # tokens of the rows for which FLOPs are counted
    forward_flops: float  # FLOPs of a token, mean over a row of `length` tokens that each see those before them
    training_flops: float  # FLOPs of a token, three times those
    decode_flops: float  # FLOPs of the token that follows `length` others
    # Bytes of the cache of keys and values of one token, all layers, in the dtype of activations; the kernel for TPUs
    # caches these
    cache_bytes: int
    # Bytes of the latents of what XLA's paged cache holds of a token instead, complete on every device; None: the same
    latent_bytes: int | None
    kernels: dict[str, str]  # platform -> the attention kernel of packed rows of `length` tokens, and why not others
    decode_kernels: dict[str, str]  # platform -> how an engine attends to its paged cache, or why it cannot


def model_card(cfg: Decoder.Config, length: int) -> ModelCard:
    """Describe a decoder for rows of `length` tokens."""
    model: Any = build_abstract(cfg)
    forward = model_flops(cfg, rows_workload(1, length)) / length
    (heads, width), latent = model.cache_shape, model.latent_width
    return ModelCard(
        parameters=count_parameters(cfg),
        active=round(active_weights(cfg)),
        layers=cfg.num_layers,
        dim=cfg.dim,
        vocab_size=cfg.vocab_size,
        length=length,
        forward_flops=forward,
        training_flops=3 * forward,
        decode_flops=model_flops(cfg, Workload(1, 1, lambda window: float(min(window or length, length)))),
        cache_bytes=2 * cfg.num_layers * heads * width * model.dtype.itemsize,
        latent_bytes=None if latent is None else cfg.num_layers * latent * model.dtype.itemsize,
        kernels={platform: _kernel(model, platform, length) for platform in PLATFORMS},
        decode_kernels={platform: _decode_kernel(model, platform) for platform in PLATFORMS},
    )


def _kernel(model: Any, platform: str, length: int) -> str:
    try:
        kinds = [block.attention for block, _ in model.kinds()]
        choices = [str(explain(one, platform=platform, dtype=model.dtype, length=length)) for one in kinds]
        return "; ".join(dict.fromkeys(choices))
    except UserError as error:
        return f"none: {error}"


def _decode_kernel(model: Any, platform: str) -> str:
    if platform != "tpu":
        windows = decodes_in_windows(platform, expands=expands_latents(model))
        return "Xla, from windows of the cache" if windows else "Xla, from its pages"
    try:
        for block, _ in model.kinds():
            check_rules(block.attention.rules, block.attention.sinks_kq is not None)
    except UserError as error:
        return f"none: {error}"
    return "ragged paged attention"
