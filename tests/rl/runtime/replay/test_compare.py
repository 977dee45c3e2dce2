"""The comparison of two traces: the first difference of each stage, and distances of floats."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import UserError
from rl.runtime.replay.compare import STAGES, differences, first_layer, ulps
from rl.runtime.replay.trace import UpdateTrace, read_trace

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def made(**arrays: Any) -> UpdateTrace:
    """A trace of two rollouts of one prompt; names have `__` for `/`."""
    known: dict[str, Any] = {
        "lease__prompts": [7],
        "prompt__00000": [1, 2, 3],
        "tokens__00000__00000": [4, 5, 6],
        "tokens__00000__00001": [8, 9, 10],
        "layers__marks": np.arange(2 * 4 * 8).reshape(2, 4, 8),
        **arrays,
    }
    return UpdateTrace([(7, 0), (7, 1)], {name.replace("__", "/"): np.asarray(x) for name, x in known.items()})


@given(FLOATS, st.integers(0, 200))
def test_the_distance_of_floats_is_the_number_of_steps_between_them(start: float, steps: int) -> None:
    x = y = np.float32(start)
    with np.errstate(over="ignore"):
        for _ in range(steps):
            y = np.nextafter(y, np.float32(np.inf))
    assert ulps(x, y) == ulps(y, x) == (steps if np.isfinite(y) else None)


def test_numbers_without_a_distance_have_none() -> None:
    assert ulps(np.float32(1), np.float32("nan")) is None
    assert ulps(np.int32(1), np.int32(2)) is None
    assert ulps(np.float64(1), np.nextafter(np.float64(1), 2)) == 1
    assert ulps(np.float32(-0.0), np.float32(0.0)) == 0


@given(st.lists(st.sampled_from(sorted(STAGES)), min_size=1, unique=True), st.integers(0, 11))
def test_stages_that_differ_are_found_in_the_order_of_an_update(stages: list[str], at: int) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    other = array.copy()
    other.ravel()[at] = np.nextafter(other.ravel()[at], np.float32(99))
    a, b = (made(**{f"{stage}__x": x for stage in stages}) for x in (array, other))
    found = differences(a, b)
    assert [one.stage for one in found] == [stage for stage in STAGES if stage in stages]
    for one in found:
        assert (one.index, one.ulps, one.elements, one.arrays) == (divmod(at, 4), 1, 1, 1)
    assert differences(a, a) == []


def test_a_rollout_that_ends_earlier_differs_at_its_end_and_one_of_another_shape_by_that() -> None:
    [found] = differences(made(), made(tokens__00000__00001=[8, 9]))
    assert (found.stage, found.name, found.index, found.sides) == ("tokens", "00000/00001", (2,), ("10", "the end"))
    a, b = made(weights__w=np.zeros((2, 3), np.float32)), made(weights__w=np.zeros((3, 2), np.float32))
    assert differences(a, b)[0].sides == ("float32[2, 3]", "float32[3, 2]")
    assert differences(a, made())[0].sides == ("float32[2, 3]", "nothing")


def test_rows_in_another_order_are_called_that() -> None:
    rows = np.array([[1, 2], [3, 4], [5, 6]])
    a, b, c = (made(batch__x=x) for x in (rows, rows[[0, 2, 1]], rows + 1))
    assert differences(a, b)[0].note == "the same rows in another order (rows 1, 2)"
    assert differences(a, c)[0].note == ""


def test_signs_of_zeros_and_nans_are_compared_by_their_bits() -> None:
    nan = np.array([np.nan, 0.0], np.float32)
    assert differences(made(loss__x=nan), made(loss__x=nan.copy())) == []
    assert differences(made(loss__x=nan), made(loss__x=np.array([np.nan, -0.0], np.float32)))[0].index == (1,)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([(0, 2, 4)], ("layer 1", 0, 4)),
        ([(0, 3, 1), (1, 1, 2)], ("layer 0", 1, 2)),
        ([(0, 3, 1)], ("the logits", 0, 1)),
        ([(1, 0, 0)], ("the embedding", 1, 0)),
        ([(0, 2, 5)], None),  # behind the last token that a log-probability follows from
        ([], None),
    ],
)
def test_the_first_layer_is_found_where_tokens_are_equal(changed: list[tuple[int, int, int]], expected: Any) -> None:
    a = made()
    marks = a.arrays["layers/marks"].copy()
    for place in changed:
        marks[place] += 1
    assert first_layer(a, made(layers__marks=marks)) == expected


def test_activations_behind_another_token_or_of_other_weights_say_nothing() -> None:
    a = made()
    marks = a.arrays["layers/marks"].copy()
    marks[1, 1, 4] += 1  # its prompt has 3 tokens, and the token at 4 is the completion's second
    assert first_layer(a, made(layers__marks=marks)) == ("layer 0", 1, 4)
    assert first_layer(a, made(layers__marks=marks, tokens__00000__00001=[8, 11, 10])) is None
    assert first_layer(made(state__w=1), made(layers__marks=marks, state__w=2)) is None


def test_a_trace_is_read_as_it_was_written_and_other_files_are_refused(tmp_path: Any) -> None:
    trace = made(weights__w=np.arange(3, dtype=np.float32))
    trace.write(tmp_path / "a", update=3)
    read, about = read_trace(tmp_path / "a")
    assert differences(trace, read) == [] and about["update"] == 3 and read.samples == trace.samples
    (tmp_path / "b").write_bytes(b"no trace")
    np.savez(tmp_path / "c.npz", x=np.zeros(3))
    for name in ("b", "c.npz", "missing"):
        with pytest.raises(UserError, match="is no trace of an update"):
            read_trace(tmp_path / name)
