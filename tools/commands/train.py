"""`axl train EXPERIMENT`: run an experiment's trainer, or resume it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from experiments.registry import check_name
from experiments.start.options import StartOptions
from mesh.errors import UserError
from mesh.files.bucket import bucket_url
from tools.commands import options_as
from tools.experiment import check_command, choose, default_run_dir, experiment_options, warn_of_idle_accelerator
from tools.experiment.start import RunOptions, begin, export, is_start, show, start_options


@click.command("train")
@experiment_options
@start_options("train")
@click.option("--force", is_flag=True, help="Resume in a run directory of another config, or of another user.")
@click.option(
    "--processes", type=click.IntRange(1), default=1, show_default=True, help="Processes that share the mesh."
)
@click.option("--process", type=click.IntRange(0), default=0, show_default=True, help="Which of them this is.")
@click.option("--meet", metavar="HOST:PORT", help="Where process 0 listens and the others come to.")
@click.option("--members", type=click.IntRange(1), help="Processes of this machine that may die and come back.")
@options_as(run=RunOptions, start=StartOptions)
def command(
    run: RunOptions, start: StartOptions, processes: int, process: int, meet: str | None, members: int | None
) -> None:
    """Train a model by the trainer that EXPERIMENT composes.

    EXPERIMENT is a name, FILE.py:FUNCTION, or a YAML file of these options; --model and --data stand for it, and what
    is derived from them is printed first. Ctrl-C or SIGTERM saves and stops; the same command resumes. Several
    processes, each started with the same command but for --process, share one mesh and one run directory. With
    --members, this command starts processes that each hold the whole state, and starts again those that end.
    """
    if not is_start(run, start):
        check_name(run.experiment or "")
    elif processes > 1 or members is not None:
        option = "--processes" if members is None else "--members"
        raise UserError(f"--model with {option}: write the experiment by --save-experiment FILE.py, and run that")
    from axlearn_like.elastic.elastic import is_member
    from axlearn_like.operations.goodput import process_began
    from mesh.devices import configure_cpu_devices, device_name
    from mesh.distributed import join
    from mesh.programs.compilation import enable_compilation_cache

    _check_meeting(meet, process, processes)
    warn_of_idle_accelerator()
    run, start, found = begin("train", run, start)
    named: Any = run.experiment if found is None else found.config
    chosen = choose(named, run.sets, run.seed, run.applied if members is None else (*run.applied, as_elastic))
    cfg: Any = chosen.on()
    check_command(cfg, "train", run.experiment or "")
    # The processes must have connected before the devices are queried; the mesh decides which ones a process exposes.
    steps = cfg.num_steps
    where = default_run_dir(run.experiment or "", run.run_dir)
    start.check_export(where, cfg)
    if members is not None and not is_member():
        cfg.check()
        if (warning := cfg.elastic.check_members(cfg, members)) is not None:
            click.echo(f"train: {warning}", err=True)
        row = supervise(cfg, run, where, members, processes)
        click.echo(outcome(row, steps, bucket_url(where) or where))
        return
    configure_cpu_devices(cfg.mesh, processes)
    if meet is not None:
        join(meet, process, processes, role="process")
    cfg: Any = chosen.on(device_name)
    if found is not None:
        show(found, cfg, start)
    enable_compilation_cache()
    row = cfg.build().run(where, progress=not run.quiet, began=process_began(), force=run.force)
    if process or is_member():
        return  # another process reports for all
    click.echo(outcome(row, steps, bucket_url(where) or where))
    if row["finished"]:
        export(start, found, where)


def as_elastic(cfg: Any) -> None:
    """Give a trainer's config the defaults of `elastic`, if it has no others, so that --set may change them."""
    from axlearn_like.elastic.elastic import Elastic

    if getattr(cfg, "elastic", cfg) is None:
        cfg.elastic = Elastic.Config()


def supervise(cfg: Any, run: RunOptions, where: Path, members: int, processes: int) -> dict[str, Any]:
    """Run members of an elastic trainer until they have ended; returns their last metrics, and if they `finished`."""
    from axlearn_like.config import to_text
    from axlearn_like.run.directory import RunDirectory
    from axlearn_like.run.events import EventLog
    from axlearn_like.run.metrics import read_rows
    from axlearn_like.run.signals import graceful_stop
    from axlearn_like.training.opening import ended_before

    if processes > 1:
        raise UserError(f"--members {members} and --processes {processes}: expected one of them")
    command = [sys.executable, "-m", "axlearn_like", "train", run.experiment or "", "--run-dir", str(where)]
    command += ["--members", str(members)]
    command += [word for name in run.sets for word in ("--set", name)]
    command += [word for name in run.applied for word in ("--apply", name)]
    command += [] if run.seed is None else ["--seed", str(run.seed)]
    command += ["--quiet"] if run.quiet else []

    def say(line: str) -> None:
        click.echo(line, err=True)

    with RunDirectory.open(where, to_text(cfg), force=run.force) as opened, graceful_stop() as stop:
        row = None if opened.forced else ended_before(opened, cfg)
        if row is not None:
            return {**row, "finished": True, "before": True}
        cfg.elastic.supervisor(command, members, EventLog(opened.events_path), say).run(lambda: stop.requested)
        ends = read_rows(opened.events_path, ["train_end"])
        last = next(reversed(read_rows(opened.metrics_path)), {"step": 0})
        if not ends:  # stopped, and all members ended before one could say so
            return {**last, "finished": False}
        return {**last, "step": ends[-1]["step"], "finished": ends[-1]["reason"] == "done"}


def outcome(row: Mapping[str, Any], steps: int, where: Path | str) -> str:
    """Return a line that says how a run of so many steps has ended; `row` is what `Trainer.run` returned."""
    loss = f", loss {row['loss']:.4f}" if row.get("loss") is not None else ""
    if not row["finished"]:
        return f"stopped at step {row['step']} of {steps}; the same command resumes"
    if "before" in row:
        return f"finished before, at step {row['step']}{loss}: nothing is done again; run directory {where}"
    return f"done: step {row['step']}{loss}; run directory {where}"


def _check_meeting(meet: str | None, process: int, processes: int) -> None:
    """Refuse processes that cannot connect to each other."""
    host, _, port = (meet or "").rpartition(":")
    alone = processes == 1 and process == 0 and meet is None
    if not alone and (process >= processes or not host or not port.isdigit()):
        raise UserError(
            f"--processes {processes} --process {process} --meet {meet}: expected --process from 0 to {processes - 1}, "
            "and --meet HOST:PORT, the same for all"
        )
