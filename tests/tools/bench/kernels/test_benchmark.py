"""`axl bench kernels`: all kernels agree with float64, and the figures are complete."""

import pytest

from tools.bench.kernels import benchmark, values


def test_a_wrong_value_is_an_error(monkeypatch: pytest.MonkeyPatch):
    wrong = {"right": lambda: [([2.0, 4.0], [2.0, 4.0])], "wrong": lambda: [([0.0], [0.0]), ([2.0, 4.5], [2.0, 4.0])]}
    monkeypatch.setattr(values, "CASES", wrong)
    result = benchmark.run([], lambda line: None)
    assert result["values"] == {"right": 0.0, "wrong": 0.125}
    assert (result["worst_error"], result["head_temp_ratio"], result["errors"]) == (0.125, None, {})


@pytest.mark.full
def test_kernels_agree_with_float64():
    found = values.errors()
    assert len(found) == len(values.CASES)
    assert max(found.values()) < 1e-6
