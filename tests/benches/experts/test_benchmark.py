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
    for name in ("samples_vs_restart", "samples_vs_uniform", "zebra_ratio", "asymmetric_ratio"):
        assert result[name] is None and name in result["not_measured"]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_an_elastic_trainer_loses_no_step_and_no_bit_where_a_restart_does():
    code, result = run("--sections", "elastic")
    assert code == 0 and result["elastic_identical"] is True and result["elastic_compared_steps"] > 5
    assert result["elastic_steps_lost"] == 0 and len(result["shrunk_s"]) == 1
    assert result["samples_vs_restart"] is not None and result["samples_vs_uniform"] > 1
    assert result["spread_identical"] is True and result["spread_steps_lost"] == 0


@pytest.mark.full
def test_an_engine_with_replicas_has_the_bits_of_one_without():
    code, result = run("--sections", "engine")
    assert code == 0 and result["engine_identical"] is True
    assert 1 <= result["engine_busiest_to_mean"] < result["engine_busiest_to_mean_without"]


@pytest.mark.full
def test_training_is_measured():
    code, result = run("--sections", "training")
    assert code == 0 and result["identical"] is True and result["loss_difference"] < 1e-4


@pytest.mark.full
def test_two_groups_of_devices_overlap_and_experts_that_move_make_them_even():
    code, result = run("--sections", "zebra")
    assert code == 0 and "zebra_ratio" not in result["not_measured"], result
    # By stated times, which other work on the machine lengthens little.
    assert 1.4 < result["zebra_ratio"] <= 2.0 and 1.03 < result["asymmetric_ratio"] < 4 / 3.4
    assert 0.6 < result["zebra_ratio_computed"] < 2.0 and result["zebra_ratio"] <= result["zebra_ratio_planned"] * 1.05
