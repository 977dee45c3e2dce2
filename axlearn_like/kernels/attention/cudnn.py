"""cuDNN's flash attention for NVIDIA GPUs, through `jax.nn.dot_product_attention`."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase
from axlearn_like.kernels.attention.interface import AttentionSignature, Kernel
from axlearn_like.kernels.attention.xla import position_mask

WIDEST = 128  # head width of all GPUs from Ampere on


class Cudnn(Kernel):
    """Segments are passed as a mask: one array [b, t, s] for all heads, where XLA stores scores for each of them."""

    class Config(ConfigBase["Cudnn"]):
        pass

    def supported(self, signature: AttentionSignature) -> str | None:
        """Return why the kernel cannot compute this, or None if it can."""
        if signature.platform not in ("gpu", "cuda"):
            return f"for NVIDIA GPUs, not for {signature.platform}"
        if signature.dtype not in (jnp.bfloat16, jnp.float16):
            return f"expects bfloat16 or float16, not {signature.dtype}"
        if signature.head_dim != signature.value_dim:
            return f"expects values as wide as keys, not {signature.value_dim} and {signature.head_dim}"
        if signature.head_dim > WIDEST or signature.head_dim % 8:
            return f"expects a head width that is a multiple of 8, at most {WIDEST}, not {signature.head_dim}"
        if signature.rules.soft_cap is not None:
            return "has no soft cap"
        if signature.sinks:
            return "has no sinks"
        if signature.ring:
            return "does not return the logarithmic sums that a ring merges"
        if signature.length % 2:
            return f"expects an even length for a mask, not {signature.length}"
        return None

    def attend(
        self,
        q_btkqh: jax.Array,
        k_bskh: jax.Array,
        v_bskh: jax.Array,
        signature: AttentionSignature,
        *,
        segments: tuple[jax.Array, jax.Array],
        places_t: Any,
        sinks_kq: jax.Array | None,
        tables: Any,
    ) -> jax.Array:
        """Return mixed values [b, t, k, q, h]; see `Kernel.attend`."""
        del sinks_kq, tables
        return dot_product(q_btkqh, k_bskh, v_bskh, signature, segments, places_t, "cudnn")


def dot_product(
    q_btkqh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    signature: AttentionSignature,
    segments: tuple[jax.Array, jax.Array],
    places_t: Any,
    implementation: Literal["cudnn", "xla"],
) -> jax.Array:
    """Return `jax.nn.dot_product_attention` by the rules of a signature."""
    batch, length, heads, per_head, width = q_btkqh.shape
    mask = segments[0][:, :, None] == segments[1][:, None, :]
    visible = position_mask(signature.rules, places_t, jnp.arange(k_bskh.shape[1]))
    mixed = jax.nn.dot_product_attention(
        q_btkqh.reshape(batch, length, heads * per_head, width),
        k_bskh,
        v_bskh,
        mask=(mask if visible is None else mask & visible)[:, None],
        is_causal=signature.rules.causal and signature.cp_size == 1,  # cuDNN then skips what is not visible
        scale=signature.rules.scale_of(width),
        implementation=implementation,
    )
    return mixed.reshape(q_btkqh.shape)
