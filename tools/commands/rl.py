"""`axl rl EXPERIMENT`: improve a policy by reinforcement learning, or resume a run; `axl rl sweep`: several at once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, override

import click
from rich.console import Console

from experiments.registry import check_name
from experiments.start.options import StartOptions
from mesh.errors import UserError, printable
from mesh.files.bucket import Bucket, bucket_url
from tools.commands import options_as
from tools.commands.runs.policies import add, resume, stop
from tools.experiment import LocalPath, default_run_dir, experiment_options, warn_of_idle_accelerator
from tools.experiment.start import RunOptions, begin, export, is_start, show, start_options

if TYPE_CHECKING:
    from rl.runtime.simulated.failures import Failure

DEMO_KILL = 0.5  # the demo kills a worker to show that a run survives it


@dataclasses.dataclass(frozen=True)
class RLOptions:
    """Options of `axl rl` and `axl rl sweep` beside those that `axl train` has."""

    runtime: Literal["inprocess", "ray"] | None
    allow_idle: bool
    plan_only: bool
    as_json: bool
    kill_worker_after: float | None
    trace: Path | None


def rl_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add all options that `axl rl` and `axl rl sweep` share."""
    for decorate in (
        options_as(run=RunOptions, start=StartOptions, how=RLOptions),
        click.option(
            "--kill-worker-after",
            type=float,
            metavar="SHARE",
            help="Fault injection: kill one worker (SIGKILL) after this share of the updates; 0: none.  "
            f"[default: {DEMO_KILL} for demo under Ray, else 0]",
        ),
        click.option(
            "--trace",
            type=LocalPath(path_type=Path, exists=True, dir_okay=False),
            help="Fault injection: kill roles (SIGKILL) at the times of this trace, from the first update on, and "
            "compare the ETTR with the simulated one (docs/how-to/simulate.md).",
        ),
        click.option(
            "--force", is_flag=True, help="Resume in the run directory of another config, or of another user."
        ),
        click.option("--json", "as_json", is_flag=True, help="With --plan: print one JSON object as the last line."),
        click.option(
            "--plan", "plan_only", is_flag=True, help="Print hosts, meshes and memory of each role; start nothing."
        ),
        click.option("--allow-idle", is_flag=True, help="Roles may leave chips of theirs unused."),
        click.option(
            "--reward",
            metavar="FILE.py:FUNCTION",
            help="A reward of your own in place of the experiment's: a function of `answer` and what else it names "
            "(docs/how-to/bring-a-reward.md).",
        ),
        click.option(
            "--fleet",
            metavar="ROLE=DEVICES,...",
            help="Devices of the roles, e.g. trainer=v5p:8x8x8,workers=64xv5p:2x2x1; `here` is this machine; "
            "workers=trainer: one that shares the trainer's; reference=DEVICES: of the role that scores by "
            "trainer.reference, else the trainer does; verifiers=cpu goes without saying.  "
            "[default: the experiment's]",
        ),
        click.option(
            "--runtime",
            type=click.Choice(["inprocess", "ray"]),
            help="Each role in a process of its own (ray), or all in this one.  [default: ray; with --model inprocess]",
        ),
        start_options("rl"),
        experiment_options,
    ):
        function = decorate(function)
    return function


@click.command("sweep")
@click.option(
    "--over",
    multiple=True,
    required=True,
    metavar="PATH=VALUE,VALUE,...",
    help="Values of one field, such as learner.schedule.lr=1e-4,3e-4. May be repeated: all combinations are trained.",
)
@rl_options
def sweep(over: tuple[str, ...], run: RunOptions, start: StartOptions, how: RLOptions) -> None:
    """Train a policy of EXPERIMENT for each combination of values, all of them side by side on one fleet.

    Policies are LoRA adapters of one base (--apply low_rank), or whole models. Each has the bits that it would have had
    alone, and is a run of its own in RUN/policies/NAME, named like lr=1e-4+seed=0; answers and updates take turns.
    A policy that fails is named, the others go on, and the exit status is 1. The same command resumes all of them.
    """
    _run(run, start, how, over)


class _WithOthers(click.Command):
    """`axl rl EXPERIMENT`, and commands of their own behind `axl rl`."""

    commands: ClassVar[dict[str, click.Command]] = {"sweep": sweep, "add": add, "stop": stop, "resume": resume}

    @override
    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and (other := self.commands.get(args[0])) is not None:
            return other.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("rl", cls=_WithOthers)
@rl_options
def command(run: RunOptions, start: StartOptions, how: RLOptions) -> None:
    """Improve the policy of EXPERIMENT by reinforcement learning; `axl rl sweep --help`: several policies at once.

    axl rl add, stop and resume RUN NAME: one of several policies, while the others go on.

    EXPERIMENT is a name, FILE.py:FUNCTION, or a YAML file of these options; --model and --data stand for it, and what
    is derived from them is printed first. Ctrl-C or SIGTERM saves and stops all roles; the same command resumes.
    """
    _run(run, start, how)


