"""A step on two groups of devices, overlapped and one program at a time, on two devices of a CPU.

python -m tests.benches.experts.zebra ROUNDS

*Stated* times: every program of a group sleeps until its time is over, in the thread that starts it, so the ratios hold
on a machine with other work; schedule, transfers and gradients are the real ones. *Computed* ones: what the programs
take, with the experts' width chosen so that both groups take equally long.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from axlearn_like.config import replace
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.training.trainer import Trainer
from axlearn_like.training.updates.zebra.step import ZebraStep
from axlearn_like.training.updates.zebra.zebra import Zebra, first_by_group
from experiments.demo.config import demo_moe_sft
from mesh import shard_batch
from mesh.cost.zebra import SideTimes, step_seconds
from mesh.rules import use_mesh

_LAYERS, _EXPERTS, _MICROBATCHES = 4, 8, 4
_FORWARD_S = 0.1  # stated seconds of experts for a whole batch, forward; backward three times that
_PROGRAMS = ("embed", "attend", "finish", "attend_back", "embed_back")


class Side:
    """Seconds that a group's programs have taken."""

    def __init__(self):
        self.seconds = 0.0

    def paced(self, program: Any, least: float = 0.0) -> Callable[..., Any]:
        """Return a program that waits for its result, and until so many seconds are over."""

        def run(*args: Any) -> Any:
            began = time.perf_counter()
            result = jax.block_until_ready(program(*args))
            time.sleep(max(0.0, began + least - time.perf_counter()))
            self.seconds += time.perf_counter() - began
            return result

        return run


def experiment(hidden: int, moved: int, *, overlap: bool, wide: bool) -> Trainer.Config:
    """The demo's mixture with four layers."""
    cfg = demo_moe_sft(seed=0)
    cfg.model.set(num_layers=_LAYERS)
    router = SoftmaxRouter.Config(top_k=2, load_balance=0.01)
    mixture = MoE.Config(num_experts=_EXPERTS, router=router, experts=Experts.Config(hidden=hidden))
    replace(cfg, Block.Config, lambda block: block.set(feed_forward=mixture))
    cfg.input.set(batch_size=16, seq_len=256 if wide else 32)
    zebra = Zebra.Config(mesh={"expert": 1}, microbatches=_MICROBATCHES, moved=(moved,), overlap=overlap)
    return cfg.set(mesh={}, mesh_rules=(), microbatches=1, evaluators=(), zebra=zebra)


def prepared(cfg: Trainer.Config, pace: Callable[[ZebraStep], None] = lambda step: None) -> Callable[[], float]:
    """Return a function that makes an update, whose programs are compiled, and returns its seconds."""
    cfg.check()
    mesh, learner = cfg.check_sizes(), cfg.learner.build()
    with use_mesh(mesh):
        program = cfg.program(mesh, learner)
        step: Any = program.step
        state = step.parted(step.begin(first_by_group(program, 0)(program.state["params"])))
        batch = shard_batch(next(cfg.input.build()))
        pairs = jax.block_until_ready(step(state, batch))

    def run() -> float:
        nonlocal pairs
        with use_mesh(mesh):
            began = time.perf_counter()
            pairs = jax.block_until_ready(step(pairs[0], batch))
            return time.perf_counter() - began

    pace(step)
    return run


def pace(step: ZebraStep, attention: float, experts: float, moved: int) -> tuple[Side, Side]:
    """Let every program take these seconds at least, of a whole batch's forward pass; return both sides' clocks."""
    here, there = Side(), Side()
    for name in _PROGRAMS:
        share = {"attend": 1.0, "attend_back": 3.0}.get(name, 0.0)
        program = getattr(step.attention, name)
        setattr(step.attention, name, here.paced(program, attention * share / _MICROBATCHES))
    for stages, side, count in ((step.lane.remote, there, _EXPERTS - moved), (step.lane.local, here, moved)):
        for stage in stages.values():
            whole = experts * count / _EXPERTS / _MICROBATCHES
            stage.compute = side.paced(stage.compute, whole)
            stage.compute_back = side.paced(stage.compute_back, 3.0 * whole)
    return here, there


def stated(attention: float, moved: int, *, overlap: bool) -> Callable[[], float]:
    """Return an update in which attention takes this multiple of the experts' stated time."""
    cfg = experiment(16, moved, overlap=overlap, wide=False)
    return prepared(cfg, lambda step: pace(step, attention * _FORWARD_S, _FORWARD_S, moved) and None)


def planned(attention: float, moved: int) -> float:
    """Return the seconds of such an update by the schedule alone."""
    times = SideTimes(attention * _FORWARD_S, _FORWARD_S, _FORWARD_S, 1.0, 1e12)
    return step_seconds(times, _MICROBATCHES, (moved,) * _LAYERS, _EXPERTS)


def balanced(rounds: int, ratio: float) -> tuple[int, float]:
    """Return the experts' width at which their side takes `ratio` of attention's time, and the ratio measured."""
    hidden, found = 256, 0.0
    for _ in range(3):
        sides: list[Side] = []
        run = prepared(
            experiment(hidden, 0, overlap=False, wide=True), lambda step, s=sides: s.extend(pace(step, 0.0, 0.0, 0))
        )
        best = [float("inf"), float("inf")]
        for _ in range(rounds):
            for side in sides:
                side.seconds = 0.0
            run()
            best = [min(old, side.seconds) for old, side in zip(best, sides, strict=True)]
        found = best[1] / best[0]
        if abs(found / ratio - 1) < 0.05:
            break
        hidden = max(16, round(hidden * ratio / found / 16) * 16)
    return hidden, found


def fastest(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the least seconds of each, measured in turn."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            found[name] = min(found[name], run())
    return found


def figures(rounds: int) -> dict[str, Any]:
    """Return the ratios by stated and by computed times."""
    runs = {
        "alone": stated(1.0, 0, overlap=False),
        "overlapped": stated(1.0, 0, overlap=True),
        "symmetric": stated(0.75, 0, overlap=True),
        "asymmetric": stated(0.75, 1, overlap=True),
    }
    best = fastest(runs, max(2, rounds // 2))
    equal = _LAYERS * 4 * 2 * _FORWARD_S
    told: dict[str, Any] = {
        "zebra_ratio": round(best["alone"] / best["overlapped"], 3),
        "zebra_ratio_planned": round(equal / planned(1.0, 0), 3),
        "asymmetric_ratio": round(best["symmetric"] / best["asymmetric"], 3),
        "asymmetric_ratio_planned": round(planned(0.75, 0) / planned(0.75, 1), 3),
        "zebra_times": "stated",
    }
    hidden, sides = balanced(rounds, 1.0)
    computed = {
        name: prepared(experiment(hidden, 0, overlap=name == "overlapped", wide=True))
        for name in ("alone", "overlapped")
    }
    best = fastest(computed, 2 * rounds)
    told |= {"zebra_ratio_computed": round(best["alone"] / best["overlapped"], 3), "zebra_sides": round(sides, 3)}
    hidden, sides = balanced(rounds, 4 / 3)
    moved = {
        name: prepared(experiment(hidden, count, overlap=True, wide=True))
        for name, count in (("symmetric", 0), ("asymmetric", 1))
    }
    best = fastest(moved, 2 * rounds)
    asymmetric = round(best["symmetric"] / best["asymmetric"], 3)
    return told | {"asymmetric_ratio_computed": asymmetric, "asymmetric_sides": round(sides, 3)}


if __name__ == "__main__":
    print(json.dumps(figures(int(sys.argv[1]))))
