"""The file by which elastic workers find a run: private, with Ray's token unless the run was launched."""

import os
from pathlib import Path

import pytest

from axlearn_like.config import ConfigError
from axlearn_like.config.consent import VARIABLE as CONSENT
from axlearn_like.run.directory import RunDirectory
from mesh import UserError
from rl.runtime.cluster_file import NODES_VARIABLE, advertise, cluster_path, read_cluster


@pytest.mark.parametrize("launched", [False, True])
def test_a_launched_run_keeps_its_token_out_of_its_storage(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.txt").write_text("")
    run = RunDirectory.attach(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(CONSENT, "")
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


def test_a_strangers_file_does_not_lead_to_a_cluster_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ray unpickles what a cluster sends; and our token, or one that the file gives, would be sent there."""
    (tmp_path / "config.txt").write_text("")
    run = RunDirectory.attach(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(CONSENT, "")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of my own")
    cluster_path(run).write_text('{"address": "203.0.113.5:6379", "namespace": "x", "token": "theirs"}')
    with pytest.raises(ConfigError, match=r"can run code in this process.*--allow ray:203\.0\.113\.5:6379"):
        read_cluster(run)
    assert os.environ["RAY_AUTH_TOKEN"] == "of my own"
    monkeypatch.setenv(CONSENT, "ray:203.0.113.5:6379")
    assert read_cluster(run)["address"] == "203.0.113.5:6379"
    monkeypatch.setenv(CONSENT, "")
    cluster_path(run).write_text('{"address": "127.0.0.1:6379", "namespace": "x", "token": null}')
    assert read_cluster(run)["address"] == "127.0.0.1:6379"


HOSTILE = ["", "[]", "{}", "[" * 100_000, '{"address": 3, "namespace": "a", "token": null}']
HOSTILE += [
    '{"address": "ray://h:1", "namespace": "a", "token": null}',
    '{"address": "h:1", "namespace": [], "token": null}',
]
HOSTILE += [
    '{"address": "h:1", "namespace": "a", "token": "a\\nb"}',
    '{"address": "h:1\\n", "namespace": "a", "token": 1}',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_file_with_something_else_in_it_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(NODES_VARIABLE, raising=False)
    (tmp_path / "config.txt").write_text("")
    run = RunDirectory.attach(tmp_path)
    cluster_path(run).write_text(text)
    cluster_path(run).chmod(0o600)
    with pytest.raises(UserError, match="cluster.json: expected JSON with address"):
        read_cluster(run)


def test_a_file_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(NODES_VARIABLE, raising=False)
    (tmp_path / "config.txt").write_text("")
    run = RunDirectory.attach(tmp_path)
    cluster_path(run).write_text('{"address": "127.0.0.1:1", "namespace": "a", "token": "of another"}')
    cluster_path(run).chmod(0o666)
    with pytest.raises(UserError, match="with mode 666; expected a file that you or root alone can write"):
        read_cluster(run)
    assert os.environ.get("RAY_AUTH_TOKEN") != "of another"
