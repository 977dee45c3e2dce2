"""A member of a tiny elastic run, which may kill itself at a chosen point.

python -m tests.axlearn_like.elastic.process RUN_DIR STEPS

FAULTS: JSON, member index -> [point, number]: the point's call of that number kills the process, in its first life.
At step `MEET` all wait for those that FAULTS names to come back; three steps later, too, for one that dies by a return.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.elastic.elastic import Elastic
from axlearn_like.elastic.member import Member
from axlearn_like.elastic.supervisor import VARIABLE
from axlearn_like.elastic.update import ElasticStep
from axlearn_like.input import SupervisedInput
from axlearn_like.training.trainer import Trainer
from mesh.programs.compilation import enable_compilation_cache
from tests.axlearn_like.tiny import Counting, tiny_trainer

POINTS: dict[str, tuple[type, str]] = {
    "gradients": (ElasticStep, "_part"),
    "exchange": (Member, "_send"),
    "sums": (Member, "take"),
    "update": (ElasticStep, "_sums"),
    "resize": (Member, "agree"),
    "offer": (ElasticStep, "offer"),
    "fetch": (Member, "fetch"),
}


def config(steps: int) -> Trainer.Config:
    cfg = tiny_trainer(steps, evaluators=(Meeting.Config(),), elastic=Elastic.Config(parts=8, silence=20.0))
    cfg.input = SupervisedInput.Config(source=Counting.Config(), seq_len=16, batch_size=8)
    cfg.checkpoint.set(asynchronous=False)
    return cfg


MEET = 20


class Meeting(Configurable):
    """An evaluator that waits at two steps until all processes that were to die before are back."""

    class Config(ConfigBase["Meeting"]):
        every: int = 1

    def __init__(self, cfg: Config, *, graphdef: Any, loss: Any):
        del graphdef, loss
        self.every, self.averaged = cfg.every, False

    def run(self, params: Any, step: int) -> dict[str, float]:
        del params
        if step in (MEET, MEET + 3) and "FAULTS" in os.environ:
            run, deadline = Path(os.environ["RUN"]), time.monotonic() + 240
            faults = json.loads(os.environ["FAULTS"])
            expected = [run / f"back-{index}" for index in faults if step > MEET or faults[index][0] != "offer"]
            while not all(path.exists() for path in expected) and time.monotonic() < deadline:
                time.sleep(0.05)
        return {}


def kill_at(kind: type, name: str, number: int) -> None:
    """Let the call of this number of a method kill the process; of `agree`, only calls that take part in a change."""
    method, calls = getattr(kind, name), 0

    def killing(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += name != "agree" or (self.changed and bool(args[0]))
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *args, **options)

    setattr(kind, name, killing)


def live(run: str, points: dict[str, tuple[type, str]]) -> None:
    """Begin a life of this member: the first ends at its point of FAULTS, the second tells that it is back."""
    index = json.loads(os.environ[VARIABLE])["index"]
    fault = json.loads(os.environ.get("FAULTS", "{}")).get(str(index))
    once = Path(run) / f"fault-{index}"
    if once.exists():  # the second life
        join = Member.join

        def joined(self: Member) -> None:
            join(self)
            (Path(run) / f"back-{index}").touch()

        Member.join = joined
    elif fault:
        once.touch()
        kill_at(*points[fault[0]], fault[1])
    enable_compilation_cache()


def main(run: str, steps: str) -> None:
    live(run, POINTS)
    config(int(steps)).build().run(run, progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
