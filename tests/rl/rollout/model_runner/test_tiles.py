"""Sequences in tiles, and what they have in common: host code, no device."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.rollout.agent_loops.commands import single_turn
from rl.rollout.model_runner.tiles import blocks_in_common, make_tiles
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.rollout.sequence import Sequence, SequenceGroup
from tests.rl.tiny import make_prompt

ENDS, PAGE = [64, 128, 256, 384], 16


def group(number: int, length: int, *completions: list[int], prompt: int = 3) -> list[Sequence]:
    """Sequences of a prompt whose cache has all but the last token, in pages of their own."""
    request = Request(make_prompt(prompt, length), samples=len(completions))
    own = SequenceGroup(number, request, Sampler.Config(), StopConditions(max_new_tokens=200), None, None)
    for sample, tokens in enumerate(completions):
        one = Sequence(own, sample, [*request.prompt.tokens.tolist(), *tokens], single_turn)
        one.start_cache((5, None))
        one.limit, first = one.most, 1000 * number + 100 * sample
        one.adopt(list(range(first, first - (-len(one.tokens) // PAGE))), len(one.tokens) - 1)
    return own.sequences


@given(st.lists(st.integers(1, 9), max_size=6), st.sampled_from([2, 4, 8]))
def test_each_sequence_has_one_row_and_those_of_a_request_stand_together(counts: list[int], size: int):
    groups = [group(number, 70, *[[7]] * count, prompt=number) for number, count in enumerate(counts)]
    every, rows = [one for some in groups for one in some], 64
    tiles = make_tiles(every, rows, size, ENDS, PAGE)
    assert len(tiles.rows) == rows and len(tiles.shared) == len(tiles.sources) == rows // size
    assert sorted(map(id, every)) == sorted(id(one) for one in tiles.rows if one is not None)
    parts = [{one.group.number for one in tiles.rows[i : i + size] if one} for i in range(0, rows, size)]
    if len(parts) >= sum(-(-count // size) for count in counts):
        assert all(len(part) <= 1 for part in parts)
        for shared, part, source in zip(tiles.shared, range(0, rows, size), tiles.sources, strict=True):
            present = [one for one in tiles.rows[part : part + size] if one]
            assert shared == (1 if len(present) > 1 else 0)
            assert not present or tiles.rows[source] in present


def test_full_rows_are_used_although_requests_share_tiles():
    every = [one for number in range(3) for one in group(number, 70, *[[7]] * 3, prompt=number)]
    tiles = make_tiles(every[:8], 8, 4, ENDS, PAGE)
    assert None not in tiles.rows
    assert len({one.group.number for one in tiles.rows[:3] if one}) == 1


@given(st.integers(1, 200), st.lists(st.integers(0, 1), max_size=200), st.lists(st.integers(0, 1), max_size=200))
def test_common_blocks_end_within_the_common_tokens(length: int, one: list[int], other: list[int]):
    sequences = group(0, length, [9, *one], [9, *other])
    a, b = (sequence.tokens for sequence in sequences)
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert blocks_in_common(sequences, ENDS, PAGE) == sum(end <= same for end in ENDS)


def test_other_requests_share_what_their_prompts_have_in_common():
    first, second = group(0, 140, [7]), group(1, 150, [8])
    assert blocks_in_common([*first, *second], ENDS, PAGE) == 2  # the shorter is the longer's beginning
    second[0].start_cache((5, "adapter"))
    assert blocks_in_common([*first, *second], ENDS, PAGE) == 0


def test_of_keys_of_other_weights_the_same_pages_alone_are_shared():
    one, other = group(0, 140, [7], [8])
    for sequence in (one, other):
        sequence.mix_cache()
    assert blocks_in_common([one, other], ENDS, PAGE) == 0
    other.pages[:8] = one.pages[:8]
    assert blocks_in_common([one, other], ENDS, PAGE) == 2
    other.cached = 127  # the last key of the second block is not in its page yet
    assert blocks_in_common([one, other], ENDS, PAGE) == 1


@pytest.mark.parametrize(("cascade", "read", "alone"), [(2, 128 + 2 * 128, 2 * 256), (4, 128 + 4 * 128, 4 * 256)])
def test_keys_that_a_step_reads(cascade: int, read: int, alone: int):
    tiles = make_tiles(group(0, 130, [7], [8]), cascade, cascade, ENDS, PAGE)
    assert tiles.keys(ENDS, steps=8) == (read, alone)
    assert make_tiles([], 8, 4, ENDS, PAGE).keys(ENDS, 8) == (0, 0)
    np.testing.assert_array_equal(tiles.shared, [2])
