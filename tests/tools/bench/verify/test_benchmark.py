"""Attacks on the sandbox of this machine, as the command runs them."""

import json

import pytest
from click.testing import CliRunner

from rl.verification.sandbox.attacks import ATTACKS
from tools.commands.bench import command


@pytest.mark.full
def test_each_attack_fails_and_hangs_are_reaped():
    result = CliRunner().invoke(command, ["verify", "--json"], catch_exceptions=False)
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
    assert figures["reap_seconds_max"] > 0
