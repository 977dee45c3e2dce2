"""Attention by XLA that leaves out the keys which no query of a block can see: for CPUs, where scores are stored."""

from typing import override

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase
from axlearn_like.kernels.attention.interface import AttentionArrays, AttentionSignature, ScoreRules
from axlearn_like.kernels.attention.xla import Xla, mix, position_mask


class BlockedXla(Xla):
    """`Xla` on one block of a row's queries after another, each with the keys from its first visible to its last.

    Of causal rows (blocks + 1) / (2 blocks) of the scores are computed, of windows fewer. Sums are made in another
    order, so results differ from `Xla`'s by rounding. Rows whose length devices share are left whole.
    """

    class Config(ConfigBase["BlockedXla"]):
        blocks: int = 4  # number of blocks that the queries of a row are cut into

        @override
        def check_fields(self) -> None:
            self.require_least(1, "blocks")

    @override
    def attend(self, arrays: AttentionArrays, signature: AttentionSignature) -> jax.Array:
        """Return mixed values [b, t, k, q, h]; see `Kernel.attend`."""
        rules, length = signature.rules, arrays.q_btkqh.shape[1]
        if not rules.causal or signature.cp_size > 1:
            return super().attend(arrays, signature)
        (queries, keys), kv = arrays.segments, (arrays.k_bskh, arrays.v_bskh)
        mixed: list[jax.Array] = []
        for begin, end, first in blocks_of(rules, length, self.cfg.blocks):
            visible = position_mask(rules, jnp.arange(begin, end), jnp.arange(first, end))
            assert visible is not None, "rows are causal"
            mask = (queries[:, begin:end, None] == keys[:, None, first:end]) & visible
            k, v = (x[:, first:end] for x in kv)
            mixed.append(mix(arrays.q_btkqh[:, begin:end], k, v, mask, rules, arrays.sinks_kq))
        return jnp.concatenate(mixed, axis=1)


def blocks_of(rules: ScoreRules, length: int, blocks: int) -> list[tuple[int, int, int]]:
    """Return the queries [begin, end) of each block of a causal row, and the first key that one of them sees."""
    size = -(-length // blocks)
    begins = range(0, length, size)
    behind = length if rules.window is None else rules.window - 1
    return [(begin, min(begin + size, length), max(0, begin - behind)) for begin in begins]
