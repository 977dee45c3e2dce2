"""`axl bench experts`: real figures of tiny jobs, and nulls for what is not measured."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tools.commands.bench import command


def run(*options: str) -> tuple[int, Any]:
    done = CliRunner().invoke(command, ["experts", "--quick", "--json", *options], standalone_mode=False)
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


def test_plans_balance_devices_and_what_is_not_measured_is_null():
    code, result = run("--sections", "plans")
    assert code == 0 and result["busiest_to_mean"] <= 1.05 < result["busiest_to_mean_without"]
    assert result["samples_vs_restart"] is None and "samples_vs_restart" in result["not_measured"]


@pytest.mark.full
def test_training_and_schedules_are_measured():
    code, result = run("--sections", "training,zebra")
    assert code == 0 and result["identical"] is True and result["loss_difference"] < 1e-4
    assert 1 < result["zebra_ratio_as_measured"] < 2 and 1 < result["zebra_ratio"] < 2
