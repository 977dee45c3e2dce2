"""The placement of rollouts in rows: each once, in rows that hold them, the same whenever it is computed."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh import UserError
from rl.training.packing import Packing, Sizes

MAX_PROMPT, MAX_NEW = 9, 20


@st.composite
def updates(draw: st.DrawFn) -> list[Sizes]:
    """Groups with some of their rollouts live, or none."""
    groups = draw(st.integers(1, 12))
    return [
        (
            draw(st.integers(0, MAX_PROMPT - 1)),
            draw(st.dictionaries(st.integers(0, 7), st.integers(1, MAX_NEW), max_size=8)),
        )
        for _ in range(groups)
    ]


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    return Packing.Config(
        lengths=draw(st.sampled_from([(), (20,), (40, 20, 5), (33, 11)])),
        prompts=draw(st.sampled_from([None, 8, 20])),
        completions=draw(st.integers(1, 6)),
        rows=draw(st.integers(1, 3)),
    ).build(max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)


@pytest.mark.slow
@given(updates(), packings(), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_every_rollout_is_in_one_row_and_every_row_has_room(groups: list[Sizes], packing: Packing, shards: int):
    plan = packing.plan(groups, shards)
    placed = Counter((g, n) for batch in plan for row in batch.rows for g, rollouts in row for n in rollouts)
    assert placed == Counter((g, n) for g, (_, rollouts) in enumerate(groups) for n in rollouts)
    assert plan, "there is an update, even if it has nothing to learn from"
    for index, batch in enumerate(plan):
        assert len(batch.rows) == packing.rows * shards
        assert batch.length in packing.lengths
        assert batch.length == packing.lengths[0] or index == len(plan) - 1, "the last alone is shorter"
        for row in batch.rows:
            assert len({g for g, _ in row}) == len(row), "a prompt is in a row once"
            assert sum(groups[g][0] for g, _ in row) <= packing.prompts
            assert sum(groups[g][1][n] for g, rollouts in row for n in rollouts) <= batch.length
            assert sum(len(rollouts) for _, rollouts in row) <= packing.completions
    assert packing.plan(groups, shards) == plan


@given(updates(), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_only_the_last_microbatch_has_empty_rows(groups: list[Sizes], rows: int):
    plan = Packing.Config(rows=rows).build(max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW).plan(groups)
    assert all(row for batch in plan[:-1] for row in batch.rows)


def lognormal(groups: int, samples: int, max_prompt_tokens: int, max_new_tokens: int) -> list[Sizes]:
    """Lengths as of reasoning: sigma 1, 3 % at the limit."""
    rng = np.random.default_rng(0)
    limit = np.exp(1.8808)  # the 97th percentile
    lengths = np.ceil(np.minimum(rng.lognormal(size=(groups, samples)), limit) / limit * max_new_tokens).astype(int)
    prompts = rng.integers(0, max_prompt_tokens, groups)
    return [(int(p), dict(enumerate(map(int, row)))) for p, row in zip(prompts, lengths, strict=True)]


def test_a_tenth_of_the_tokens_is_wasted_where_padding_wastes_three_quarters():
    groups, samples, max_prompt_tokens, max_new_tokens = 64, 16, 65, 1024
    sizes = lognormal(groups, samples, max_prompt_tokens, max_new_tokens)
    plan = Packing.Config(rows=4).build(max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens).plan(sizes)
    useful = sum(prompt + sum(rollouts.values()) for prompt, rollouts in sizes)
    computed = sum(len(batch.rows) * (max_prompt_tokens - 1 + batch.length) for batch in plan)
    assert 1 - useful / computed < 0.1
    assert 1 - useful / (groups * (max_prompt_tokens - 1 + samples * max_new_tokens)) > 0.7
    rows_of = Counter(g for batch in plan for row in batch.rows for g, _ in row)
    assert np.mean([rows_of[g] for g in range(groups)]) < samples / 3, "most completions share their prompt"


def test_little_is_computed_for_an_update_with_little_in_it():
    packing = Packing.Config(lengths=(40, 20, 10), rows=2).build(max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    (batch,) = packing.plan([(4, {0: 6, 1: 4}), (3, {0: 9})])
    assert (batch.length, batch.rows) == (10, (((0, (0, 1)),), ((1, (0,)),)))
    (empty,) = packing.plan([(4, {})])
    assert (empty.length, empty.rows) == (10, ((), ()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": (19, 10)}, r"lengths: expected one of max_new_tokens=20 tokens or more, got \(19, 10\)"),
        ({"lengths": (20, 10, 7)}, r"lengths: expected multiples of 2 \(chunks=2\), unlike 7"),
        ({"lengths": (70_002,)}, r"lengths: expected multiples of 8 \(chunks=2\), unlike 70002"),
        ({"lengths": (1 << 21,)}, r"lengths: expected rows of less than 1,048,576 tokens"),
        ({"prompts": 7}, r"prompts: expected max_prompt_tokens - 1 = 8 tokens or more, got 7"),
        ({"rows": 0}, r"rows: expected 1 or more, got 0"),
        ({"completions": 0}, r"completions: expected 1 or more, got 0"),
    ],
)
def test_rows_that_do_not_fit_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        Packing.Config(**fields).build(max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, chunks=2)
