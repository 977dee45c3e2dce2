"""An attention kernel of your own (docs/how-to/add-a-kernel.md).

axl train examples/custom_kernel.py:one_head_at_a_time --set num_steps=20
"""

import jax
import jax.numpy as jnp

from axlearn_like.config import ConfigBase, replace
from axlearn_like.kernels.attention.dispatch import FirstSupported
from axlearn_like.kernels.attention.interface import AttentionArrays, AttentionSignature, Kernel
from axlearn_like.kernels.attention.xla import Xla, position_mask
from axlearn_like.training.trainer import Trainer
from experiments.demo.config import demo_sft


class OneHeadAtATime(Kernel):
    """Plain softmax attention, a loop over key/value heads: the scores of one head are in memory at a time."""

    class Config(ConfigBase["OneHeadAtATime"]):
        pass

    explicit = True  # it also works on arrays that are sharded over batch and heads

    def supported(self, signature: AttentionSignature) -> str | None:
        """Return why this attention cannot be computed, or None if it can; the next kernel is tried then."""
        return "has sinks or a soft cap" if signature.sinks or signature.rules.soft_cap else None

    def attend(self, arrays: AttentionArrays, signature: AttentionSignature) -> jax.Array:
        """Return mixed values [b, t, k, q, h]."""
        mask_bts = arrays.same_segment_bts  # rows are packed: documents do not see each other
        visible_ts = position_mask(signature.rules, arrays.places, jnp.arange(arrays.k_bskh.shape[1]))  # causal, window
        mask_bts = mask_bts if visible_ts is None else mask_bts & visible_ts
        mixed = []
        for head in range(signature.kv_heads):
            scores = jnp.einsum("btqh,bsh->bqts", arrays.q_btkqh[:, :, head], arrays.k_bskh[:, :, head])
            scores = jnp.where(mask_bts[:, None], scores * signature.rules.scale_of(signature.head_dim), -1e30)
            mixed.append(jnp.einsum("bqts,bsh->btqh", jax.nn.softmax(scores, axis=-1), arrays.v_bskh[:, :, head]))
        return jnp.stack(mixed, axis=2)


def one_head_at_a_time(*, seed: int = 0) -> Trainer.Config:
    """Supervised demo with this kernel wherever it can be used, and XLA's elsewhere."""
    cfg = demo_sft(seed=seed)
    kernels = (OneHeadAtATime.Config(), Xla.Config())
    replace(cfg, FirstSupported.Config, lambda old: old.set(kernels=kernels))
    return cfg
