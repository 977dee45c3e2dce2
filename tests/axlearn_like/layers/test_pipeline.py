"""Refusals of a pipeline, and its cost. That it computes the same is in training/test_step_mesh.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from axlearn_like.layers.base import build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.pipeline import Pipeline
from axlearn_like.training.heads.chunked_head import merge_length, split_length
from mesh import UserError, make_mesh
from mesh.sharding import merge_rows, split_rows
from tests.axlearn_like.layers.small import small_decoder

# No array is ever put on them: there is one device.
STAGES = make_mesh({"pipeline": 2, "fsdp": 2}, jax.devices()[:1] * 4).abstract_mesh


def trace(cfg, rows: int) -> None:
    with jax.sharding.use_abstract_mesh(STAGES):
        model = cfg.build(rngs=nnx.Rngs(jax.random.key(0)))
        tokens = jnp.zeros((rows, 4), jnp.int32)
        model.hidden(tokens, PackedContext(tokens, tokens))


def test_each_stage_is_born_with_its_own_layers():
    with jax.sharding.use_abstract_mesh(STAGES):
        abstract = split(build_abstract(small_decoder(num_layers=4)))[1]
    assert abstract["layers"]["feed_forward"]["up_df"].sharding.spec == PartitionSpec("pipeline", "fsdp", None)
    assert abstract["embedding"]["weight_vd"].sharding.spec == PartitionSpec(None, "fsdp")


def test_layers_that_do_not_divide_into_stages_are_refused():
    with pytest.raises(UserError, match=r"num_layers=3 do not divide into the mesh's 2 pipeline stages"):
        jax.eval_shape(lambda: trace(small_decoder(num_layers=3), 8))


def test_rows_that_do_not_divide_into_microbatches_are_refused():
    cfg = small_decoder(num_layers=2, pipeline=Pipeline.Config(microbatches=4))
    with pytest.raises(UserError, match=r"4 rows does not divide into 4 microbatches .* over 2 devices"):
        jax.eval_shape(lambda: trace(cfg, 4))


def test_no_microbatches_are_refused():
    with pytest.raises(UserError, match=r"microbatches: expected 1 or more, got 0"):
        Pipeline.Config(microbatches=0).build()


def test_parts_go_back_to_their_places():
    x = np.arange(2 * 6 * 3).reshape(2, 6, 3)
    parts = split_length(jnp.asarray(x), 3)
    np.testing.assert_array_equal(parts[1], x[:, 1::3])
    np.testing.assert_array_equal(merge_length(parts), x)
    rows = split_rows(jnp.asarray(x.swapaxes(0, 1)), 2)
    np.testing.assert_array_equal(rows[1], x.swapaxes(0, 1)[1::2])
    np.testing.assert_array_equal(merge_rows(rows), x.swapaxes(0, 1))
