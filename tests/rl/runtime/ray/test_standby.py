"""Warm processes that take over from the trainer and from workers: the same bits as undisturbed, without a restart."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from axlearn_like.config import ConfigError, to_text
from axlearn_like.run.directory import RunDirectory
from mesh import UserError
from rl.runtime.ray.runtime import run_ray
from rl.runtime.role_process import RoleProcess
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, slow, slower_share
from tests.rl.tiny import tiny_experiment

pytestmark = pytest.mark.timeout(900)  # half a dozen processes each: a busy machine needs long


class Killer:
    """SIGKILLs, one after the other, each two updates after a spare of the role is ready."""

    def __init__(self, path: Path, targets: list[str], last: int):
        self.path, self.left, self.last = path, list(targets), last
        self.killed: list[dict[str, Any]] = []
        self._seen: dict[str, int] = {}  # target -> step at which its spare was seen ready

    def __call__(self, step: int) -> None:
        assert step < self.last or not self.left, "no spare became ready in time"
        if not self.left:
            return
        target = self.left[0]
        spare = f"{target.partition('-')[0]}-spare-0"
        prepared = [row for row in events(self.path, "ready", "driver") if row["target"] == spare]
        before = sum(row["target"].partition("-")[0] == target.partition("-")[0] for row in self.killed)
        if len(prepared) > before and step >= self._seen.setdefault(f"{target} {before}", step) + 2:
            pid = events(self.path, "start", target)[-1]["pid"]
            os.kill(pid, signal.SIGKILL)
            self.killed.append({"target": self.left.pop(0), "pid": pid, "step": step})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "staleness"),
    [
        (["trainer", "worker-1"], 1),
        pytest.param(["trainer", "worker-0", "trainer", "trainer"], 0, marks=pytest.mark.full),
    ],
)
@pytest.mark.usefixtures("shared_session")
def test_a_spare_goes_on_where_a_killed_process_was(targets, staleness, tmp_path: Path, baseline) -> None:
    steps = 60 if len(targets) == 2 else 240
    # Spares import and compile while updates go on, however busy the machine is.
    cfg = slow(slower_share, num_steps=steps, staleness=staleness, standby={"trainer": 1, "worker": 1})
    cfg.trainer.checkpoint.set(save_every=1000)  # so that the disk has nothing
    killer, said = Killer(tmp_path, targets, steps), list[str]()
    with RunDirectory.open(tmp_path, to_text(cfg)) as run:
        assert run_ray(cfg.build(), run, lambda: False, killer, said.append) == steps
    assert_same_outcome(tmp_path, baseline(steps, staleness))
    takeovers = events(tmp_path, "takeover", "driver")
    assert [row["target"] for row in takeovers] == targets
    for kill, takeover in zip(killer.killed, takeovers, strict=True):
        begun = [row for row in events(tmp_path, "start", kill["target"]) if row["time"] >= takeover["time"]]
        assert begun[0]["pid"] not in (kill["pid"], os.getpid())
        assert begun[0]["time"] - takeover["time"] < 20, "it had built and compiled before"
    restored = events(tmp_path, "train_begin", "trainer")[1]["step"]
    assert restored >= killer.killed[0]["step"] - 2, "from memory: nothing is on disk"
    assert "takes over" in " ".join(said)


@pytest.mark.usefixtures("shared_session")
def test_a_trainer_that_was_replaced_calls_the_controller_in_vain(tmp_path: Path) -> None:
    cfg = tiny_experiment(evaluation=None)
    with RunDirectory.open(tmp_path, to_text(cfg)) as run:
        at = {"run_path": str(run.path), "token": "t", "grace": 1.0, "namespace": "n"}
        actor: Any = ray.remote(RoleProcess).remote(kind="controller", name="controller", **at)

        def call(term: int, method: str, *args: Any) -> Any:
            return ray.get(actor.call.remote(method, args, {}, "", term))

        call(1, "begin", 0, 0)
        call(2, "begin", 0, 0)
        with pytest.raises(UserError, match="trainer number 1 was replaced by number 2"):
            call(1, "published", 1)
        call(0, "join", "worker-0")
        assert call(2, "status")["workers"] == ["worker-0"]
        ray.kill(actor)


@pytest.mark.parametrize(
    ("standby", "changes", "expected"),
    [
        ({"trainer": 2}, {}, "at most 1"),
        ({"controller": 1}, {}, '"trainer" \\(at most 1\\) and "worker"'),
        ({"worker": -1}, {}, "counts of"),
        ({"trainer": 1}, {"trainer.processes": 2}, "a trainer of several processes"),
    ],
)
def test_where_nothing_can_take_over_is_refused(standby, changes, expected) -> None:
    cfg = tiny_experiment(standby=standby)
    if changes:
        cfg.trainer.set(processes=2, mesh={"fsdp": 2})
    with pytest.raises(ConfigError, match=f"standby.*{expected}"):
        cfg.check_fields()
    cfg = tiny_experiment(standby={"trainer": 1})
    with pytest.raises(ConfigError, match="standby.*inprocess"):
        cfg.check("inprocess")
