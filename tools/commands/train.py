"""`axl train EXPERIMENT`: runs an experiment's trainer, or resumes it."""

from __future__ import annotations

from pathlib import Path

import click

from mesh.errors import UserError
from tools.experiment import (
    check_name,
    config_errors,
    default_run_dir,
    experiment_options,
    load_experiment,
    owner_of,
)


@click.command("train")
@experiment_options
@click.option("--quiet", is_flag=True, help="No progress on the terminal.")
def command(
    experiment: str,
    sets: tuple[str, ...],
    applied: tuple[str, ...],
    seed: int | None,
    run_dir: Path | None,
    quiet: bool,
) -> None:
    """Train a model by the trainer that EXPERIMENT composes.

    Ctrl-C or SIGTERM saves and stops; the same command goes on from there.
    """
    check_name(experiment)
    from mesh.devices import device_name, one_device_per_core

    one_device_per_core()
    cfg = load_experiment(experiment, sets, seed, device=device_name, applied=applied)
    from axlearn_like.operations.goodput import process_began
    from axlearn_like.trainer import Trainer
    from mesh.compilation import enable_compilation_cache

    if not isinstance(cfg, Trainer.Config):
        raise UserError(
            f"experiment {experiment!r} builds {owner_of(cfg)}, `axl train` runs "
            "axlearn_like.trainer:Trainer; for reinforcement learning see `axl rl`"
        )
    enable_compilation_cache()
    where = default_run_dir(experiment, run_dir)
    with config_errors(building=True):
        trainer = cfg.build()
    row = trainer.run(where, progress=not quiet, began=process_began())
    if not row["finished"]:
        click.echo(f"stopped at step {row['step']} of {cfg.num_steps}; the same command goes on")
    else:
        loss = f", loss {row['loss']:.4f}" if "loss" in row else ""
        click.echo(f"done: step {row['step']}{loss}; run directory {where}")
