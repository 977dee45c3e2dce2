"""The actor of a role sets the variables of its process before anything reads them; one that cannot start says why."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.protocol.timeouts import Timeouts
from rl.runtime.ray.actors import RoleActor
from rl.runtime.ray.remote_actors import RayActors
from rl.runtime.supervision.health import HealthMonitor
from tests.rl.runtime.ray.command import ROOT

SCRIPT = """
import gc, sys
from rl.runtime.ray.actors import RoleActor
early = "jax" in sys.modules
try:
    RoleActor({"JAX_PLATFORMS": "nowhere"}, b"not a pickle")
except Exception as error:
    print(early, type(error).__name__)
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
import jax
print(jax.config.jax_platforms)
try:
    RoleActor({"JAX_PLATFORMS": "elsewhere", "JAX_NUM_CPU_DEVICES": "3"}, b"not a pickle")  # in a fork, jax is there
except Exception:
    print(jax.config.jax_platforms, jax.config.jax_num_cpu_devices)
"""


@pytest.mark.slow
def test_the_variables_of_a_role_are_set_before_jax_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False UnpicklingError", "True True", "nowhere", "elsewhere 3"]


@pytest.mark.usefixtures("shared_session")
def test_a_role_whose_process_cannot_be_made_is_not_waited_for(tmp_path: Path) -> None:
    """An import that fails, on a node that lacks a package, say, fails at every start."""
    remote: Any = ray.remote  # its annotations do not know concurrency groups
    made = remote(concurrency_groups={"health": 1}, num_cpus=0, max_restarts=-1)(RoleActor)
    actor = made.remote({}, b"not a pickle")
    said: list[str] = []
    calls = RayActors(lambda kind, name: actor)
    monitor = HealthMonitor(
        calls, {"trainer": actor}, Timeouts.Config(), EventLog(tmp_path / "events.jsonl"), said.append
    )
    give_up = time.monotonic() + 60
    with pytest.raises(UserError, match=r"^trainer cannot start: .*UnpicklingError"):
        while time.monotonic() < give_up:
            monitor.check()
            time.sleep(0.05)


@ray.remote(num_cpus=0)
class Counter:
    """An actor that is called."""

    def __init__(self):
        self._count = 0

    def add(self) -> int:
        self._count += 1
        return self._count


@pytest.mark.usefixtures("shared_session")
def test_ray_keeps_no_record_of_the_calls_of_a_run() -> None:
    """`gcs_server` would keep 100,000: half a gigabyte."""
    counter: Any = Counter.remote()
    assert ray.get([counter.add.remote() for _ in range(20)])[-1] == 20
    time.sleep(2.0)  # by default they are reported each second
    assert ray.timeline() == []
    ray.kill(counter)
