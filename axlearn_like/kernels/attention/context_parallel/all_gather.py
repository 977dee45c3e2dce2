"""Context parallelism by gathering keys and values: with few key/value heads they are small beside the queries."""

import dataclasses

import jax

from axlearn_like.config import ConfigBase
from axlearn_like.kernels.attention.context_parallel import zigzag
from axlearn_like.kernels.attention.interface import (
    SEQUENCE,
    AttentionArrays,
    AttentionSignature,
    ContextParallelism,
    Kernel,
)


class AllGather(ContextParallelism):
    """Each device gathers the keys and values of whole rows and attends to them with its own queries.

    It needs memory for all keys and values of one layer, and receives them before the first product; it works with
    every kernel.
    """

    class Config(ConfigBase["AllGather"]):
        pass

    ring = False


def on_one_device(kernel: Kernel, signature: AttentionSignature, arrays: AttentionArrays) -> jax.Array:
    """Return the attention of one device's queries to the keys of whole rows, [b, t, k, q, h]."""

    def gathered(x: jax.Array) -> jax.Array:
        if signature.cp_size == 1:
            return x
        return zigzag.restore(jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True), signature.cp_size, signature.layout)

    keys = {"k_bskh": gathered(arrays.k_bskh), "v_bskh": gathered(arrays.v_bskh)}
    return kernel.attend(dataclasses.replace(arrays, **keys, segments_bs=gathered(arrays.segments_bt)), signature)
