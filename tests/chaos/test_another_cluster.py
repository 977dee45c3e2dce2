"""A Ray cluster of another user on the same machine: ours starts beside it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.benches.recovery.run import ROOT

SESSION = "from rl.runtime.ray.session import ray_session\nwith ray_session():\n    print('started')\n"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_starts_beside_a_cluster_that_was_started_by_hand() -> None:
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as place:  # sockets need a short path
        environ = {**os.environ, "RAY_TMPDIR": place, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        start = "from ray.scripts.scripts import main; main()"
        options = ["start", "--head", "--block", "--port=0", "--num-cpus=1", "--include-dashboard=false"]
        theirs = subprocess.Popen(
            [sys.executable, "-c", start, *options, "--node-ip-address=127.0.0.1"],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            give_up = time.monotonic() + 200
            while not list(Path(place).rglob("ray_current_cluster")):
                assert theirs.poll() is None and time.monotonic() < give_up
                time.sleep(0.2)
            ours = subprocess.run(
                [sys.executable, "-c", SESSION],
                cwd=ROOT,
                env=environ,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
        finally:
            os.killpg(theirs.pid, signal.SIGTERM)
            theirs.wait(60)
        assert ours.returncode == 0 and "started" in ours.stdout, ours.stderr[-500:]
