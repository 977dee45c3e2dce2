"""`axl bench tiers`: real figures of tiny jobs."""

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.benches.tiers import episodes
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


def test_the_bench_of_codecs_compares_at_equal_error():
    pytest.importorskip("av")
    code, result = run("--sections", "codecs")
    assert code == 0 and result["policy"] == "demo"
    for rows in result["bits"].values():
        bits = [row["ecsq"] for row in rows.values()]
        assert bits == sorted(bits)  # errors fall
        for asked, row in rows.items():
            assert 0 < row["error"] <= float(asked) * 1.01
            assert row["ecsq"] > np.log2(1 / row["error"]) / 4 and row["rtn"] > 1
    main = result["bits"]["keys"]["0.01"]
    assert result["hevc_to_ecsq_bits"] == pytest.approx(main["hevc"] / main["ecsq"], abs=2e-3)
    assert result["same_tokens"]["raw"] == 1.0 and min(result["same_tokens"].values()) > 0.8
