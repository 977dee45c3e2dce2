"""`axl bench import --quick`: everything runs, and the figures are those of what was done."""

import json

import pytest

from tools.cli import main


@pytest.mark.full
def test_quick(tmp_path, capsys):
    assert main(["bench", "import", "--quick", "--folder", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["model"] == "tiny" and result["rounds"] == 1 and not result["errors"]
    assert 1.4e6 < result["bytes"] < 2e6
    assert result["ratio_to_raw_read"] > 0 and 0.05 < result["peak_rss_gb"] < 4
    linked = result["linked"]
    assert linked["ratio_to_raw_read"] > 0 and len(linked["ratios"]) == 1 and 0.05 < linked["peak_rss_gb"] < 4
    assert result["import_cpu_s"] > 0 and not list(tmp_path.iterdir())


@pytest.mark.full
def test_first_token_quick(capsys):
    """Two starts of a server: the first compiles, the second finds its programs; both answer the same token."""
    assert main(["bench", "first_token", "--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["model"] == "tiny" and result["same_token"] and not result["errors"]
    ours, cold = result["ours"], result["cold"]
    assert 0 < ours["import_cpu_s"] + ours["serve_cpu_s"] < cold["cpu_s"] and ours["request_s"] < ours["wall_s"]
