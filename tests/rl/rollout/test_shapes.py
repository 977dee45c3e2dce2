"""Which sizes dispatches have, and who shares one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.messages import Prompt
from rl.rollout.program import Generate, complete
from rl.rollout.requests import Request, StopRules
from rl.rollout.sequence import Sequence, Task
from rl.rollout.shapes import Shapes
from rl.sampling import Sampler

STEPS, MAX_NEW = 32, 1000


def shapes(*, ragged: bool = False, slots: int = 64) -> Shapes:
    return Shapes(slots=slots, steps=STEPS, prefill_tokens=512, longest=600, ragged=ragged)


def sequence(number: int, tokens: int) -> Sequence:
    """One that draws, with so many tokens."""
    request = Request(Prompt(number, "any", np.zeros(1, np.int32)))
    task = Task(number, request, Sampler.Config(), StopRules(max_new=MAX_NEW), None, None)
    made = Sequence(task, 0, [0] * tokens, complete)
    made.begin(Generate(), None)
    made.cached = tokens - 1
    return made


def work(found: Shapes, groups: list[list[Sequence]]) -> int:
    """Rows x (keys + 256), as the docstring has it."""
    return sum(found.rows(len(group)) * (found.width(max(map(found.reach, group))) + 256) for group in groups)


LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=64)


@given(LENGTHS)
def test_groups_hold_everyone_once_and_are_never_more_work_than_all_together(lengths: list[int]):
    found, everyone = shapes(), [sequence(i, length) for i, length in enumerate(lengths)]
    groups = found.groups(everyone)
    assert sorted(one.task.number for group in groups for one in group) == list(range(len(lengths)))
    assert work(found, groups) <= work(found, [everyone])
    for longer, shorter in zip(groups, groups[1:], strict=False):
        assert min(map(found.reach, longer)) >= max(map(found.reach, shorter))


def test_a_few_long_ones_do_not_make_the_short_read_as_far():
    groups = shapes().groups([sequence(i, 450 if i < 8 else 20) for i in range(64)])
    assert [len(group) for group in groups] == [8, 56]


@pytest.mark.parametrize("count", [1, 8, 32, 64])
def test_sequences_of_one_length_share_a_dispatch(count: int):
    assert len(shapes().groups([sequence(i, 100) for i in range(count)])) == 1


def test_nor_are_rows_filled_up_where_two_smaller_dispatches_hold_them():
    assert [len(group) for group in shapes().groups([sequence(i, 100) for i in range(40)])] == [32, 8]


@given(LENGTHS)
def test_where_each_row_reads_its_own_keys_all_share_a_dispatch(lengths: list[int]):
    found = shapes(ragged=True)
    assert len(found.groups([sequence(i, length) for i, length in enumerate(lengths)])) == 1
    assert found.width(1) == found.width(600) == 640


def test_sizes_are_rounded_up_to_the_next_of_a_short_list():
    found = shapes(slots=50)
    assert [found.rows(count) for count in (1, 8, 13, 14, 25, 26, 50)] == [13, 13, 13, 25, 25, 50, 50]
    assert [found.width(tokens) for tokens in (1, 64, 65, 97, 200, 513)] == [64, 64, 96, 128, 256, 640]
    assert [found.prefill(tokens) for tokens in (32, 33, 500, 9999)] == [(16, 32), (4, 128), (1, 512), (1, 512)]
    assert [found.prefill_rows(count, 32) for count in (1, 3, 16)] == [1, 4, 16]


def test_a_dispatch_ends_early_when_a_smaller_one_would_do_or_others_wait():
    found = shapes()
    assert [found.quorum(count, waiting=False) for count in (1, 8, 9, 40, 64)] == [1, 1, 9, 33, 33]
    assert [found.quorum(count, waiting=True) for count in (1, 8, 64)] == [1, 7, 56]
