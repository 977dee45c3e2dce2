"""cuDNN's flash attention for NVIDIA GPUs, through `jax.nn.dot_product_attention`."""

from typing import Literal

import jax
import jax.numpy as jnp

from axlearn_like.kernels.attention.interface import AttentionArrays, AttentionSignature, Kernel
from axlearn_like.kernels.attention.shared_prefix import PrefixRows, SharedPrefix, SharedPrefixes, SharedPrefixTrees
from axlearn_like.kernels.attention.xla import position_mask

Implementation = Literal["cudnn", "xla"]
WIDEST = 128  # head width of all GPUs from Ampere on


class Cudnn(Kernel):
    """Segments are passed as a mask: one array [b, t, s] for all heads, where XLA stores scores for each of them.

    A prompt and its completions of one size are two calls, for the prompt and for the completions, each of which is
    given a copy of the prompt's keys; several prompts with completions of any lengths are one, with a mask.
    """

    shared_prefixes = True
    implementation: Implementation = "cudnn"

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
        return None if signature.shared_prefix is None else _shared_prefix_supported(signature, signature.shared_prefix)

    def attend(self, arrays: AttentionArrays, signature: AttentionSignature) -> jax.Array:
        """Return mixed values [b, t, k, q, h]; see `Kernel.attend`."""
        product = completions if isinstance(signature.shared_prefix, SharedPrefix) else dot_product
        return product(arrays, signature, self.implementation)


def _shared_prefix_supported(signature: AttentionSignature, rows: PrefixRows) -> str | None:
    if signature.rules.window is not None or not signature.rules.causal:
        return "is causal and has no window in rows of prompts and their completions"
    if signature.cp_size > 1 and not isinstance(rows, SharedPrefixes):
        return "needs complete rows of a prompt and its completions"
    return rows.too_large() if isinstance(rows, SharedPrefixes) else None


def dot_product(arrays: AttentionArrays, signature: AttentionSignature, implementation: Implementation) -> jax.Array:
    """Return `jax.nn.dot_product_attention` by the rules of a signature."""
    mask, keys = arrays.same_segment_bts, jnp.arange(arrays.k_bskh.shape[1])
    if isinstance(signature.shared_prefix, SharedPrefixes):
        visible = signature.shared_prefix.visible(arrays.places[..., None], keys)
    elif isinstance(signature.shared_prefix, SharedPrefixTrees):
        visible = signature.shared_prefix.visible(arrays.places, keys)
    else:
        visible = position_mask(signature.rules, arrays.places, keys)
    return _masked(
        *(arrays.q_btkqh, arrays.k_bskh, arrays.v_bskh),
        signature,
        mask if visible is None else mask & visible,
        causal=signature.rules.causal and signature.cp_size == 1,  # cuDNN then skips what is not visible
        implementation=implementation,
    )


def completions(arrays: AttentionArrays, signature: AttentionSignature, implementation: Implementation) -> jax.Array:
    """Return the attention of rows that hold a prompt and its completions, each completion as a row of its own."""
    q_btkqh, k_btkh, v_btkh, segments = arrays.q_btkqh, arrays.k_bskh, arrays.v_bskh, arrays.segments
    rows = signature.shared_prefix
    assert isinstance(rows, SharedPrefix)
    prefix, count, size = rows.prefix, rows.completions, rows.completion_size

    def own(x: jax.Array) -> jax.Array:
        return x[:, prefix:].reshape(-1, size, *x.shape[2:])

    def seen(x: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.repeat(x[:, :prefix], count, axis=0), own(x)], axis=1)

    causal = jnp.arange(prefix + size) <= prefix + jnp.arange(size)[:, None]
    mask = causal & (own(segments[0])[:, :, None] == seen(segments[1])[:, None, :])
    mixed = _masked(
        *(own(q_btkqh), seen(k_btkh), seen(v_btkh), signature, mask), causal=False, implementation=implementation
    ).reshape(len(q_btkqh), count * size, *q_btkqh.shape[2:])
    if not prefix:
        return mixed
    q, k, v = (x[:, :prefix] for x in (q_btkqh, k_btkh, v_btkh))
    alone = segments[0][:, :prefix, None] == segments[1][:, None, :prefix]
    prompt = _masked(q, k, v, signature, alone, causal=True, implementation=implementation)
    return jnp.concatenate([prompt, mixed], axis=1)


def _masked(
    q_btkqh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    signature: AttentionSignature,
    mask_bts: jax.Array,
    *,
    causal: bool,
    implementation: Implementation,
) -> jax.Array:
    batch, length, heads, per_head, width = q_btkqh.shape
    queries, keys = (_even(x) for x in (q_btkqh, k_bskh))
    mask = jnp.pad(mask_bts, [(0, 0), (0, queries.shape[1] - length), (0, keys.shape[1] - k_bskh.shape[1])])
    mixed = jax.nn.dot_product_attention(
        queries.reshape(batch, -1, heads * per_head, width),
        keys,
        _even(v_bskh),
        mask=mask[:, None],
        is_causal=causal,
        scale=signature.rules.scale_of(width),
        implementation=implementation,
    )
    return mixed[:, :length].reshape(q_btkqh.shape)


def _even(x: jax.Array) -> jax.Array:
    """Return x [b, t, ...] with one more token if t is odd: gradients with a mask take even lengths."""
    return jnp.pad(x, [(0, 0), (0, x.shape[1] % 2)] + [(0, 0)] * (x.ndim - 2))
