"""The bench of kernels: all its sections on tiny sizes, stages that add up, and an implementation that is wrong."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from mesh import UserError
from tests.benches.kernels.registry import HOST, STAGES, Implementation, errors, sweep
from tests.benches.kernels.workloads import WORKLOADS
from tools.commands.bench import command


def test_an_implementation_that_is_wrong_has_no_times():
    workload = WORKLOADS["low_rank"]
    right = workload.by["numpy"].run
    wrong = dataclasses.replace(workload, by={"near": Implementation(HOST, lambda *given: right(*given) * 1.0001)})
    with pytest.raises(UserError, match="near is 0.0001 from float64; expected at most 8e-06"):
        errors(wrong, 16)
    assert errors(dataclasses.replace(workload, by={"numpy": workload.by["numpy"]}), 16)["numpy"] < 1e-6


@pytest.mark.slow
def test_stages_add_up_and_crossovers_are_sizes():
    found = sweep(WORKLOADS["grouped"], (16, 64), 2)
    for row in found["stages"].values():
        for one in row.values():
            assert one["total"] == pytest.approx(sum(one[stage] for stage in STAGES))
        assert row["numpy"]["copy_in"] < row["xla"]["copy_in"] and row["xla"]["launch"] > 0
    assert found["xla"]["crossover"] in (None, 16, 64)


@pytest.mark.full
def test_all_sections_run():
    done = CliRunner().invoke(command, ["kernels", "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    figures = json.loads(done.output.splitlines()[-1])
    assert set(figures["errors_of"]) == set(WORKLOADS) and figures["missing"] == []
    assert set(figures["errors_of"]["ldpc"].values()) == {0.0}
    assert all(row["min_sum"] < row["undecoded"] for row in figures["bit_errors"].values())
