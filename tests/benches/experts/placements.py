"""Trained samples under kills: experts placed by load over elastic members, against equal groups of members.

python -m tests.benches.experts.placements RUN_DIR KIND: a member of a run.

*Stated* times: a member's programs sleep until their time is over, by the rows that they compute, as a machine with two
cores would not show which member has more of them. Choices follow Zipf's law. KIND `load` is what the trainer does.
`equal` is a system with expert parallelism and live reconfiguration: members are in groups that hold every expert once,
and after a loss only whole groups compute experts. All else is the same, and members of no group still attend.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.elastic.elastic import Elastic
from axlearn_like.elastic.experts import ExpertMap, SpreadExperts
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.placement import WHOLE, ExpertPlan
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.trainer import Trainer
from axlearn_like.training.updates.spread import placed
from axlearn_like.training.updates.spread.programs import SpreadPrograms
from mesh.programs.compilation import enable_compilation_cache
from tests.axlearn_like.tiny import tiny_model, tiny_trainer
from tests.benches.experts.survivors import check_same_rows, survived

_BATCH, _LAYERS, _EXPERTS, _SLOTS, _GROUP = 32, 2, 8, 3, 4
_EXPONENT = 1.2  # exponent of Zipf's law
_SIDE_S = 16.0  # stated seconds of all members together in an update, of attention and of experts each
_PASSES = {"attend": 1, "attend_back": 3}
_RANKS = np.random.default_rng(0).permutation(_EXPERTS) + 1  # popularity of each expert


class ZipfRouter(SoftmaxRouter):
    """Choices by Zipf's law, the same for every batch; weights and their gradients are a router's."""

    class Config(SoftmaxRouter.Config):
        pass

    def _logits(self, x_btd: jax.Array) -> jax.Array:
        shares = jnp.log(jnp.asarray(_RANKS, jnp.float32) ** -_EXPONENT)
        chance = jax.random.gumbel(jax.random.key(0), (*x_btd.shape[:2], _EXPERTS))
        return super()._logits(x_btd) * 1e-3 + shares + chance


def config() -> Trainer.Config:
    """Return a small trainer that ends when it is stopped."""
    model: Any = tiny_model()
    block: Block.Config = model.block
    router = ZipfRouter.Config(top_k=2, load_balance=0.0)
    block.feed_forward = MoE.Config(num_experts=_EXPERTS, router=router, experts=Experts.Config(hidden=16))
    experts = SpreadExperts.Config(slots=_SLOTS, copies=2, every=4)
    elastic, saved = Elastic.Config(parts=_BATCH, experts=experts), Checkpointer.Config(save_every=20)
    cfg = tiny_trainer(10_000_000, model=model, evaluators=(), elastic=elastic, checkpoint=saved)
    cfg.input.set(batch_size=_BATCH)
    return cfg


def equal_groups(
    loads: np.ndarray, addresses: Sequence[Any], slots: int, copies: int, have: Mapping[Any, Any], period: int
) -> ExpertMap:
    """Return the map of groups of members that hold each expert once, in place of `place_experts`."""
    del slots, copies, have
    (layers, experts), members = loads.shape, len(addresses)
    groups, each = members // _GROUP, experts // _GROUP
    table, ends = np.full((members, each), -1, np.int32), np.zeros((members, each), np.int32)
    for group in range(groups):
        for member in range(_GROUP):
            table[group * _GROUP + member] = np.arange(member * each, (member + 1) * each)
            ends[group * _GROUP + member] = WHOLE * (group + 1) // groups
    every = np.broadcast_to(table.reshape(1, -1), (layers, members * each)), np.tile(ends.reshape(1, -1), (layers, 1))
    return ExpertMap(tuple(addresses), ExpertPlan(*every, members), period)


def pace(programs: SpreadPrograms) -> None:
    """Let the programs of a member take stated times."""
    unit = _SIDE_S / (_BATCH * _LAYERS * 4)  # of a part in a layer's forward pass
    for name, passes in _PASSES.items():
        program = getattr(programs.attention, name)
        setattr(programs.attention, name, _paced(program, lambda args, passes=passes: passes * unit))
    by_row = unit / (2 * 0.85 * 16)  # two choices of a part's tokens, of which 85 % are there

    def rows(args: Any) -> float:
        return float(np.sum(np.asarray(args[2].experts) == 0))

    expert: Any = programs.expert
    expert.compute = _paced(expert.compute, lambda args: by_row * rows(args))
    expert.compute_back = _paced(expert.compute_back, lambda args: 3 * by_row * rows(args))


def _paced(program: Any, least: Callable[[Any], float]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        began = time.perf_counter()
        result = jax.block_until_ready(program(*args))
        time.sleep(max(0.0, began + least(args) - time.perf_counter()))
        return result

    return run


def figures(quick: bool) -> dict[str, Any]:
    """Return the ratio of samples, and if the metrics of all steps are those of a run that nothing has disturbed."""
    members, kills, every = 8, *((1, 40.0) if quick else (3, 60.0))
    module = "tests.benches.experts.placements"
    with tempfile.TemporaryDirectory() as folder:
        runs = {kind: Path(folder) / kind for kind in ("load", "equal")}
        plan = members, kills, every
        # One after the other: the work of members beside their stated times is real, and would share two cores.
        found = {
            kind: survived(config(), [module, str(path), kind], path, plan, one=True) for kind, path in runs.items()
        }
        loads = {f"{kind}_busiest_to_mean": _busiest(path) for kind, path in runs.items()}
        alone = Path(folder) / "alone"
        steps = min(40, *(one["steps"] for one in found.values()))
        config().set(num_steps=steps).build().run(alone, progress=False)
        same = [check_same_rows(alone, path) for path in runs.values()]
    ours, theirs = found["load"], found["equal"]
    return {
        "samples_vs_uniform": round(ours["steps"] / theirs["steps"], 3),
        "spread_members": members,
        "spread_kills": kills,
        "spread_seconds_between_kills": every,
        "spread_samples": _BATCH * ours["steps"],
        "uniform_samples": _BATCH * theirs["steps"],
        "spread_steps_lost": ours["steps_lost"],
        "uniform_steps_lost": theirs["steps_lost"],
        "spread_shrunk_s": ours["shrunk_s"],
        "spread_grown_s": ours["grown_s"],
        "spread_fetched_bytes": ours["bytes"],
        "uniform_shrunk_s": theirs["shrunk_s"],
        "uniform_grown_s": theirs["grown_s"],
        "spread_identical": all(same),
        "spread_compared_steps": steps,
        **loads,
    }


def _busiest(folder: Path) -> dict[str, float]:
    """Return the busiest member over the mean in the last plan for each number of members."""
    placed = [row for row in read_rows(folder / "events.jsonl") if row["event"] == "experts_placed"]
    return {str(row["members"]): row["busiest_to_mean"] for row in placed}


if __name__ == "__main__":
    enable_compilation_cache()
    begin = SpreadPrograms.__init__

    def paced(self: SpreadPrograms, *args: Any) -> None:
        """Begin as always, at stated times."""
        begin(self, *args)
        pace(self)

    setattr(SpreadPrograms, "__init__", paced)  # noqa: B010
    if sys.argv[2] == "equal":
        placed.place_experts = equal_groups
    config().build().run(sys.argv[1], progress=False)
