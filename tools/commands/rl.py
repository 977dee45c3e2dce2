"""`axl rl EXPERIMENT`: improve a policy by reinforcement learning, or resume a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from experiments.registry import check_name
from experiments.start.options import StartOptions
from mesh.errors import UserError
from mesh.files.bucket import Bucket, bucket_url
from tools.commands import options_as
from tools.experiment import default_run_dir, experiment_options, warn_of_idle_gpu
from tools.experiment.start import RunOptions, begin, export, is_start, show, start_options

DEMO_KILL = 0.5  # the demo kills a worker to show that a run survives it


@click.command("rl")
@experiment_options
@start_options("rl")
@click.option(
    "--runtime",
    type=click.Choice(["inprocess", "ray"]),
    help="Each role in a process of its own (ray), or all in this one.  [default: ray; with --model inprocess]",
)
@click.option(
    "--fleet",
    metavar="ROLE=DEVICES,...",
    help="Devices of the roles, e.g. trainer=v5p:8x8x8,workers=64xv5p:2x2x1; `here` is this machine; "
    "workers=trainer: one that shares the trainer's; reference=DEVICES: of the role that scores by "
    "trainer.reference, else the trainer does; verifiers=cpu goes without saying.  "
    "[default: the experiment's]",
)
@click.option(
    "--reward",
    metavar="FILE.py:FUNCTION",
    help="A reward of your own in place of the experiment's: a function of `answer` and what else it names "
    "(docs/how-to/bring-a-reward.md).",
)
@click.option("--allow-idle", is_flag=True, help="Roles may leave chips of theirs unused.")
@click.option("--plan", "plan_only", is_flag=True, help="Print hosts, meshes and memory of each role; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --plan: print one JSON object as the last line.")
@click.option("--force", is_flag=True, help="Resume in the run directory of another config, or of another user.")
@click.option(
    "--kill-worker-after",
    type=float,
    metavar="SHARE",
    help="Fault injection: kill one worker (SIGKILL) after this share of the updates; 0: none.  "
    f"[default: {DEMO_KILL} for demo under Ray, else 0]",
)
@options_as(run=RunOptions, start=StartOptions)
def command(
    run: RunOptions,
    start: StartOptions,
    runtime: Literal["inprocess", "ray"] | None,
    fleet: str | None,
    allow_idle: bool,
    plan_only: bool,
    as_json: bool,
    kill_worker_after: float | None,
) -> None:
    """Improve the policy of EXPERIMENT by reinforcement learning.

    EXPERIMENT is a name, FILE.py:FUNCTION, or a YAML file of these options; --model and --data stand for it, and what
    is derived from them is printed first. Ctrl-C or SIGTERM saves and stops all roles; the same command resumes.
    """
    if not is_start(run, start):
        check_name(run.experiment or "")
    if as_json and not plan_only:
        raise UserError("--json belongs to --plan; a run writes report.json into its directory")
    from mesh.imports import many_imports

    with many_imports():
        from mesh.devices import forbid_devices, one_device_per_core
        from tools.fleet import load_placed, print_plan

    run, start, found = begin("rl", run, start)
    runtime = runtime or ("inprocess" if found is not None and found.inprocess and not fleet else "ray")
    if runtime == "ray" and not plan_only:
        from rl.runtime.node.warm import serve_node

        click.get_current_context().with_resource(serve_node())
    if runtime == "ray":
        click.get_current_context().with_resource(forbid_devices("the driver of an RL run"))
    warn_of_idle_gpu()
    named: Any = run.experiment if found is None else found.config
    idle = ("fleet.allow_idle=True",) if allow_idle else ()
    placed = load_placed(named, (*idle, *run.sets), run.seed, run.applied, fleet)
    cfg = placed.cfg
    if found is not None:
        show(found, cfg, start)
    elif start.reward is not None:
        from rl.verification.verifiers.reward import reward

        cfg.verifier.set(scorer=reward(start.reward, cfg.tasks))
    if plan_only:
        return print_plan(run.experiment or "start", placed, as_json=as_json)
    from mesh.programs.compilation import enable_compilation_cache
    from rl.runtime.run import RLRun

    one_device_per_core()
    enable_compilation_cache()
    job = RLRun(cfg.build())
    job.check(runtime)
    directory = default_run_dir(run.experiment or "", run.run_dir)
    if kill_worker_after is None and run.experiment == "demo" and runtime == "ray":
        kill_worker_after = DEMO_KILL
    how = {"force": run.force, "progress": not run.quiet, "kill_worker_after": kill_worker_after or None}
    report = job.run(directory, runtime=runtime, **how)
    if report is not None:
        from axlearn_like.run.directory import RunDirectory
        from tools.report import load_run, write_report
        from tools.report.table import print_tables

        loaded = load_run(RunDirectory.attach(directory).path)
        page: Path | str = write_report(loaded)
        if url := bucket_url(directory):
            Bucket(url, "--run-dir").put({"report.html": page})
            page = f"{url}/report.html"
        print_tables(loaded)
        click.echo(f"report: {page}")
        export(start, found, directory)
