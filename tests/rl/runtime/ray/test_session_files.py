"""Files of a Ray session: private to the user, and none left after a run that ended well."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rl.runtime.ray import session
from tests.rl.runtime.ray.command import ROOT

SCRIPT = """
import json, os
from rl.runtime.ray.session import ray_session, session_folder
import psutil, ray
with ray_session() as own:
    folder = ray.get_runtime_context().worker.node.get_session_dir_path()
    children = psutil.Process().children()
    [raylet] = [child for child in children if child.name() == "raylet"]
    others = [child.cmdline() for child in children if child.name() not in ("raylet", "gcs_server")]
    others += [child.cmdline() for child in raylet.children() if "no_agent" not in " ".join(child.cmdline())]
    shown = " ".join(raylet.cmdline())
    token = os.environ["RAY_AUTH_TOKEN"]
    facts = {"own": own, "inside": folder.startswith(str(session_folder())), "open": os.path.isdir(folder),
             "others": others, "shown": token in shown, "passed": raylet.environ().get("RAY_AUTH_TOKEN") == token}
print(json.dumps({**facts, "left": os.path.exists(folder)}))
"""


@pytest.mark.slow
def test_the_token_is_in_no_file_and_the_session_is_removed(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts.pop("others") == []  # of Ray's own processes, nothing that only a dashboard or an autoscaler needs
    assert facts == {"own": True, "inside": True, "open": True, "shown": False, "passed": True, "left": False}
    assert not (tmp_path / ".ray").exists()
    assert stat.S_IMODE(session.session_folder().parent.stat().st_mode) == 0o700


def test_of_sessions_that_ended_in_an_error_the_newest_are_kept(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for day in range(10, 20):
        (tmp_path / f"session_2026-01-{day}_00-00-00_000000_{gone.pid}" / "logs").mkdir(parents=True)
    active = tmp_path / f"session_2026-01-01_00-00-00_000000_{os.getpid()}"
    active.mkdir()
    session._remove_old_sessions(tmp_path)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept[0] == active.name and [name[16:18] for name in kept[1:]] == ["16", "17", "18", "19"]
