"""cuDNN's flash attention for NVIDIA GPUs, as `jax.nn.dot_product_attention` offers it."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase
from axlearn_like.kernels.attention.interface import Call, Kernel
from axlearn_like.kernels.attention.xla import visible_by_place

WIDEST = 128  # head width of all GPUs from Ampere on


class Cudnn(Kernel):
    """Segments go in as a mask: one array [b, t, s] for all heads, where XLA has scores for each of them."""

    class Config(ConfigBase["Cudnn"]):
        pass

    def supported(self, call: Call) -> str | None:
        if call.platform not in ("gpu", "cuda"):
            return f"for NVIDIA GPUs, not for {call.platform}"
        if call.dtype not in (jnp.bfloat16, jnp.float16):
            return f"expects bfloat16 or float16, not {call.dtype}"
        if call.head_dim != call.value_dim:
            return f"expects values as wide as keys, not {call.value_dim} and {call.head_dim}"
        if call.head_dim > WIDEST or call.head_dim % 8:
            return f"expects a head width of at most {WIDEST}, in eights, not {call.head_dim}"
        if call.rules.soft_cap is not None:
            return "has no soft cap"
        if call.sinks:
            return "has no sinks"
        if call.ring:
            return "does not return what a ring merges"
        if call.length % 2:
            return f"expects an even length for a mask, not {call.length}"
        return None

    def attend(
        self,
        q_btkqh: jax.Array,
        k_bskh: jax.Array,
        v_bskh: jax.Array,
        call: Call,
        *,
        segments: tuple[jax.Array, jax.Array],
        places_t: Any,
        sinks_kq: jax.Array | None,
        tables: Any,
    ) -> jax.Array:
        del sinks_kq, tables
        return dot_product(q_btkqh, k_bskh, v_bskh, call, segments, places_t, "cudnn")


def dot_product(
    q_btkqh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    call: Call,
    segments: tuple[jax.Array, jax.Array],
    places_t: Any,
    implementation: Literal["cudnn", "xla"],
) -> jax.Array:
    """`jax.nn.dot_product_attention` by the rules of a call."""
    batch, length, heads, per_head, width = q_btkqh.shape
    mask = segments[0][:, :, None] == segments[1][:, None, :]
    visible = visible_by_place(call.rules, places_t, jnp.arange(k_bskh.shape[1]))
    mixed = jax.nn.dot_product_attention(
        q_btkqh.reshape(batch, length, heads * per_head, width),
        k_bskh,
        v_bskh,
        mask=(mask if visible is None else mask & visible)[:, None],
        is_causal=call.rules.causal and call.ways == 1,  # then cuDNN leaves out what is not visible
        scale=call.rules.scale_of(width),
        implementation=implementation,
    )
    return mixed.reshape(q_btkqh.shape)
