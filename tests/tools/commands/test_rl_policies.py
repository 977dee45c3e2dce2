"""`axl rl add`, `stop` and `resume`: what is said, what is refused, and with which status."""

from pathlib import Path

import pytest

from axlearn_like.config import to_text
from axlearn_like.run.directory import RunDirectory
from rl.runtime.policies.changes import read_changes
from tests.rl.runtime.policies.tiny_policies import tiny_policies
from tools.cli import EXIT_USER_ERROR, main

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """The directory of a run of two policies that has been stopped."""
    opened = RunDirectory.open(tmp_path / "sweep", to_text(tiny_policies({"seed=0": {}, "seed=1": {"seed": 1}})))
    opened.close()
    return opened


def test_a_policy_is_added_stopped_and_resumed(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(run.path)
    for words in (["add", path, "seed=2", "--set", "seed=2"], ["stop", path, "seed=0"], ["resume", path, "seed=0"]):
        assert main(["rl", *words]) == 0
        assert capsys.readouterr().out.endswith("at the next `axl rl` of this run, which does not run now\n")
    found = read_changes(run)
    assert found.joined == {"seed=2": {"seed": "2"}}
    assert {name: (one.number, one.stopped) for name, one in found.last.items()} == {
        "seed=2": (1, False),
        "seed=0": (3, False),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "{run}", "seed=2", "--set", "seed"], "--set 'seed': expected PATH=VALUE, and each path once"),
        (["add", "{run}", "seed=2", "--set", "seed=2", "--set", "seed=3"], "--set 'seed=3': expected PATH=VALUE"),
        (["add", "{run}", "seed=1"], "policy 'seed=1' is one of the run's, and trains; expected another name"),
        (["stop", "{run}", "seed=9"], "has no policy 'seed=9'; did you mean"),
        (["resume", "{run}", "seed=0"], "policy 'seed=0' trains; expected one that was stopped, or has failed"),
        (["stop", "{run}"], "Missing argument 'NAME'"),
        (["stop", "{run}x", "seed=0"], "no such directory; expected a run directory"),
        (["add", "{run}/policies", "seed=2"], "no such directory; expected a run directory"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    run: RunDirectory, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", *(word.format(run=run.path) for word in words)]) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err
    assert not read_changes(run).last
