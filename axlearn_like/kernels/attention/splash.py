"""Splash attention: the block-sparse flash attention for TPUs of jax.experimental.pallas.ops.tpu.splash_attention.

There is no array of scores; blocks in which nothing is visible are neither fetched nor computed, so a window of w
tokens costs w / length of the whole. Keys and values are not repeated for the query heads that share them.
"""

import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.config import ConfigBase
from axlearn_like.kernels.attention.context_parallel import zigzag
from axlearn_like.kernels.attention.interface import AttentionArrays, AttentionSignature, Kernel, KeyBlock
from axlearn_like.kernels.attention.shared_prefix import (
    PrefixRows,
    SharedPrefixes,
    SharedPrefixTrees,
)
from axlearn_like.kernels.attention.splash_internals import backward
from axlearn_like.kernels.attention.splash_tables import (
    LANES,
    Sizes,
    Tables,
    fitting,
    make_tables,
    padded,
    shared_prefix_tables,
    tables_of_array,
)
from mesh.cost.expected import visits

# The fused backward pass keeps a part of dq for every block of keys. In long rows its blocks are twice those of the
# forward pass (four times do not fit a kernel of 16 MiB). With more parts than these, dq has its own pass.
LONG, MOST_PARTS = 16_384, 12
_NO_SEGMENT = -1  # the segment of padding
LONGEST_TREES = 16_384  # tokens of a row of trees, whose mask is stored: the compiler plans 5 bytes a pair of tokens


