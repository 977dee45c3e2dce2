"""The benchmark of episodes runs, and its figures are there."""

import json

import pytest
from click.testing import CliRunner

from tools.commands.bench import command


@pytest.mark.full
def test_waiting_episodes_leave_their_rows_and_keep_their_prefixes():
    result = CliRunner().invoke(command, ["episodes", "--quick", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    figures = json.loads(result.output.splitlines()[-1])
    assert figures["overlap_ratio"] > 1.2
    assert figures["prefix_reuse"] >= 0.95
