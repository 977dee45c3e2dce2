"""`axl bench episodes`: real figures of tiny jobs."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tools.commands.bench import command


def run(*options: str) -> tuple[int, Any]:
    done = CliRunner().invoke(command, ["episodes", *options], standalone_mode=False)
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_waiting_episodes_leave_their_rows_and_keep_their_prefixes() -> None:
    code, result = run("--quick", "--sections", "tools", "--json")
    assert code == 0 and result["tools"]["overlap_ratio"] > 1.2 and result["tools"]["prefix_reuse"] >= 0.95


@pytest.mark.full
def test_tools_that_run_ahead_change_no_bit_and_aborted_calls_save_tokens() -> None:
    code, result = run("--quick", "--sections", "partial", "--json")
    assert code == 0 and result["partial"]["identical"] is True and result["partial"]["python_calls_ahead"] > 0
    assert 0 < result["partial"]["abort_saved"] < 1 and 0.3 < result["partial"]["latency_bound"] <= 1


@pytest.mark.full
def test_plans_have_shorter_critical_paths_in_parallel() -> None:
    code, result = run("--quick", "--sections", "graph", "--json")
    assert code == 0 and set(result["graph"]) >= {"critical_path_ratio", "pipelined_ratio", "accuracy_over_flat"}


@pytest.mark.full
def test_critical_paths_of_plans_are_measured_before_and_after_rl() -> None:
    code, result = run("--quick", "--sections", "plans", "--json")
    found = result["plans"]
    assert code == 0 and set(found) >= {"path_ratio", "path_change", "accuracy_change", "one_by_one_ratio"}
    assert set(found["seed_0"]) == {"before", "after", "flat"} and 0 <= found["seed_0"]["after"]["refused"] <= 1


@pytest.mark.full
def test_agents_reuse_texts_and_say_how_far_that_is_from_computing_them() -> None:
    code, result = run("--quick", "--sections", "agents", "--json")
    found, records = result["agents"], result["agents"]["records"]
    assert code == 0 and records["dense"]["kl"] == 0 and found["exact_reuse"] > 0.5
    assert records["rotation"]["reused_requests"] == 1 and found["kl_of_rotation"] > 0
    assert 0 <= found["reuse"] <= 1 and set(found) >= {"ttft_ratio", "accuracy_over_dense", "kl_to_dense", "free_texts"}
