"""The file by which elastic workers find a run: private, with Ray's token unless the run was launched."""

import os
from pathlib import Path

import pytest

from axlearn_like.run.directory import RunDirectory
from rl.runtime.cluster_file import NODES_VARIABLE, advertise, cluster_path, read_cluster


@pytest.mark.parametrize("launched", [False, True])
def test_a_launched_run_keeps_its_token_out_of_its_storage(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.txt").write_text("")
    run = RunDirectory.attach(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hidden")
    if launched:
        monkeypatch.setenv(NODES_VARIABLE, "3")
    advertise(run, "10.0.0.1:6379", "mine")
    assert ("hidden" in cluster_path(run).read_text()) == (not launched)
    assert cluster_path(run).stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of my own")
    assert read_cluster(run) == {"address": "10.0.0.1:6379", "namespace": "mine"}
    assert os.environ["RAY_AUTH_TOKEN"] == ("of my own" if launched else "hidden")
