"""`axl bench tiers`: real figures of tiny jobs."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tools.bench.tiers import episodes
from tools.commands.bench import command

pytestmark = pytest.mark.full


def run(*options: str) -> tuple[int, Any]:
    done = CliRunner().invoke(command, ["tiers", "--quick", "--json", *options], standalone_mode=False)
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


def test_the_bench_of_episodes_brings_pages_back_and_draws_the_same():
    code, result = run("--sections", "episodes")
    assert code == 0 and result["identical"] is True
    assert result["pages_of_all"] >= 3 * result["pages_of_pool"]
    assert result["tokens_drawn"] == episodes.QUICK.episodes * episodes.QUICK.turns * episodes.QUICK.drawn
    by_engine = result["by_engine"]
    assert by_engine["host"]["tier_hits_host"] > 0 and by_engine["disk"]["tier_hits_disk"] > 0
    assert by_engine["host"]["prefill_tokens"] < by_engine["dropped"]["prefill_tokens"]
    assert 0 < result["cpu_ratio"] < 20 and 0 < result["disk_cpu_ratio"] < 20


def test_the_bench_of_moves_draws_the_same_tokens():
    code, result = run("--sections", "move")
    assert code == 0 and result["moved_tokens_identical"] is True
    assert result["moved_bytes"] > result["context"] * 1000
    assert 0 < result["move_ratio"] < 20
