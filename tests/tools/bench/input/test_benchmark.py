"""The benchmark of the input runs, and tells apart what differs."""

import json

import pytest
from click.testing import CliRunner

from tools.bench.input import benchmark as input_speed
from tools.commands.bench import command


def test_every_case_is_measured():
    result = input_speed.run(documents=300, seq_len=1024, batch_size=16, batches=2)
    assert result["tokenise_tokens_per_cpu_s"] > 0
    packing = {name: result[name]["packing"] for name in input_speed.CASES}
    assert packing["one_a_row"] < packing["first_fit"] < packing["first_fit_decreasing"] <= 1
    assert packing["first_fit_1_host_of_16"] == packing["first_fit"]


@pytest.mark.full
def test_the_command_prints_a_table_or_json():
    shown = CliRunner().invoke(command, ["input", "--documents", "50"])
    assert shown.exit_code == 0 and "first_fit_1_host_of_16" in shown.output
    told = CliRunner().invoke(command, ["input", "--documents", "50", "--json"])
    assert json.loads(told.stdout)["documents"] == 50