def _check_given(run: RunOptions, start: StartOptions, how: RLOptions, over: tuple[str, ...]) -> None:
    """Refuse what does not go together, before anything is imported."""
    if not is_start(run, start):
        check_name(run.experiment or "")
    if how.as_json and not how.plan_only:
        raise UserError("--json belongs to --plan; a run writes report.json into its directory")
    if over and start.export is not None:
        raise UserError("--export is of one policy; after the sweep: axl convert export RUN/policies/NAME DIR")


def _run(run: RunOptions, start: StartOptions, how: RLOptions, over: tuple[str, ...] = ()) -> None:
    _check_given(run, start, how, over)
    from mesh.imports import many_imports

    with many_imports():
        from mesh.devices import forbid_devices, one_device_per_core
        from rl.runtime.policies.configs import check_policies
        from rl.runtime.simulated.failures import read_trace
        from tools.experiment.sweep import plan_sheet, read_over, swept
        from tools.fleet import load_placed, print_plan

    trace = [] if how.trace is None else read_trace(how.trace)
    read_over(over)  # refused before anything is placed
    run, start, found = begin("rl", run, start)
    runtime = how.runtime or ("inprocess" if found is not None and found.inprocess and not start.fleet else "ray")
    if runtime == "ray" and not how.plan_only:
        from rl.runtime.node.warm import serve_node

        click.get_current_context().with_resource(serve_node())
    if runtime == "ray":
        click.get_current_context().with_resource(forbid_devices("the driver of an RL run"))
    warn_of_idle_accelerator()
    named: Any = run.experiment if found is None else found.config
    idle = ("fleet.allow_idle=True",) if how.allow_idle else ()
    placed = load_placed(named, (*idle, *run.sets), run.seed, run.applied, start.fleet)
    cfg = placed.cfg
    if found is not None:
        show(found, cfg, start)
    elif start.reward is not None:
        from rl.verification.verifiers.reward import reward

        cfg.verifier.set(scorer=reward(start.reward, cfg.tasks))
    if over:
        cfg.set(policies=swept(cfg, read_over(over)))
    if check_policies(cfg, runtime, ()):
        Console(stderr=how.as_json).print(plan_sheet(cfg).terminal(100))
    if how.plan_only:
        return print_plan(run.experiment or "start", placed, as_json=how.as_json)
    directory = default_run_dir(f"{run.experiment or ''}{'-sweep' if over else ''}", run.run_dir)
    start.check_export(directory, cfg)
    from mesh.programs.compilation import enable_compilation_cache
    from rl.runtime.run import RLRun

    one_device_per_core()
    enable_compilation_cache()
    job = RLRun(cfg.build())
    job.check(runtime, directory)
    shown = run.experiment == "demo" and runtime == "ray" and not cfg.policies
    kill = DEMO_KILL if how.kill_worker_after is None and shown else how.kill_worker_after
    settings = {"force": run.force, "progress": not run.quiet, "kill_worker_after": kill or None}
    left: Sequence[Failure] = trace
    if runtime == "ray":
        with many_imports():
            from rl.runtime.ray.command import begin_drivers

        left = begin_drivers(cfg, directory, trace, click.echo)
    report = job.run(directory, runtime=runtime, trace=left, **settings)
    if trace:
        _show_ettr(directory, trace)
    if report is not None:
        _show_report(directory)
        export(start, found, directory)
    if cfg.policies and _failed(directory):
        click.get_current_context().exit(1)


def _show_report(directory: Path) -> None:
    """Write the page of a finished run, and those of its policies, and print its tables."""
    from axlearn_like.run.directory import RunDirectory
    from tools.report import load_run, write_report
    from tools.report.table import print_tables

    loaded = load_run(RunDirectory.attach(directory).path)
    for policy in loaded.policies:
        write_report(policy)
    page: Path | str = write_report(loaded)
    if url := bucket_url(directory):
        Bucket(url, "--run-dir").put({"report.html": page})
        page = f"{url}/report.html"
    print_tables(loaded)
    click.echo(f"report: {page}")


def _show_ettr(directory: Path, trace: list[Failure]) -> None:
    """Write ettr.json, and print what the trace has cost beside what its simulation says."""
    import jax

    from rl.runtime.simulated.result import replayed_ettr

    jax.config.update("jax_platforms", "cpu")  # the roles have ended, and the simulation opens no other device
    click.echo("simulating the same failures by this run's durations")
    found = replayed_ettr(directory, trace)
    (directory / "ettr.json").write_text(json.dumps(found) + "\n")
    kills = f"{found['kills']} kill{'s' * (found['kills'] != 1)}"
    click.echo(
        f"ETTR {found['ettr']:.3f}, simulated {found['simulated']:.3f}: {found['updates']} updates in "
        f"{found['seconds']:.0f} s with {kills}, {found['update_seconds']:.2f} s each undisturbed"
    )


def _failed(directory: Path) -> bool:
    """Name the policies that have failed since the command began; returns True if there are any."""
    from axlearn_like.run.directory import RunDirectory
    from rl.runtime.policies.changes import failures

    found = failures(RunDirectory.attach(directory))
    for name, why in found.items():
        click.echo(printable(f"policy {name} failed: {why}"), err=True)
    return bool(found)
