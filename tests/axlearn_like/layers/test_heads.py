"""Heads on packed rows are those of each sequence alone; poolings against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.layers.base import bind, build_abstract
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.heads import EmbeddingHead, Pooling, ScoreHead, pool
from axlearn_like.operations.flops import model_flops, rows_workload
from mesh.errors import UserError
from models.gemma import gemma
from models.gpt2 import gpt2
from tests.axlearn_like.layers.small import initialise, small_decoder

pytestmark = pytest.mark.numerics

LENGTHS, LENGTH = (5, 1, 7), 16  # of the sequences of a row; the rest is padding


def packed() -> PackedContext:
    """Return a row of three sequences and padding, and one of a sequence alone."""
    rows = [np.concatenate([np.arange(n) for n in (*LENGTHS, LENGTH - sum(LENGTHS))]), np.arange(LENGTH)]
    ids = [np.repeat([1, 2, 3, 0], [*LENGTHS, LENGTH - sum(LENGTHS)]), np.ones(LENGTH)]
    return PackedContext(jnp.asarray(np.stack(rows), jnp.int32), jnp.asarray(np.stack(ids), jnp.int32))


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_a_pooling_is_that_of_the_sequence_so_far(pooling: Pooling):
    x = np.random.default_rng(0).normal(size=(2, LENGTH, 6)).astype(np.float32)
    found = np.asarray(pool(jnp.asarray(x), packed(), pooling))
    of = {"last": lambda part: part[-1], "mean": lambda part: part.mean(axis=0), "cls": lambda part: part[0]}[pooling]
    for row, lengths in enumerate((LENGTHS, (LENGTH,))):
        start = 0
        for length in lengths:
            for stop in range(start + 1, start + length + 1):
                np.testing.assert_allclose(found[row, stop - 1], of(x[row, start:stop].astype(np.float64)), atol=2e-6)
            start += length


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_scores_depend_on_neither_neighbours_nor_padding(pooling: Pooling):
    cfg = small_decoder(num_layers=2, head=ScoreHead.Config(outputs=3, bias=True, pooling=pooling))
    graphdef, params = initialise(cfg)
    tokens = np.random.default_rng(1).integers(0, 40, (2, LENGTH)).astype(np.int32)

    @jax.jit
    def scores(tokens: jax.Array, context: PackedContext) -> jax.Array:
        model = bind(graphdef, params)
        return model.scores(model.hidden(tokens, context).x, context)

    together = np.asarray(scores(jnp.asarray(tokens), packed()))
    alone = np.zeros_like(tokens)
    start = LENGTHS[0] + LENGTHS[1]
    alone[0, : LENGTHS[2]], alone[1] = tokens[0, start : start + LENGTHS[2]], tokens[1]
    ids = (np.arange(LENGTH) < [[LENGTHS[2]], [LENGTH]]).astype(np.int32)
    context = PackedContext(jnp.asarray(np.where(ids, np.arange(LENGTH), 0), jnp.int32), jnp.asarray(ids))
    apart = np.asarray(scores(jnp.asarray(alone), context))
    np.testing.assert_allclose(together[0, start : start + LENGTHS[2]], apart[0, : LENGTHS[2]], atol=1e-5)
    assert np.std(together[1]) > 0.1
    assert together.dtype == np.float32


@pytest.mark.slow
def test_embeddings_have_length_one_and_a_row_of_zeros_is_no_nan():
    head = EmbeddingHead.Config(dim=4, pooling="mean").build(rngs=None)
    x = jnp.zeros((2, LENGTH, 4)).at[1].set(jnp.arange(4.0))
    found = np.asarray(head(x, packed()))
    np.testing.assert_allclose(np.linalg.norm(found[1], axis=-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(found[0], 0)
    plain = EmbeddingHead.Config(dim=4, pooling="mean", normalise=False).build(rngs=None)
    np.testing.assert_allclose(plain(x, packed())[1, -1], np.arange(4.0), rtol=1e-6)


@pytest.mark.parametrize("decoder", [gpt2("GPT-2-124M"), gemma("Gemma-2-2B")])
def test_every_family_takes_a_head_and_its_flops_are_counted(decoder):
    cfg = decoder.clone(head=ScoreHead.Config(outputs=7))
    model = build_abstract(cfg)
    assert model.head.weight_dv.shape == (cfg.dim, 7)
    work = rows_workload(2, 8)
    bare = model_flops(cfg.clone(head=EmbeddingHead.Config()), work)
    assert model_flops(cfg, work) - bare == 2 * 16 * cfg.dim * 7


def test_a_model_without_logits_or_scores_says_so():
    context = packed()
    scorer = bind(*initialise(small_decoder(num_layers=1, head=ScoreHead.Config())))
    with pytest.raises(UserError, match=r"ScoreHead makes no logits; expected Head\.Config"):
        scorer.logits(jnp.zeros((2, LENGTH, 32)))
    decoder = bind(*initialise(small_decoder(num_layers=1)))
    with pytest.raises(UserError, match=r"the tied embedding scores no tokens; expected ScoreHead"):
        decoder.scores(jnp.zeros((2, LENGTH, 32)), context)
    with pytest.raises(UserError, match=r"outputs: expected 1 or more, got 0"):
        ScoreHead.Config(dim=4, outputs=0).check()


def test_pooling_refuses_rows_that_are_sharded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("axlearn_like.layers.contexts.packed.axis_sizes", lambda axis: {"sequence": 2})
    with pytest.raises(UserError, match=r"sequence 2: PackedContext .* expected sequence 1"):
        pool(jnp.zeros((2, LENGTH, 4)), packed(), "mean")
