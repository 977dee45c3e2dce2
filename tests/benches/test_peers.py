"""Environments of the peers: made once, on an interpreter that works, and errors that say why."""

import sys
from pathlib import Path

import pytest

from mesh import UserError
from tests.benches import peers
from tests.benches.peers import (
    Environment,
    EnvironmentFailed,
    ensure_environment,
    find_interpreter,
    find_peers,
    peers_of,
)

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_peers_are_found_for_the_benchmark_they_take_part_in() -> None:
    assert [peer.name for peer in find_peers(["transformers", "tunix", "tunix"], "rollout")] == [
        "transformers",
        "tunix",
    ]
    assert set(peers_of("grpo_step")) == {"tunix", "trl"}
    assert set(peers_of("train_step")) == {"maxtext"}
    with pytest.raises(UserError, match="grpo_step has no peer 'tunics'; did you mean 'tunix'"):
        find_peers(["trl", "tunics"], "grpo_step")
    with pytest.raises(UserError, match="rollout has no peer 'trl'; known: transformers, tunix"):
        find_peers(["trl"], "rollout")


def test_every_script_is_there() -> None:
    folder = peers.WORKERS
    benchmarks = "grpo_step", "rollout", "train_step"
    scripts = {script for one in benchmarks for peer in peers_of(one).values() for script in peer.scripts.values()}
    assert len(scripts) == 5
    assert {script for script in scripts if not (folder / script).is_file()} == set()


def test_environment_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    no_python = Environment("old", pythons=("3.99",), requirements=())
    with pytest.raises(EnvironmentFailed, match=r"old: needs Python 3\.99.*pyenv install 3\.99"):
        ensure_environment(no_python, lambda _: None, tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EnvironmentFailed, match="cannot write to .*file"):
        ensure_environment(no_python, lambda _: None, blocked / "peers")


@pytest.mark.full
def test_environment_is_made_once_and_again_after_a_failure(tmp_path: Path) -> None:
    wheel = str(tmp_path / "absent-1.0-py3-none-any.whl")
    broken = Environment("peer", (HERE,), requirements=(wheel,))
    with pytest.raises(EnvironmentFailed, match="(?s)peer: .*pip install.* failed.*absent"):
        ensure_environment(broken, lambda _: None, tmp_path)
    said: list[str] = []
    peer = Environment("peer", (HERE,), requirements=())
    python = ensure_environment(peer, said.append, tmp_path)
    assert python.exists() and len(said) == 1
    assert ensure_environment(peer, said.append, tmp_path) == python
    assert len(said) == 1  # found complete


def test_interpreter_that_exists_but_refuses_to_run_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "python3.98"
    shim.write_text("#!/bin/sh\necho 'version not selected' >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    _, version = find_interpreter(["3.98", HERE])
    assert version == HERE
