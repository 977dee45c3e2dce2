"""A member of a tiny elastic run with spread experts, which may kill itself at a chosen point.

python -m tests.axlearn_like.training.updates.spread.process RUN_DIR STEPS

FAULTS: JSON, member index -> [point, number]: the point's call of that number kills the process, in its first life.
Before step `MEET` all wait until those that FAULTS names have come back.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from axlearn_like.elastic.elastic import Elastic
from axlearn_like.elastic.experts import SpreadExperts
from axlearn_like.elastic.member import Member
from axlearn_like.input import SupervisedInput
from axlearn_like.training.trainer import Trainer
from axlearn_like.training.updates.spread.calls import ExpertCalls
from axlearn_like.training.updates.spread.placed import ExpertPlaces
from axlearn_like.training.updates.spread.step import SpreadStep
from tests.axlearn_like.elastic.process import live
from tests.axlearn_like.tiny import Counting, tiny_trainer
from tests.axlearn_like.training.updates.zebra.test_step import mixture

POINTS: dict[str, tuple[type, str]] = {
    "forward": (ExpertCalls, "forward"),
    "backward": (ExpertCalls, "backward"),
    "exchange": (Member, "_send"),
    "sums": (Member, "take"),
    "update": (SpreadStep, "_end"),
    "moves": (ExpertPlaces, "_moved"),
    "fetch": (Member, "fetch"),
}
MEET = 20


def config(steps: int, copies: int = 2) -> Trainer.Config:
    experts = SpreadExperts.Config(slots=3, copies=copies, every=6)
    elastic = Elastic.Config(parts=8, silence=20.0, experts=experts)
    cfg = tiny_trainer(steps, model=mixture(aux=0.01), evaluators=(), elastic=elastic)
    cfg.input = SupervisedInput.Config(source=Counting.Config(), seq_len=16, batch_size=8)
    cfg.checkpoint.set(asynchronous=False)
    return cfg


def meet(faults: dict[str, Any], run: Path) -> None:
    """Let the update after step `MEET` begin once all that were to die are back."""
    update = SpreadStep.__call__

    def waiting(self: SpreadStep, state: Any, batch: Any) -> Any:
        deadline = time.monotonic() + 240
        while int(state["step"]) == MEET and time.monotonic() < deadline:
            if all((run / f"back-{index}").exists() for index in faults):
                break
            time.sleep(0.05)
        return update(self, state, batch)

    SpreadStep.__call__ = waiting


def main(run: str, steps: str) -> None:
    meet(json.loads(os.environ.get("FAULTS", "{}")), Path(run))
    live(run, POINTS)
    config(int(steps), int(os.environ.get("COPIES", "2"))).build().run(run, progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