class Splash(Kernel):
    """The TPU kernel. Block sizes are clipped to the length."""

    class Config(ConfigBase["Splash"]):
        block_q: int = 1024  # queries at a time
        block_kv: int = 1024  # keys fetched at a time
        block_kv_compute: int = 512  # keys multiplied at a time
        fused_backward: bool | None = (
            None  # dq with dk and dv in one pass; None: unless a long row would need too much memory
        )
        interpret: bool = False  # simulate a TPU, which is slow: for tests

        @override
        def check_fields(self) -> None:
            for field in ("block_q", "block_kv", "block_kv_compute"):
                size = getattr(self, field)
                self.require(field, size >= LANES and size % LANES == 0, f"a multiple of {LANES}")
            each = self.block_kv_compute
            self.require("block_kv", self.block_kv % each == 0, f"a multiple of block_kv_compute={each}")

    shared_prefixes = names_residuals = True

    def supported(self, signature: AttentionSignature) -> str | None:
        """Return why the kernel cannot compute this, or None if it can."""
        if signature.platform != "tpu" and not self.cfg.interpret:
            return f"for TPUs, not for {signature.platform}"
        if signature.dtype not in (jnp.bfloat16, jnp.float32):
            return f"expects bfloat16 or float32, not {signature.dtype}"
        parts = LANES * signature.cp_size * (2 if signature.layout == "zigzag" else 1)
        if signature.cp_size > 1 and signature.length % parts:
            return f"rows of {signature.length} tokens over {signature.cp_size} devices are not in blocks of {LANES}"
        if signature.ring and signature.rules.window is not None:
            return "cannot have a window in a ring"
        if signature.ring and not signature.rules.causal:
            return "rings are causal"
        return (
            None
            if signature.shared_prefix is None
            else self._shared_prefix_supported(signature, signature.shared_prefix)
        )

    def _shared_prefix_supported(self, signature: AttentionSignature, shared_prefix: PrefixRows) -> str | None:
        if shared_prefix.completion_size < LANES:
            return f"answers of {shared_prefix.completion_size} tokens do not fill a block of {LANES}"
        if signature.rules.window is not None or not signature.rules.causal:
            return "is causal and has no window in rows of a prompt and its answers"
        if isinstance(shared_prefix, SharedPrefixTrees):
            if signature.cp_size > 1:
                return "needs complete rows of trees"
            if shared_prefix.length <= LONGEST_TREES:
                return None
            return f"stores the masks of trees, in rows of {LONGEST_TREES} tokens at most, not {shared_prefix.length}"
        return shared_prefix.too_large()

    def tables(self, signature: AttentionSignature) -> Tables | None:
        """Return the blocks of keys that each block of queries visits; None: each row's follow from its codes."""
        length = self.padded(signature)
        if isinstance(signature.shared_prefix, SharedPrefixTrees):
            return None
        if signature.shared_prefix is not None:
            return shared_prefix_tables(
                *(signature.shared_prefix, length, signature.cp_size, signature.layout),
                self.sizes((length, length), signature.cp_size),
            )
        places = zigzag.order(length, signature.cp_size, signature.layout)
        mask = ("causal", signature.rules.window) if signature.rules.causal else ("full", None)
        return self.tables_of(mask, (length, length), places, signature.cp_size)

    def _visited(self, signature: AttentionSignature) -> tuple[int, int]:
        """Return the pairs of blocks of one head that a device computes, and those of the pass of dk and dv."""
        tables = self.tables(signature) or self.tables(dataclasses.replace(signature, shared_prefix=None))
        assert tables is not None
        forward, _, dkv = tables.arrays  # upper bound for trees: all causal blocks
        pairs, pairs_dkv = (int(np.count_nonzero(one.block_mask)) for one in (forward, dkv))
        return pairs // signature.cp_size, pairs_dkv // signature.cp_size

    def padded(self, signature: AttentionSignature) -> int:
        """Return the padded length: whole blocks for rows of completions, whose sizes may be anything on one device."""
        if signature.cp_size > 1:
            return signature.length
        block = (
            LANES
            if signature.shared_prefix is None
            else min(self.cfg.block_kv, padded(signature.shared_prefix.completion_size))
        )
        return signature.length + -signature.length % block

    def attend(self, arrays: AttentionArrays, signature: AttentionSignature) -> jax.Array:
        """Return mixed values [b, t, k, q, h]; see `Kernel.attend`."""
        batch, length, heads, _, width = arrays.q_btkqh.shape
        more = self.padded(signature) - signature.length
        q = _scaled(arrays.q_btkqh, signature.rules.scale_of(width))
        q = _filled(q.reshape(batch, length, -1, width).transpose(0, 2, 1, 3), 2, more)
        k, v = (_filled(x.transpose(0, 2, 1, 3), 2, more) for x in (arrays.k_bskh, arrays.v_bskh))
        shape, tables = (q.shape[2], k.shape[2]), arrays.tables
        sinks = None if arrays.sinks_kq is None else arrays.sinks_kq.reshape(-1).astype(jnp.float32)
        ids = tuple(_filled(x, 1, more, _NO_SEGMENT) for x in arrays.segments)
        packed = isinstance(signature.shared_prefix, SharedPrefixes | SharedPrefixTrees)
        codes = (_filled(arrays.places, 1, more, shape[1]),) if packed else ()  # else they are in the tables

        def one(q: Any, k: Any, v: Any, queries: Any, keys: Any, *codes: Any) -> Any:
            if tables is None:
                assert isinstance(signature.shared_prefix, SharedPrefixTrees)
                visible = signature.shared_prefix.visible(codes[0], jnp.arange(shape[0], dtype=jnp.int32))
                own, ids = tables_of_array(visible & (queries[:, None] == keys), self.sizes(shape)), None
            else:
                own, ids = tables.with_codes(*codes) if codes else tables, _segment_ids(queries, keys)
            return self.bound(signature, own, shape, save_residuals=False)(q, k, v, ids, sinks)

        queries, (pairs, pairs_dkv) = q.shape[0] * q.shape[1], self._visited(signature)
        with visits(queries * pairs), visits(queries * pairs_dkv, "splash_mha_dkv"):
            mixed = jax.vmap(one)(q, k, v, *ids, *codes)
        mixed = mixed[:, :, :length].transpose(0, 2, 1, 3)
        return mixed.reshape(batch, length, heads, -1, arrays.v_bskh.shape[-1])

    def blocks(self, signature: AttentionSignature) -> "SplashBlocks":
        """Return the forward and backward pass of one block of keys, for a ring."""
        return SplashBlocks(self, signature)

    def tables_of(self, mask: tuple[str, int | None], shape: tuple[int, int], places: Any, cp_size: int) -> Tables:
        """Return the tables of a mask (kind, window) over queries at these indices."""
        return make_tables(mask, shape, np.asarray(places, np.int32).tobytes(), cp_size, self.sizes(shape, cp_size))

    def sizes(self, shape: tuple[int, int], cp_size: int = 1) -> Sizes:
        """Return block sizes that divide queries and keys of one device."""
        queries, keys = shape[0] // cp_size, shape[1]
        kv, fused = fitting(self.cfg.block_kv, keys), self.cfg.fused_backward
        kv_dkv = kv if keys < LONG else fitting(2 * self.cfg.block_kv, keys)
        fused = keys < LONG or keys // kv_dkv <= MOST_PARTS if fused is None else fused
        kv_dkv = kv_dkv if fused else kv
        compute = self.cfg.block_kv_compute
        return Sizes(
            q=fitting(self.cfg.block_q, queries),
            kv=kv,
            compute=fitting(compute, kv),
            kv_dkv=kv_dkv,
            compute_dkv=fitting(compute, kv_dkv),
            fused=fused,
        )

    def bound(
        self, signature: AttentionSignature, tables: Tables, shape: tuple[int, int], *, save_residuals: bool
    ) -> Any:
        """Return the kernel of JAX with its tables bound."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

        return splash.SplashAttentionKernel(
            *tables.arrays, **self.arguments(signature, tables, shape, save_residuals=save_residuals)
        )

    def arguments(
        self, signature: AttentionSignature, tables: Tables, shape: tuple[int, int], *, save_residuals: bool
    ) -> dict[str, Any]:
        """Return the keyword arguments of JAX's kernel, shared by the forward and the backward pass."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

        sizes = self.sizes(shape)  # shape is that of one device
        return {
            "block_sizes": splash.BlockSizes(
                block_q=sizes.q,
                block_kv=sizes.kv,
                block_kv_compute=sizes.compute,
                block_q_dkv=sizes.q,
                block_kv_dkv=sizes.kv_dkv,
                block_kv_dkv_compute=sizes.compute_dkv,
                use_fused_bwd_kernel=sizes.fused,
                block_q_dq=None if sizes.fused else sizes.q,
                block_kv_dq=None if sizes.fused else sizes.kv,
            ),
            "is_mqa": False,
            "save_residuals": save_residuals,
            "mask_value": splash.DEFAULT_MASK_VALUE,
            "attn_logits_soft_cap": signature.rules.soft_cap,
            "residual_checkpoint_name": None if save_residuals else "context",  # see `Kernel.names_residuals`
            "mask_function": tables.function,
            "interpret": self.cfg.interpret,
        }


