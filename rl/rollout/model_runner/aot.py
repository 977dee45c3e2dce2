"""The engine's programs on described devices, to be compiled ahead of time (see `mesh.cost.ahead_of_time`)."""

import math
from collections.abc import Sequence as Items
from typing import Any

from jax.sharding import Mesh

from mesh import UserError
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.dispatches import Dispatch, largest_dispatches
from rl.rollout.model_runner.runner import ModelRunner


def engine_dispatches(cfg: RolloutEngine.Config, devices: Items[Any]) -> tuple[Mesh, list[Dispatch]]:
    """Return the engine's mesh, and the dispatches that it runs, of each kind the largest."""
    runner = described_runner(cfg, devices)
    return runner.mesh, largest_dispatches(runner)


def described_runner(cfg: RolloutEngine.Config, devices: Items[Any]) -> ModelRunner:
    """Return a runner on described devices; an empty mesh means tensor parallelism over all of them."""
    wanted = math.prod(cfg.mesh.values())
    if cfg.mesh and -1 not in cfg.mesh.values() and wanted != len(devices):
        text = " x ".join(f"{name} {size}" for name, size in cfg.mesh.items())
        raise UserError(
            f"RolloutEngine.mesh {text} needs {wanted} devices but there are {len(devices)}: an engine has all devices "
            f"of a topology to itself; compile it for one of {wanted}, as each rollout worker has them"
        )
    cfg = cfg.clone(mesh=cfg.mesh or {"tensor": len(devices)})
    cfg.check()
    return ModelRunner(cfg, devices)
