"""The benchmark of adapters runs, and many in one batch cost less than one after another."""

import pytest

from tools.bench.adapters import benchmark


@pytest.mark.full
def test_a_batch_of_adapters_costs_less_than_a_loop():
    result = benchmark.run(1, adapters=8, width=128, new=4)
    assert result["speedup_over_loop"] > 2 and result["overhead_to_base"] > -0.5
    assert result["cpu_s"].keys() == result["wall_s"].keys() == {"base", "mixed", "loop"}
