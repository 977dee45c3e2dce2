"""`axl bench kernels`: all kernels agree with float64, and the figures are complete."""

import pytest

from tests.bounds import within
from tools.bench.kernels import benchmark, values

pytestmark = pytest.mark.numerics


def test_a_wrong_value_is_an_error(monkeypatch: pytest.MonkeyPatch):
    wrong = {"right": lambda: [([2.0, 4.0], [2.0, 4.0])], "wrong": lambda: [([0.0], [0.0]), ([2.0, 4.5], [2.0, 4.0])]}
    monkeypatch.setattr(values, "CASES", wrong)
    result = benchmark.run([], lambda line: None)
    assert result["values"] == {"right": 0.0, "wrong": 0.125}
    assert (result["worst_error"], result["head_temp_ratio"], result["errors"]) == (0.125, None, {})


@pytest.mark.full
@pytest.mark.parametrize("name", values.CASES)
def test_kernels_agree_with_float64(name: str):
    assert within(values.error_of(name), 1e-6)


@pytest.mark.parametrize("name", ["page writer: heads of 80, a page larger than the chunk", "fp8 product"])
def test_quick_cases_agree_with_float64(name: str):
    assert within(values.error_of(name), 1e-6)
