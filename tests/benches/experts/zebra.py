"""A step on two groups of devices, overlapped and one program at a time, on two devices of a CPU.

python -m tests.benches.experts.zebra ROUNDS

*Stated* times: every program of a group sleeps until its time is over, in the thread that starts it, so the ratios hold
on a machine with other work; order, transfers and gradients are the real ones. *Computed* ones: what the programs take,
with the experts' width chosen so that both groups take equally long, or experts a third longer.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from axlearn_like.config import replace
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.training.trainer import Trainer
from axlearn_like.training.updates.zebra.zebra import Zebra, first_by_group
from experiments.demo.config import demo_moe_sft
from mesh import shard_batch
from mesh.cost.zebra import SideTimes, step_seconds
from mesh.rules import use_mesh

_LAYERS, _EXPERTS, _MICROBATCHES = 4, 8, 4
_FORWARD_S = 0.1  # stated seconds of experts for a whole batch, forward; backward three times that
_PASSES = {"embed": 0, "attend": 1, "finish": 0, "attend_back": 3, "embed_back": 0}


class Pace(NamedTuple):
    """Seconds that each group's programs take at least for a whole batch, in a layer's forward pass."""

    attention: float
    experts: float


class Update:
    """An update of the demo's mixture with four layers, whose programs are compiled.

    Attributes:
        pace: times that programs take at least; None: nothing waits for them.
        seconds: what those of attention's device and of experts' have taken, where there is a pace.
    """

    def __init__(self, hidden: int, moved: int, length: int):
        """Take the width of experts, how many of each layer are on attention's device, and the tokens of a row."""
        self.pace: Pace | None = None
        self.seconds = [0.0, 0.0]
        cfg = experiment(hidden, moved, length)
        cfg.check()
        self._mesh, learner = cfg.check_sizes(), cfg.learner.build()
        with use_mesh(self._mesh):
            program = cfg.program(self._mesh, learner)
            self._step: Any = program.step
            state = self._step.parted(self._step.begin(first_by_group(program, 0)(program.state["params"])))
            self._batch = shard_batch(next(cfg.input.build()))
            self._state, _ = jax.block_until_ready(self._step(state, self._batch))
        for name, passes in _PASSES.items():
            program = getattr(self._step.attention, name)
            setattr(self._step.attention, name, self._paced(program, 0, passes))
        for stages, side, share in (
            (self._step.lane.remote, 1, 1 - moved / _EXPERTS),
            (self._step.lane.local, 0, moved / _EXPERTS),
        ):
            for stage in stages.values():
                stage.compute = self._paced(stage.compute, side, share, own=True)
                stage.compute_back = self._paced(stage.compute_back, side, 3 * share, own=True)

    def run(self, *, overlap: bool, pace: Pace | None = None) -> float:
        """Return the seconds of an update."""
        self._step.lane.overlap, self.pace, self.seconds = overlap, pace, [0.0, 0.0]
        with use_mesh(self._mesh):
            began = time.perf_counter()
            self._state, _ = jax.block_until_ready(self._step(self._state, self._batch))
            return time.perf_counter() - began

    def sides(self, rounds: int) -> float:
        """Return the time of experts over that of attention, the least of each."""
        found: list[list[float]] = []
        for _ in range(rounds):
            self.run(overlap=False, pace=Pace(0.0, 0.0))
            found.append(self.seconds)
        attention, experts = (min(side) for side in zip(*found, strict=True))
        return experts / attention

    def _paced(self, program: Any, side: int, passes: float, *, own: bool = False) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if self.pace is None:
                return program(*args)
            began = time.perf_counter()
            result = jax.block_until_ready(program(*args))
            least = passes * self.pace[1 if own else 0] / _MICROBATCHES
            time.sleep(max(0.0, began + least - time.perf_counter()))
            self.seconds[side] += time.perf_counter() - began
            return result

        return run


def experiment(hidden: int, moved: int, length: int) -> Trainer.Config:
    """Return the config of an update."""
    cfg = demo_moe_sft(seed=0)
    cfg.model.set(num_layers=_LAYERS)
    router = SoftmaxRouter.Config(top_k=2, load_balance=0.01)
    mixture = MoE.Config(num_experts=_EXPERTS, router=router, experts=Experts.Config(hidden=hidden))
    replace(cfg, Block.Config, lambda block: block.set(feed_forward=mixture))
    cfg.input.set(batch_size=16, seq_len=length)
    zebra = Zebra.Config(mesh={"expert": 1}, microbatches=_MICROBATCHES, moved=(moved,))
    return cfg.set(mesh={}, mesh_rules=(), microbatches=1, evaluators=(), zebra=zebra)


def planned(pace: Pace, moved: int) -> float:
    """Return the seconds of an update by the schedule alone."""
    times = SideTimes(pace.attention, pace.experts, pace.experts, 1.0, 1e12)
    return step_seconds(times, _MICROBATCHES, (moved,) * _LAYERS, _EXPERTS)


def fastest(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the least seconds of each, measured in turn."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            found[name] = min(found[name], run())
    return found


def by_stated_times(rounds: int) -> dict[str, Any]:
    """Return the ratios where all programs take stated times."""
    equal, uneven = Pace(_FORWARD_S, _FORWARD_S), Pace(0.75 * _FORWARD_S, _FORWARD_S)
    updates = [Update(16, moved, 64) for moved in (0, 1)]
    runs: dict[str, Callable[[], float]] = {
        "alone": lambda: updates[0].run(overlap=False, pace=equal),
        "overlapped": lambda: updates[0].run(overlap=True, pace=equal),
        "symmetric": lambda: updates[0].run(overlap=True, pace=uneven),
        "asymmetric": lambda: updates[1].run(overlap=True, pace=uneven),
    }
    best = fastest(runs, rounds)
    alone = _LAYERS * 4 * 2 * _FORWARD_S
    return {
        "zebra_ratio": round(best["alone"] / best["overlapped"], 3),
        "zebra_ratio_planned": round(alone / planned(equal, 0), 3),
        "asymmetric_ratio": round(best["symmetric"] / best["asymmetric"], 3),
        "asymmetric_ratio_planned": round(planned(uneven, 0) / planned(uneven, 1), 3),
    }


def by_computed_times(rounds: int) -> dict[str, Any]:
    """Return the same where programs take what they compute, one core each."""
    hidden, length = 256, 256
    found = Update(hidden, 0, length).sides(rounds)
    told: dict[str, Any] = {}
    for name, ratio in (("zebra", 1.0), ("asymmetric", 4 / 3)):
        hidden = max(16, round(hidden * ratio / found / 16) * 16)
        update = Update(hidden, 0, length)
        found = update.sides(rounds)
        told |= {f"{name}_sides": round(found, 3), f"{name}_width": hidden}
        runs: dict[str, Callable[[], float]] = {"new": lambda one=update: one.run(overlap=True)}
        if name == "zebra":
            runs["old"] = lambda one=update: one.run(overlap=False)
        else:
            other = Update(hidden, 1, length)
            runs |= {"old": runs["new"], "new": lambda one=other: one.run(overlap=True)}
        best = fastest(runs, 3 * rounds)
        told[f"{name}_ratio_computed"] = round(best["old"] / best["new"], 3)
    return told


if __name__ == "__main__":
    many = int(sys.argv[1])
    print(json.dumps({**by_stated_times(max(2, many // 2)), **by_computed_times(many)}))
