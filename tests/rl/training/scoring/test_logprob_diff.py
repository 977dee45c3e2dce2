"""Scoring with the head in tiles: the same log-probabilities, and logits that never exist whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.base import split
from rl.objective.presets import grpo
from rl.training.program import make_score_rows
from rl.training.scoring.logprob_diff import make_logprobs
from rl.training.spec import UpdateSpec
from tests.rl.tiny import tiny_policy
from tests.rl.training.test_program import groups
from tests.rl.training.whole_groups import pack_groups, pack_rows

pytestmark = pytest.mark.numerics

WORDS, TILE = 8192, 512
MODEL = tiny_policy(num_layers=1).set(vocab_size=WORDS)
SIZES = {"max_prompt_tokens": 16, "max_new_tokens": 17}


def scored(run: Any, *args: Any, **rows: Any) -> tuple[Any, int]:
    """Return what a jitted function computes, and the bytes of its temporary arrays."""
    compiled = run.lower(*args, **rows).compile()
    return compiled(*args, **rows), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_a_reference_with_its_head_in_tiles_scores_the_same_without_whole_logits():
    graphdef, params = split(MODEL.build(rngs=nnx.Rngs(0)))
    batch: Any = pack_groups(groups(), grpo().build(), **SIZES)[0]
    whole, stored = scored(make_logprobs(graphdef, UpdateSpec(0.9)), params, batch)
    found, needed = scored(make_logprobs(graphdef, UpdateSpec(0.9, head_tile=TILE)), params, batch)
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)
    logits = 4 * batch["targets"].size * WORDS
    assert stored > logits > 4 * needed


@pytest.mark.slow
def test_whole_rollouts_are_scored_in_parts_to_the_same_bits():
    graphdef, params = split(MODEL.build(rngs=nnx.Rngs(0)))
    rows = pack_rows(groups(), **SIZES)
    arguments = {name: rows[name] for name in ("tokens", "targets")}
    arguments["temperature"] = jnp.full(1, 0.9, jnp.float32)
    whole, stored = scored(make_score_rows(graphdef), params, **arguments)
    parts, needed = scored(make_score_rows(graphdef, tile=TILE), params, **arguments)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    logits = 4 * rows["tokens"].size * WORDS
    assert stored > logits > 4 * needed
