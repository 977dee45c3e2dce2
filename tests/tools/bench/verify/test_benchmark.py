"""The benchmark of verifiers runs, and its figures are there."""

import json

import pytest
from click.testing import CliRunner

from rl.verification.sandbox.attacks import ATTACKS
from tools.commands.bench import command


@pytest.mark.full
def test_all_parts_are_measured():
    result = CliRunner().invoke(command, ["verify", "--quick", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    figures = json.loads(result.output.splitlines()[-1])
    for walls in (figures, figures["without_namespaces"]):
        if "refused" in walls:
            continue
        assert walls["attacks_survived"] == walls["attacks"] == len(ATTACKS) >= 110
        results = walls["attack_results"]
        assert list(results) == list(ATTACKS) and not any(one["through"] for one in results.values())
        assert {results[name]["outcome"] for name, attack in ATTACKS.items() if attack.hangs} == {"timeout"}
        assert all(one["seconds"] > 0 and isinstance(one["error"], str) for one in results.values())
    assert not any(figures["self_test_mistakes"].values())
    for name in ("math_per_second", "math_of_numbers_per_second", "python_tests_per_second", "reap_seconds_max"):
        assert figures[name] > 0
