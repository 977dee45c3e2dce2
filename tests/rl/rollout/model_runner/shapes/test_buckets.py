"""Bucketing of the sizes of dispatches."""

import itertools

import numpy as np
import pytest

from rl.protocol.messages import Prompt
from rl.rollout.agent_loops.commands import Generate, single_turn
from rl.rollout.model_runner.shapes.buckets import Buckets
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.rollout.sequence import Sequence, SequenceGroup
from tests.axlearn_like.layers.contexts.test_paged import PAGE, WIDTH, Policy

STEPS = 32


def shapes(*, ragged: bool = False, max_num_seqs: int = 64, longest: int = 600) -> Buckets:
    return Buckets(max_num_seqs=max_num_seqs, steps=STEPS, prefill_tokens=512, longest=longest, ragged=ragged)


def sequence(tokens: int, max_new_tokens: int) -> Sequence:
    """One that draws, with so many tokens."""
    request = Request(Prompt(0, "any", np.zeros(1, np.int32)))
    group = SequenceGroup(0, request, Sampler.Config(), StopConditions(max_new_tokens=max_new_tokens), None, None)
    made = Sequence(group, 0, [0] * tokens, single_turn)
    made.generate(Generate(), None)
    made.prefilled(tokens - 1)
    return made


def test_the_reach_of_a_sequence_ends_with_the_dispatch_or_its_limit():
    assert shapes().reach(sequence(tokens=40, max_new_tokens=100)) == 39 + STEPS
    assert shapes().reach(sequence(tokens=40, max_new_tokens=45)) == 39 + 6


@pytest.mark.parametrize("max_num_seqs", [4, 8, 50, 64, 100])
def test_groups_of_fewer_rows_are_the_first_of_those_of_more(max_num_seqs: int):
    found = shapes(max_num_seqs=max_num_seqs)
    sizes = sorted({found.rows(count) for count in range(1, max_num_seqs + 1)})
    groups = found.groups(sizes[-1])
    assert list(itertools.accumulate(groups)) == sizes
    for count, rows in enumerate(sizes, start=1):
        assert found.groups(rows) == groups[:count]


def test_rows_of_narrow_windows_are_one_group():
    assert shapes(longest=128).groups(32) == [32]
    assert shapes(longest=129).groups(64) == [8, 8, 16, 32]


def test_windows_are_whole_blocks_of_keys():
    """One of 96 keys, a block and a half, was summed otherwise than scoring, with 64 or more queries in a product."""
    assert all(shapes(longest=2000).width(tokens) % 64 == 0 for tokens in range(1, 2001))


@pytest.mark.full
def test_prompts_that_end_within_a_block_of_keys_have_the_bits_of_scoring():
    """Prompts of 66 to 96 tokens with three queries to a key/value head, prefilled 32 tokens of a row at a time."""
    policy, found = Policy((96, 3, 1, 32, 256, 264), layers=1), shapes(longest=WIDTH * PAGE)
    filled = policy.prefilled(32, 1, lambda tokens: found.width(tokens) // PAGE)
    assert filled.tobytes() == policy.scored(policy.tokens).tobytes()


def test_where_each_row_reads_its_own_keys_there_is_one_width():
    assert shapes(ragged=True).width(1) == shapes(ragged=True).width(600) == 640


def test_sizes_are_rounded_up_to_the_next_of_a_short_list():
    found = shapes(max_num_seqs=50)
    assert [found.rows(count) for count in (1, 8, 13, 14, 25, 26, 50)] == [13, 13, 13, 25, 25, 50, 50]
    assert [found.width(tokens) for tokens in (1, 64, 65, 129, 200, 513)] == [64, 64, 128, 192, 256, 640]
    assert [found.prefill(tokens) for tokens in (32, 33, 500, 9999)] == [(16, 32), (4, 128), (1, 512), (1, 512)]
    assert [found.prefill_rows(count, 32) for count in (1, 3, 16)] == [1, 4, 16]


def test_a_dispatch_ends_early_when_a_smaller_one_would_do_or_others_wait():
    found = shapes()
    assert [found.min_alive_rows(count, waiting=False) for count in (1, 8, 9, 40, 64)] == [1, 1, 9, 33, 33]
    assert [found.min_alive_rows(count, waiting=True) for count in (1, 8, 64)] == [1, 7, 56]


def test_elsewhere_than_on_cpus_all_rows_are_one_group():
    shapes = Buckets(max_num_seqs=64, steps=STEPS, prefill_tokens=512, longest=1000, ragged=False, grouped=False)
    assert [shapes.groups(rows) for rows in (8, 64)] == [[8], [64]]
