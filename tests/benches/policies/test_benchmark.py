"""`axl bench policies`: sections by name, what is done before Ctrl-C, and real figures of a tiny job."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tests.benches.policies import benchmark
from tools.commands.bench import command


def run(*options: str) -> tuple[int, Any, str]:
    done = CliRunner().invoke(command, ["policies", *options], standalone_mode=False)
    lines = done.stdout.splitlines()
    return done.exit_code, json.loads(lines[-1]) if lines else None, str(done.exception)


def test_figures_that_are_done_stay_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch):
    def interrupted(quick: bool) -> dict[str, Any]:
        raise KeyboardInterrupt

    measures = {"a": lambda quick: {"one": 1.5, "quick": quick}, "b": interrupted, "c": lambda quick: {"three": 3}}
    monkeypatch.setattr(benchmark, "_MEASURES", measures)
    monkeypatch.setattr(benchmark, "SECTIONS", {"a": 1.0, "b": 2.0, "c": 3.0})
    code, result, _ = run("--quick", "--json")
    assert code == 130 and result["missing"] == ["b", "c"]
    assert (result["one"], result["quick"], "three" in result) == (1.5, True, False)
    code, result, _ = run("--sections", "c,a", "--json")
    assert code == 0 and (result["three"], result["quick"], result["missing"]) == (3, False, [])
    assert "no 'bb'; did you mean 'b'?; expected some of a, b, c" in run("--sections", "bb")[2]


@pytest.mark.full
def test_sections_of_the_service_give_their_figures():
    code, result, _ = run("--quick", "--json", "--sections", "slots,first_token,fairness")
    assert code == 0
    assert -0.5 < result["slots_overhead"] < 2
    assert 0 < result["first_token_median_s"] <= result["first_token_s"] < 30
    assert result["fairness_p95_ratio"] > 0
