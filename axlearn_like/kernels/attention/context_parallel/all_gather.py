"""Context parallelism by gathering keys and values: with few key/value heads they are small beside the queries."""

from typing import Any

import jax

from axlearn_like.config import ConfigBase
from axlearn_like.kernels.attention.context_parallel import zigzag
from axlearn_like.kernels.attention.interface import SEQUENCE, AttentionSignature, ContextParallelism, Kernel


class AllGather(ContextParallelism):
    """Each device gathers the keys and values of whole rows and attends to them with its own queries.

    It needs memory for all keys and values of one layer, and receives them before the first product; it works with
    every kernel.
    """

    class Config(ConfigBase["AllGather"]):
        pass

    ring = False


def on_one_device(
    kernel: Kernel,
    signature: AttentionSignature,
    q_btkqh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    segments_bt: jax.Array,
    places_t: jax.Array,
    sinks_kq: jax.Array | None,
    tables: Any,
) -> jax.Array:
    """Return the attention of one device's queries to the keys of whole rows."""

    def gathered(x: jax.Array) -> jax.Array:
        if signature.cp_size == 1:
            return x
        return zigzag.restore(jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True), signature.cp_size, signature.layout)

    return kernel.attend(
        *(q_btkqh, gathered(k_btkh), gathered(v_btkh), signature),
        segments=(segments_bt, gathered(segments_bt)),
        places_t=places_t,
        sinks_kq=sinks_kq,
        tables=tables,
    )
