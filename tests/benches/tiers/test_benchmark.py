"""`axl bench tiers`: real figures of tiny jobs."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.benches.tiers import episodes, link, plot
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
    assert code == 0 and {name.split(": ")[0] for name in result["bits"]} == {"demo", "larger"}
    for name, rows in result["bits"].items():
        assert rows["int8"]["int8"] > 8 and rows["bf16"]["error"] < 1e-4
        asked = {error: row for error, row in rows.items() if "ecsq" in row}
        bits = [row["ecsq"] for row in asked.values()]
        assert bits == sorted(bits)  # errors fall
        for error, row in asked.items():
            assert row["error"] <= max(float(error), 0.01) * 1.01 and row["rtn"] > 1  # eight bits have a floor
            if name.endswith(("keys", "values", "weights")):
                assert row["ecsq"] > np.log2(1 / row["error"]) / 4
    main = result["bits"]["demo: keys"]["0.01"]
    assert result["hevc_to_ecsq_bits"] == pytest.approx(main["hevc"] / main["ecsq"], abs=2e-3)
    for rows in result["changes"].values():
        by_codec = {f"{row['codec']} {row['of']}": row for row in rows}
        assert by_codec["raw pages"]["same_greedy"] == 1.0 and by_codec["raw pages"]["kl"] < 1e-6
        assert by_codec["ecsq:0.03 weights"]["kl"] > by_codec["ecsq:0.001 weights"]["kl"] > 0
    assert "<svg" in plot.draw(result["bits"])


def test_the_bench_of_a_link_pulls_fewer_bytes_by_codecs():
    code, result = run("--sections", "link")
    assert code == 0
    nbytes = {codec: row["nbytes"] for codec, row in result["first_rollout"].items()}
    assert nbytes["raw"] == 2 * result["first_rollout_parameters"]
    assert nbytes["raw"] > 1.8 * nbytes["int8"] > 1.8 * nbytes["ecsq:0.01"] > 0
    assert nbytes["delta"] < nbytes["raw"] / 10


def test_ctrl_c_in_a_pull_leaves_the_codecs_that_were_measured(monkeypatch: pytest.MonkeyPatch):
    first, calls = link.first_rollout, itertools.count()

    def until_the_fifth(*arguments: Any, **how: Any) -> tuple[float, int]:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return first(*arguments, **how)

    monkeypatch.setattr(link, "first_rollout", until_the_fifth)
    _, result = run("--sections", "link")
    assert result["missing"] == ["link"] and result["first_rollout"]["raw"]["nbytes"] > 0
    assert result["first_rollout_by_codec"] == {"raw": 1.0}
