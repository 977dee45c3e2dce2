"""Boxes against brute force: an array over the grid that counts how often each element is held."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.parameter_server.errors import WeightsError
from rl.parameter_server.index_ranges import (
    Box,
    check_cover,
    covering,
    describe,
    intersect,
    owned_pieces,
    shape_of,
    slices,
    volume,
    whole,
    within,
)

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
QUICK = settings(max_examples=200, deadline=None)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], empty: bool = True) -> Box:
    ranges = []
    for size in shape:
        start = draw(st.integers(0, size if empty else size - 1))
        ranges.append((start, draw(st.integers(start if empty else start + 1, size))))
    return tuple(ranges)


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], depth: int = 3) -> list[Box]:
    """Disjoint boxes that make up a tensor, by cuts at random places: no regular grid."""
    parts = [whole(shape)]
    for _ in range(draw(st.integers(0, depth)) if shape else 0):
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        start, stop = box[axis]
        cut = draw(st.integers(start, stop))
        parts += [(*box[:axis], side, *box[axis + 1 :]) for side in ((start, cut), (cut, stop))]
    return draw(st.permutations(parts))


@given(st.data(), SHAPES)
@QUICK
def test_intersections_are_those_of_sets(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    counts = counted(shape, [a, b])
    both = intersect(a, b)
    assert np.array_equal(counts == 2, counted(shape, [] if both is None else [both]) == 1)
    assert both is None or volume(both) > 0
    assert both == intersect(b, a)
    assert within(a, a) and (both is None or (within(both, a) and within(both, b)))
    assert shape_of(a) == np.empty(shape)[indexed(a)].shape
    assert volume(a) == np.empty(shape)[indexed(a)].size


@given(st.data(), SHAPES)
@QUICK
def test_slices_find_a_box_in_the_array_of_another(data: st.DataObject, shape: tuple[int, ...]) -> None:
    tensor = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    outer, box = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    if within(box, outer):
        held = tensor[indexed(outer)]
        assert np.array_equal(held[(*slices(box, outer), ...)], tensor[indexed(box)])
        assert np.shares_memory(held[(*slices(box, outer), ...)], held) == (volume(box) > 0)
    else:
        with pytest.raises(WeightsError, match="does not lie in"):
            slices(box, outer)


@given(st.data(), SHAPES)
@QUICK
def test_a_cover_is_exact_or_refused(data: st.DataObject, shape: tuple[int, ...]) -> None:
    parts = data.draw(partitions(shape))
    change = data.draw(st.sampled_from(["none", "drop", "add", "swap"]))
    if change in ("drop", "swap"):
        parts = parts[1:]
    if change in ("add", "swap"):
        parts = [*parts, data.draw(boxes_in(shape))]
    if (counted(shape, parts) == 1).all():
        check_cover("w", shape, parts)
    else:
        with pytest.raises(WeightsError, match="overlap|no piece holds"):
            check_cover("w", shape, parts)


@given(st.data(), SHAPES)
@QUICK
def test_parts_cover_a_box_or_there_is_a_hole(data: st.DataObject, shape: tuple[int, ...]) -> None:
    held = data.draw(partitions(shape))
    held = held[data.draw(st.integers(0, len(held))) :] + data.draw(st.lists(boxes_in(shape), max_size=3))
    box = data.draw(boxes_in(shape, empty=False))
    parts = covering(box, held)
    if (counted(shape, held)[indexed(box)] > 0).all():
        assert np.array_equal(counted(shape, parts), counted(shape, [box]))
        assert all(any(within(part, piece) for piece in held) for part in parts)
        assert (len(parts) == 1) == any(within(box, piece) for piece in held)
    else:
        assert parts == []


def test_the_first_fault_of_a_cover_is_named() -> None:
    quarters = [((i, i + 2), (j, j + 4)) for i in (0, 2) for j in (0, 4)]
    check_cover("w", (4, 8), quarters)
    with pytest.raises(WeightsError, match=r"tensor w of shape \(4, 8\): no piece holds \[0:2, 4:8\]"):
        check_cover("w", (4, 8), [quarters[0], quarters[2]])
    with pytest.raises(WeightsError, match=r"tensor w .*: pieces \[0:2, 4:8\] and \[0:3, 7:8\] overlap"):
        check_cover("w", (4, 8), [*quarters, ((0, 3), (7, 8))])
    with pytest.raises(WeightsError, match=r"tensor w: piece \[0:4, 4:9\] is not a part of its shape \(4, 8\)"):
        check_cover("w", (4, 8), [((0, 4), (4, 9))])
    with pytest.raises(WeightsError, match="not a part"):
        check_cover("w", (4, 8), [((0, 4),)])
    with pytest.raises(WeightsError, match="not a part"):
        check_cover("w", (4,), [((3, 1),)])


def test_overlaps_are_found_far_down_a_long_list() -> None:
    rows = [((i, i + 1), (0, 8)) for i in range(2500)]
    check_cover("w", (2500, 8), rows)
    with pytest.raises(WeightsError, match=r"\[2400:2401, 0:8\] and \[2300:2500, 7:8\] overlap"):
        check_cover("w", (2500, 8), [*rows[:2300], rows[2400], ((2300, 2500), (7, 8))])
    with pytest.raises(WeightsError, match=r"no piece holds \[1500:1501, 0:8\]"):
        check_cover("w", (2500, 8), [*rows[:1500], *rows[1501:]])


def test_scalars_and_tensors_without_elements() -> None:
    check_cover("s", (), [()])
    with pytest.raises(WeightsError, match=r"no piece holds \[\]"):
        check_cover("s", (), [])
    with pytest.raises(WeightsError, match="overlap"):
        check_cover("s", (), [(), ()])
    assert intersect((), ()) == () and volume(()) == 1 and covering((), [()]) == [()] and covering((), []) == []
    check_cover("e", (0, 4), [])
    check_cover("e", (0, 4), [((0, 0), (0, 2)), ((0, 0), (0, 4))])
    assert covering(((0, 0), (0, 2)), [((0, 0), (0, 4))]) == [((0, 0), (0, 2))]


def test_one_held_box_is_preferred_and_the_largest_share_goes_first() -> None:
    box = ((0, 4), (0, 8))
    halves = [((0, 4), (0, 4)), ((0, 4), (4, 8))]
    assert covering(box, [*halves, box]) == [box]
    assert covering(box, [*halves, ((0, 9), (0, 9))]) == [box]
    assert covering(box, [*halves, *halves]) == halves
    assert covering(box, [((0, 1), (0, 8)), *halves]) == halves  # the row would only cost a third request
    assert covering(((1, 3), (2, 6)), halves) == [((1, 3), (2, 4)), ((1, 3), (4, 6))]


def test_boxes_of_other_tensors_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"boxes \[0:2\] and \[0:2, 0:2\] are of tensors with different numbers"):
        intersect(((0, 2),), ((0, 2), (0, 2)))
    with pytest.raises(WeightsError, match=r"box \[0:2, 0:2\] has 2 dimensions; expected 1"):
        covering(((0, 1),), [((0, 2), (0, 2))])
    assert not within(((0, 1),), ((0, 2), (0, 2)))
    assert describe(((0, 2), (4, 8))) == "[0:2, 4:8]" and describe(()) == "[]"


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 2)])
def test_one_device_owns_the_whole(shape: tuple[int, ...]) -> None:
    array = jax.numpy.ones(shape)
    for turn in (0, 5):
        ((box, data),) = owned_pieces(array, turn)
        assert box == whole(shape) and data.shape == shape and isinstance(data, jax.Array)


def counted(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How many of the boxes hold each element."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[indexed(box)] += 1
    return counts


def indexed(box: Box) -> tuple:
    return (*(slice(*ends) for ends in box), ...)
