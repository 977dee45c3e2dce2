"""Durations of the source that a user names: a table, a run, the TPU compiler, or none."""

import os
from pathlib import Path

from mesh import UserError
from mesh.topology import prepare_compiler
from rl.fleet.fleet import Placed
from rl.protocol.experiment import ExperimentConfig
from rl.runtime.simulated.durations import Durations, read_durations
from rl.runtime.simulated.sources.calibration import calibrated_run
from rl.runtime.simulated.sources.compiled import compiled


def given_durations(source: str | None, placed: Placed[ExperimentConfig]) -> Durations:
    """Return the durations of a source, as of --durations; of the defaults if there is none.

    Those of a run are taken as of roles that shared this host's cores, unless the fleet has devices of its own.

    Raises:
        UserError: there is no such source, or it has nothing to measure.
    """
    if source is None:
        return Durations()
    if source == "compiled":
        prepare_compiler()
        return compiled(placed)
    path = Path(source)
    if not path.exists():
        raise UserError(f"--durations {source}: there is no such file or run; expected one, or compiled")
    if path.is_dir() and not (path / "config.txt").exists():
        raise UserError(f"--durations {source}: has no run; expected a run, a TOML or JSON table, or compiled")
    if path.is_dir() and placed.cfg.fleet.here:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return calibrated_run(path, cores)
    return read_durations(path)
