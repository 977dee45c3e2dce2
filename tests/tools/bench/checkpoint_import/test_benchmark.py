"""`axl bench import --quick`: everything runs, and the figures are those of what was done."""

import json

from tools.cli import main


def test_quick(tmp_path, capsys):
    assert main(["bench", "import", "--quick", "--folder", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["model"] == "tiny" and result["rounds"] == 1 and not result["errors"]
    assert 1.4e6 < result["bytes"] < 2e6
    assert result["ratio_to_raw_read"] > 0 and 0.05 < result["peak_rss_gb"] < 4
    assert result["import_cpu_s"] > 0 and not list(tmp_path.iterdir())
