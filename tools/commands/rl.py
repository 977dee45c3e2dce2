"""`axl rl EXPERIMENT`: improves a policy by reinforcement learning, or resumes that."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

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


@click.command("rl")
@experiment_options
@click.option(
    "--runtime",
    type=click.Choice(["inprocess", "ray"]),
    default="ray",
    show_default=True,
    help="Each role in a process of its own, or all in this one.",
)
@click.option("--force", is_flag=True, help="Go on in a run directory of another config.")
def command(
    experiment: str,
    sets: tuple[str, ...],
    applied: tuple[str, ...],
    seed: int | None,
    run_dir: Path | None,
    runtime: Literal["inprocess", "ray"],
    force: bool,
) -> None:
    """Improve the policy of EXPERIMENT by reinforcement learning.

    Ctrl-C or SIGTERM saves and stops all roles; the same command goes on from there.
    """
    check_name(experiment)
    # Asked of another process: with roles in processes of their own, this one must leave accelerators alone.
    from mesh.devices import device_name_in_subprocess, one_device_per_core

    cfg = load_experiment(experiment, sets, seed, device=device_name_in_subprocess, applied=applied)
    from mesh.compilation import enable_compilation_cache
    from rl.experiment import RLExperiment

    if not isinstance(cfg, RLExperiment.Config):
        raise UserError(
            f"experiment {experiment!r} builds {owner_of(cfg)}, `axl rl` runs "
            "rl.experiment:RLExperiment; for supervised training see `axl train`"
        )
    from rl.run import RLRun

    one_device_per_core()
    enable_compilation_cache()
    with config_errors(building=True):
        job = RLRun(cfg.build())
        job.check(runtime)
    directory = default_run_dir(experiment, run_dir)
    report = job.run(directory, runtime=runtime, force=force)
    if report is not None:
        from tools.report import load_run, write_report
        from tools.report.table import print_tables

        run = load_run(directory)
        page = write_report(run)
        print_tables(run)
        click.echo(f"report: {page}")
