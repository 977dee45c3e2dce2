"""`axl rl EXPERIMENT`: improve a policy by reinforcement learning, or resume a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from experiments.registry import check_name
from mesh.errors import UserError
from mesh.files.bucket import Bucket, bucket_url
from tools.commands import RunOptions, options_as
from tools.experiment import default_run_dir, experiment_options, warn_of_idle_gpu

DEMO_KILL = 0.5  # the demo kills a worker to show that a run survives it


@click.command("rl")
@experiment_options
@click.option(
    "--runtime",
    type=click.Choice(["inprocess", "ray"]),
    default="ray",
    show_default=True,
    help="Each role in a process of its own, or all in this one.",
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
    "reward_place",
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
@options_as(run=RunOptions)
def command(
    run: RunOptions,
    runtime: Literal["inprocess", "ray"],
    fleet: str | None,
    reward_place: str | None,
    allow_idle: bool,
    plan_only: bool,
    as_json: bool,
    kill_worker_after: float | None,
) -> None:
    """Improve the policy of EXPERIMENT by reinforcement learning.

    Ctrl-C or SIGTERM saves and stops all roles; the same command resumes.
    """
    check_name(run.experiment)
    if as_json and not plan_only:
        raise UserError("--json belongs to --plan; a run writes report.json into its directory")
    from mesh.imports import many_imports

    with many_imports():
        from mesh.devices import forbid_devices, one_device_per_core
        from tools.fleet import load_placed, print_plan

    if runtime == "ray" and not plan_only:
        from rl.runtime.node.warm import serve_node

        click.get_current_context().with_resource(serve_node())
    if runtime == "ray":
        click.get_current_context().with_resource(forbid_devices("the driver of an RL run"))
    warn_of_idle_gpu()
    idle = ("fleet.allow_idle=True",) if allow_idle else ()
    placed = load_placed(run.experiment, (*idle, *run.sets), run.seed, run.applied, fleet)
    cfg = placed.cfg
    if reward_place is not None:
        from rl.verification.verifiers.reward import reward

        cfg.verifier.set(scorer=reward(reward_place, cfg.tasks))
    if plan_only:
        return print_plan(run.experiment, placed, as_json=as_json)
    from mesh.programs.compilation import enable_compilation_cache
    from rl.runtime.run import RLRun

    one_device_per_core()
    enable_compilation_cache()
    job = RLRun(cfg.build())
    job.check(runtime)
    directory = default_run_dir(run.experiment, run.run_dir)
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
