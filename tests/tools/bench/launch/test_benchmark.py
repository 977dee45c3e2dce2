"""The benchmark of launching: the plan of 1,024 chips here, whole runs with --full."""

import pytest

from tools.bench.launch import benchmark


@pytest.mark.full
def test_a_plan_of_1024_chips_is_measured() -> None:
    said: list[str] = []
    found = benchmark.measure(said.append, quick=True)
    assert found["plan_chips"] == 1024 and 0 < found["plan_s"] < found["dry_run_s"]
    assert said[0].startswith("plan of 1024 chips: ")
