"""Codes: words satisfy every check of the matrix written out; what is no LDPC code is refused."""

import numpy as np
import pytest

from mesh import UserError
from tests.benches.kernels.ldpc.codes import QuasiCyclicCode, make_code


def matrix(code: QuasiCyclicCode) -> np.ndarray:
    """Return the checks as a matrix of 0 and 1, from the definition of a shift."""
    found = np.zeros((len(code.shifts) * code.lift, code.columns * code.lift), np.int64)
    for row, shifts in enumerate(code.shifts):
        for column, shift in enumerate(shifts):
            for check in range(code.lift if shift >= 0 else 0):
                found[row * code.lift + check, column * code.lift + (check + shift) % code.lift] = 1
    return found


@pytest.mark.parametrize("lift", [27, 32])
def test_words_satisfy_all_checks_and_rows_of_the_matrix_share_at_most_one_bit(lift: int):
    code = make_code(lift)
    rng = np.random.default_rng(0)
    words = code.encode(rng.integers(0, 2, (12, 5, lift)))
    checks = matrix(code)
    flat = words.transpose(1, 0, 2).reshape(5, -1)
    assert not (flat @ checks.T % 2).any() and flat[:, : 12 * lift].any()
    np.fill_diagonal(shared := checks @ checks.T, 0)
    assert shared.max() == 1  # no cycle of four edges
    flipped = words.copy()
    flipped[3, 2, 1] ^= 1
    np.testing.assert_array_equal(
        code.syndrome(flipped).transpose(1, 0, 2).reshape(5, -1),
        flipped.transpose(1, 0, 2).reshape(5, -1) @ checks.T % 2,
    )


@pytest.mark.parametrize(
    ("shifts", "message"),
    [
        (((0, 1), (1, 0)), "fewer than columns"),
        (((0, 1, 2), (1, 0)), r"\[2, 3\] columns"),
        (((0, 1, 8), (1, 3, 0)), "expected -1 to 7"),
        (((0, -1, -1), (1, 3, 0)), "row 0 has fewer than two edges"),
        (((0, 1, -1), (1, 3, -1)), "column 2 has no edge"),
        (((0, 1, -1), (2, 3, 0)), r"rows \(0, 1\) and columns \(0, 1\) make a cycle of four"),
    ],
)
def test_what_is_no_code_is_refused(shifts, message: str):
    with pytest.raises(UserError, match=message):
        QuasiCyclicCode(shifts, 8)
    with pytest.raises(UserError, match="expected a larger one"):
        make_code(2, rows=3, columns=9)
