"""The benchmark of servers: its figures are those of the worst pass, and a real server gives them."""

import json

import pytest
from click.testing import CliRunner

from tools.bench.rollout.serving.benchmark import figures
from tools.commands.bench import command


def made(at_once: int, seconds: float, first: float = 0.1) -> dict[str, object]:
    return {"at_once": at_once, "tokens": 60, "seconds": seconds, "cpu_s": 2.0, "first_s": [first], "all_s": [seconds]}


def test_the_worst_pass_counts_and_the_first_request_is_compared_with_later_ones():
    found = figures([made(1, 9.0), made(1, 2.0), made(8, 1.0, 0.7), made(1, 4.0), made(8, 0.5), made(1, 3.0)])
    assert found["tokens_per_s"] == {"1": 15.0, "8": 60.0} and found["median_tokens_per_s"] == {"1": 20.0, "8": 90.0}
    assert found["tokens_per_cpu_s"] == {"1": 30.0, "8": 30.0}
    assert found["first_request_ratio"] == 3.0
    assert found["p50_first_token_s"] == 0.1 and found["p99_first_token_s"] == found["slowest_first_token_s"] == 0.7


@pytest.mark.full
def test_a_server_is_started_and_loaded():
    result = CliRunner().invoke(
        command, ["serve", "--quick", "--json", "--warmup", "background"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    assert set(found["tokens_per_s"]) == {"1", "8"} and min(found["tokens_per_s"].values()) > 0
    assert found["cached_startup_cpu_s"] < found["startup_cpu_s"] and found["first_request_ratio"] > 0
