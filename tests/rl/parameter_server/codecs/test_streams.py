import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.parameter_server.codecs.streams import StreamReader, StreamWriter

U32 = np.dtype(np.uint32)


@given(st.lists(st.one_of(st.integers(0, 260), st.integers(0, 2**32 - 1)), max_size=60), st.integers(1, 70))
@settings(max_examples=100, deadline=None)
def test_round_trip(values: list[int], at_once: int) -> None:
    writer, array = StreamWriter(U32), np.array(values, np.int64)
    for first in range(0, len(values), at_once):
        writer.put(array[first : first + at_once])
    assert writer.count == len(values)
    parts = list(StreamReader(memoryview(writer.frame()), len(values), U32).some(np.int64, 7))
    assert [len(part) for part in parts[:-1]] == [7] * (len(parts) - 1)
    assert [int(value) for part in parts for value in part] == values


@pytest.mark.parametrize("count", [0, 2, 4, 2**62])
def test_another_count_is_refused(count: int) -> None:
    writer = StreamWriter(U32)
    writer.put(np.array([3, 255, 70_000]))
    with pytest.raises(ValueError):
        StreamReader(memoryview(writer.frame()), count, U32)


def test_a_frame_that_promises_too_much_is_refused_before_it_is_unpacked() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(ValueError, match="cannot be 1000 changes"):
        StreamReader(memoryview(frame), 1000, U32)