class SplashBlocks:
    """One block of keys for some queries, forward and backward, by the same kernels (see `ring.BlockKernel`)."""

    def __init__(self, kernel: Splash, signature: AttentionSignature):
        self._kernel, self._call = kernel, signature

    def forward(self, block: KeyBlock) -> tuple[jax.Array, jax.Array]:
        """Return mixed values and logarithmic sums of one block."""
        q_bkqth, k_bksh, v_bksh, segments, _, case = block
        batch, heads, per_head, length, width = q_bkqth.shape
        shape = (length, k_bksh.shape[2])
        kernel = self._kernel.bound(self._call, self._tables(case, shape), shape, save_residuals=True)
        q = _scaled(q_bkqth, self._call.rules.scale_of(width)).reshape(batch, -1, length, width)
        run = jax.vmap(lambda q, k, v, *ids: kernel(q, k, v, _segment_ids(*ids)))
        out, (lse,) = run(q, k_bksh, v_bksh, *segments)
        out = out.reshape(batch, heads, per_head, length, -1).astype(jnp.float32)
        return out, lse.reshape(batch, heads, per_head, length)

    def backward(
        self, block: KeyBlock, out: jax.Array, lse: jax.Array, d_out: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return gradients of queries, keys and values of one block."""
        q_bkqth, k_bksh, v_bksh, segments, _, case = block
        batch, _, _, length, width = q_bkqth.shape
        shape = (length, k_bksh.shape[2])
        tables = self._tables(case, shape)
        arguments = self._kernel.arguments(self._call, tables, shape, save_residuals=False)
        scale = self._call.rules.scale_of(width)

        def one(q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, *ids: Any) -> Any:
            # JAX's own backward pass, given the softmax over all blocks instead of this block's.
            return backward((q, k, v, _segment_ids(*ids)), (out, lse), d_out, tables.arrays[1:], arguments)

        def flat(x: jax.Array) -> jax.Array:
            return x.reshape(batch, -1, *x.shape[3:])

        kind = q_bkqth.dtype
        q = flat(_scaled(q_bkqth, scale))
        dq, dk, dv = jax.vmap(one)(
            q, k_bksh, v_bksh, flat(out).astype(kind), flat(lse), flat(d_out).astype(kind), *segments
        )
        return dq.reshape(q_bkqth.shape).astype(jnp.float32) * scale, dk.astype(jnp.float32), dv.astype(jnp.float32)

    def _tables(self, case: str, shape: tuple[int, int]) -> Tables:
        mask = ("causal", None) if case == "diagonal" else ("full", None)
        return self._kernel.tables_of(mask, shape, np.arange(shape[0]), 1)


def _filled(x: jax.Array, axis: int, missing: int, value: int = 0) -> jax.Array:
    pads = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, pads, constant_values=value) if missing else x


def _segment_ids(queries: jax.Array, keys: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    return splash.SegmentIds(queries, keys)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    """Return x times the scale, which the kernel does not apply. Rounded once: the scale itself is not a bfloat16."""
    return (x.astype(jnp.float32) * scale).astype(x.dtype)
