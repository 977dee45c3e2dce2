"""Packing against brute force: first fit by its definition, pieces by counting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.input.packing import FirstFit, OneARow, TooLong, plan_rows, split_examples
from axlearn_like.input.source import InputError

needs = st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), min_size=1)))


def first_fit(pieces: list[int], seq_len: int) -> list[int]:
    """The definition: the first row with room."""
    free: list[int] = []
    rows = []
    for piece in pieces:
        row = next((i for i, room in enumerate(free) if room >= piece), len(free))
        if row == len(free):
            free.append(seq_len)
        free[row] -= piece
        rows.append(row)
    return rows


@settings(deadline=None)
@given(needs)
def test_first_fit_is_what_its_name_says(case):
    seq_len, pieces = case
    rows = FirstFit.Config().build().rows(np.array(pieces), seq_len)
    assert rows.tolist() == first_fit(pieces, seq_len)


@settings(deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1), st.integers(1, 12))
def test_split_pieces_make_every_token_but_the_first_a_target_once(lengths, seq_len):
    pieces = split_examples(np.array(lengths), seq_len, "split")
    assert (pieces.stop - pieces.start).max() <= seq_len
    targets = [
        (int(example), token)
        for example, start, stop in zip(*pieces, strict=True)
        for token in range(start + 1, stop + 1)
    ]
    assert targets == [(i, token) for i, length in enumerate(lengths) for token in range(1, length)]


def test_long_examples_are_refused_by_number():
    with pytest.raises(TooLong) as error:
        split_examples(np.array([3, 9, 10, 11]), 8, "refuse")
    assert error.value.example == 2
    assert len(split_examples(np.array([3, 9]), 8, "refuse").start) == 2


@settings(deadline=None)
@given(needs, st.randoms())
def test_a_plan_has_every_piece_in_its_row(case, random):
    seq_len, lengths = case
    pieces = split_examples(np.array(lengths) + 1, seq_len, "refuse")
    rows = OneARow.Config().build().rows(pieces.stop, seq_len) // 2
    order = list(range(rows.max() + 1))
    random.shuffle(order)
    plan = plan_rows(pieces, rows, np.array(order))
    for row, out in enumerate(order):
        inside = plan.pieces.example[plan.first[out] : plan.first[out + 1]]
        assert inside.tolist() == np.flatnonzero(rows == row).tolist()


@pytest.mark.parametrize("arrangement", [FirstFit, OneARow])
def test_an_empty_window_is_refused(arrangement):
    with pytest.raises(InputError, match="a window of 0 examples"):
        arrangement.Config(window=0).build()
