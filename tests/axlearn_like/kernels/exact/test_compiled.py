"""Products compiled for TPUs: XLA cuts the depth by the number of rows, and one kernel of fixed order serves all."""

import pytest

from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_the_order_of_xla_depends_on_the_rows_and_that_of_the_kernel_does_not(topology: str):
    found = elsewhere(compare, topology, environ=TPU_COMPILER, timeout=400)
    steps = {figures["xla_depth_steps"] for figures in found["rows"].values()}
    assert len(steps) > 1 and None not in steps
    assert found["texts"] == {"exact_matmul": 1, "exact_row_sums": 1}


def compare(topology: str) -> dict[str, object]:
    """Compile in a process of its own."""
    from tools.bench.kernels import fixed_order

    return fixed_order.compare(topology)
