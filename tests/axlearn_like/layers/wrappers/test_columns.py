"""Matrices that are cut before a loop of steps give the bits of those that each step cuts."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_like.kernels.deterministic import no_fuse
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.embedding import Head
from axlearn_like.layers.wrappers.columns import cut_columns
from axlearn_like.layers.wrappers.matrix_forms import ColumnParts
from models.tiny import tiny
from tests.axlearn_like.layers.small import initialise

X = jax.random.normal(jax.random.key(0), (8, 1, 64))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_cut_layer_and_head_compute_the_same_bits(tied: bool):
    cfg = tiny(vocab_size=640, dim=64, hidden=576, num_layers=1).set(head=None if tied else Head.Config())
    stacked = initialise(cfg)[1]
    params = build_abstract(cfg).unstack_params(stacked)
    graphdef, _ = split(jax.eval_shape(lambda: cfg.build(rngs=nnx.Rngs(0)).unstack()))

    def run(params: Any, x: jax.Array, rows: int) -> jax.Array:
        model = bind(graphdef, params)
        cut = cut_columns(model, rows)
        block = cut.model.blocks()[0]
        wide, narrow = block.feed_forward.gate_df[...], block.attention.q_dkqh[...]
        assert isinstance(wide, ColumnParts) == (cut.head is not model) == (rows < 64)
        assert not isinstance(narrow, ColumnParts)  # no step cuts it
        return cut.head.logits(no_fuse(block.feed_forward(x)[0]))

    step = jax.jit(run, static_argnums=2)
    np.testing.assert_array_equal(step(params, X, 8), step(params, X, 64))
