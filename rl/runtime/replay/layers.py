"""Marks of activations: a number for each layer, rollout and token, by which two forward passes are compared."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from axlearn_like.kernels.exact.scope import use_numerics
from axlearn_like.layers.base import Params, bind
from axlearn_like.layers.contexts.paged import RowContext
from mesh.rules import complete_rows, use_mesh
from rl.protocol.messages import Group
from rl.training.logprobs import fill_rows, row_length
from rl.training.trainer import PolicyTrainer


def layer_marks(trainer: PolicyTrainer, params: Params, groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Return "layers/marks", uint32 [rollouts, embedding and layers and logits, length], of a plain forward pass.

    A token's activations depend on those before it, so of rollouts that differ the common beginning can be compared.
    Empty for a policy that is no stack of layers.
    """
    cfg, graphdef = trainer.cfg, trainer.cfg.program(trainer.mesh).graphdef
    if not hasattr(bind(graphdef, params), "blocks"):
        return {}
    length = row_length(cfg.max_prompt_tokens, cfg.max_new_tokens)
    sequences = [(group.prompt.tokens, rollout.tokens) for group in groups for rollout in group.rollouts]
    marked = jax.jit(lambda params, tokens: _marks(graphdef, params, tokens))
    with use_mesh(trainer.mesh, cfg.axis_rules), complete_rows():
        found = [marked(params, fill_rows([one], 1, length)["tokens"]) for one in sequences]
    return {"layers/marks": np.stack([np.asarray(one) for one in found])}


def _marks(graphdef: nnx.GraphDef[Any], params: Params, tokens: jax.Array) -> jax.Array:
    model = bind(graphdef, params)
    context = RowContext(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    with use_numerics(model.numerics):
        x = model.embedding(tokens, model.dtype, context)
        marks = [_mark(x)]
        for layer in model.blocks():
            x, _, _ = layer(x, context, None)
            marks.append(_mark(x))
        marks.append(_mark(model.logits(model.norm(x))))
    return jnp.stack(marks)


def _mark(x: jax.Array) -> jax.Array:
    """[1, length, width] -> uint32 [length]: sums of the bits times odd numbers, which one changed element changes."""
    bits = lax.bitcast_convert_type(x[0], {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]).astype(jnp.uint32)
    weights = jnp.arange(x.shape[-1], dtype=jnp.uint32) * np.uint32(0x9E3779B2) | 1
    return jnp.sum(bits * weights, axis=-1, dtype=jnp.uint32)
