"""Index ranges against brute force: an array over the grid that counts how often each element is held."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.parameter_server.errors import WeightsError
from rl.parameter_server.index_ranges import (
    IndexRange,
    check_cover,
    covering,
    describe,
    intersect,
    owned_shards,
    shape_of,
    slices,
    volume,
    whole,
    within,
)

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
QUICK = settings(max_examples=200, deadline=None)


@st.composite
def index_ranges_in(draw: st.DrawFn, shape: tuple[int, ...], empty: bool = True) -> IndexRange:
    ranges = []
    for size in shape:
        start = draw(st.integers(0, size if empty else size - 1))
        ranges.append((start, draw(st.integers(start if empty else start + 1, size))))
    return tuple(ranges)


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], depth: int = 3) -> list[IndexRange]:
    """Disjoint index ranges that make up a tensor, by cuts at random places: no regular grid."""
    parts = [whole(shape)]
    for _ in range(draw(st.integers(0, depth)) if shape else 0):
        index_range = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        start, stop = index_range[axis]
        cut = draw(st.integers(start, stop))
        parts += [(*index_range[:axis], side, *index_range[axis + 1 :]) for side in ((start, cut), (cut, stop))]
    return draw(st.permutations(parts))


@pytest.mark.numerics
@given(st.data(), SHAPES)
@QUICK
def test_intersections_are_those_of_sets(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(index_ranges_in(shape)), data.draw(index_ranges_in(shape))
    counts = counted(shape, [a, b])
    both = intersect(a, b)
    assert np.array_equal(counts == 2, counted(shape, [] if both is None else [both]) == 1)
    assert both is None or volume(both) > 0
    assert both == intersect(b, a)
    assert within(a, a) and (both is None or (within(both, a) and within(both, b)))
    assert shape_of(a) == np.empty(shape)[indexed(a)].shape
    assert volume(a) == np.empty(shape)[indexed(a)].size


@pytest.mark.numerics
@given(st.data(), SHAPES)
@QUICK
def test_slices_find_a_index_range_in_the_array_of_another(data: st.DataObject, shape: tuple[int, ...]) -> None:
    tensor = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    outer, index_range = data.draw(index_ranges_in(shape)), data.draw(index_ranges_in(shape))
    if within(index_range, outer):
        held = tensor[indexed(outer)]
        assert np.array_equal(held[(*slices(index_range, outer), ...)], tensor[indexed(index_range)])
        assert np.shares_memory(held[(*slices(index_range, outer), ...)], held) == (volume(index_range) > 0)
    else:
        with pytest.raises(WeightsError, match="does not lie in"):
            slices(index_range, outer)


@given(st.data(), SHAPES)
@QUICK
def test_a_cover_is_exact_or_refused(data: st.DataObject, shape: tuple[int, ...]) -> None:
    parts = data.draw(partitions(shape))
    change = data.draw(st.sampled_from(["none", "drop", "add", "swap"]))
    if change in ("drop", "swap"):
        parts = parts[1:]
    if change in ("add", "swap"):
        parts = [*parts, data.draw(index_ranges_in(shape))]
    if (counted(shape, parts) == 1).all():
        check_cover("w", shape, parts)
    else:
        with pytest.raises(WeightsError, match="overlap|no shard holds"):
            check_cover("w", shape, parts)


@pytest.mark.slow
@pytest.mark.numerics
@given(st.data(), SHAPES)
@QUICK
def test_parts_cover_a_index_range_or_there_is_a_hole(data: st.DataObject, shape: tuple[int, ...]) -> None:
    held = data.draw(partitions(shape))
    held = held[data.draw(st.integers(0, len(held))) :] + data.draw(st.lists(index_ranges_in(shape), max_size=3))
    index_range = data.draw(index_ranges_in(shape, empty=False))
    parts = covering(index_range, held)
    if (counted(shape, held)[indexed(index_range)] > 0).all():
        assert np.array_equal(counted(shape, parts), counted(shape, [index_range]))
        assert all(any(within(part, shard) for shard in held) for part in parts)
        assert (len(parts) == 1) == any(within(index_range, shard) for shard in held)
    else:
        assert parts == []


def test_the_first_fault_of_a_cover_is_named() -> None:
    quarters = [((i, i + 2), (j, j + 4)) for i in (0, 2) for j in (0, 4)]
    check_cover("w", (4, 8), quarters)
    with pytest.raises(WeightsError, match=r"tensor w of shape \(4, 8\): no shard holds \[0:2, 4:8\]"):
        check_cover("w", (4, 8), [quarters[0], quarters[2]])
    with pytest.raises(WeightsError, match=r"tensor w .*: shards \[0:2, 4:8\] and \[0:3, 7:8\] overlap"):
        check_cover("w", (4, 8), [*quarters, ((0, 3), (7, 8))])
    with pytest.raises(WeightsError, match=r"tensor w: shard \[0:4, 4:9\] is outside its shape \(4, 8\)"):
        check_cover("w", (4, 8), [((0, 4), (4, 9))])
    with pytest.raises(WeightsError, match="outside its shape"):
        check_cover("w", (4, 8), [((0, 4),)])
    with pytest.raises(WeightsError, match="outside its shape"):
        check_cover("w", (4,), [((3, 1),)])


def test_overlaps_are_found_far_down_a_long_list() -> None:
    rows = [((i, i + 1), (0, 8)) for i in range(2500)]
    check_cover("w", (2500, 8), rows)
    with pytest.raises(WeightsError, match=r"\[2400:2401, 0:8\] and \[2300:2500, 7:8\] overlap"):
        check_cover("w", (2500, 8), [*rows[:2300], rows[2400], ((2300, 2500), (7, 8))])
    with pytest.raises(WeightsError, match=r"no shard holds \[1500:1501, 0:8\]"):
        check_cover("w", (2500, 8), [*rows[:1500], *rows[1501:]])


def test_scalars_and_tensors_without_elements() -> None:
    check_cover("s", (), [()])
    with pytest.raises(WeightsError, match=r"no shard holds \[\]"):
        check_cover("s", (), [])
    with pytest.raises(WeightsError, match="overlap"):
        check_cover("s", (), [(), ()])
    assert intersect((), ()) == () and volume(()) == 1 and covering((), [()]) == [()] and covering((), []) == []
    check_cover("e", (0, 4), [])
    check_cover("e", (0, 4), [((0, 0), (0, 2)), ((0, 0), (0, 4))])
    assert covering(((0, 0), (0, 2)), [((0, 0), (0, 4))]) == [((0, 0), (0, 2))]


def test_one_held_index_range_is_preferred_and_the_largest_share_goes_first() -> None:
    index_range = ((0, 4), (0, 8))
    halves = [((0, 4), (0, 4)), ((0, 4), (4, 8))]
    assert covering(index_range, [*halves, index_range]) == [index_range]
    assert covering(index_range, [*halves, ((0, 9), (0, 9))]) == [index_range]
    assert covering(index_range, [*halves, *halves]) == halves
    assert covering(index_range, [((0, 1), (0, 8)), *halves]) == halves  # the row would only cost a third request
    assert covering(((1, 3), (2, 6)), halves) == [((1, 3), (2, 4)), ((1, 3), (4, 6))]


@pytest.mark.numerics
def test_index_ranges_of_other_tensors_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"index ranges \[0:2\] and \[0:2, 0:2\] have different numbers"):
        intersect(((0, 2),), ((0, 2), (0, 2)))
    with pytest.raises(WeightsError, match=r"index range \[0:2, 0:2\] has 2 dimensions; expected 1"):
        covering(((0, 1),), [((0, 2), (0, 2))])
    assert not within(((0, 1),), ((0, 2), (0, 2)))
    assert describe(((0, 2), (4, 8))) == "[0:2, 4:8]" and describe(()) == "[]"


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 2)])
def test_one_device_owns_the_whole(shape: tuple[int, ...]) -> None:
    array = jax.numpy.ones(shape)
    for turn in (0, 5):
        ((index_range, data),) = owned_shards(array, turn)
        assert index_range == whole(shape) and data.shape == shape and isinstance(data, jax.Array)


def counted(shape: tuple[int, ...], index_ranges: list[IndexRange]) -> np.ndarray:
    """How many of the index ranges hold each element."""
    counts = np.zeros(shape, int)
    for index_range in index_ranges:
        counts[indexed(index_range)] += 1
    return counts


def indexed(index_range: IndexRange) -> tuple:
    return (*(slice(*ends) for ends in index_range), ...)
