"""The soft overlong penalty of DAPO at the points where its formula changes."""

import numpy as np
import pytest

from mesh.errors import UserError
from rl.objective import SoftOverlongPenalty


def test_equals_equation_13():
    shaping = SoftOverlongPenalty.Config(max_length=20, buffer=4).build()
    lengths = np.array([1, 16, 17, 18, 20, 25])
    got = shaping(np.ones(6), lengths)
    np.testing.assert_allclose(got, [1, 1, 0.75, 0.5, 0, 0])


@pytest.mark.parametrize("buffer", [0, 21])
def test_buffer_is_checked(buffer):
    with pytest.raises(UserError, match=f"buffer: expected 1 to max_length=20, got {buffer}"):
        SoftOverlongPenalty.Config(max_length=20, buffer=buffer).build()
