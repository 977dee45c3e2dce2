"""`axl launch EXPERIMENT`: what running it on a cluster takes, manifests that ask for it, and their submission."""

from __future__ import annotations

import json
import math
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.registry import check_name
from mesh.errors import UserError, did_you_mean
from tools.experiment import LocalPath, edit_options
from tools.launch.control.commands import COMMANDS

if TYPE_CHECKING:
    from tools.launch.launch import Launch
    from tools.launch.plan import LaunchPlan, Role

TARGETS = ("gke", "queued-resource", "slurm", "local")
_ABSENT = {  # said by name, as others may look for them
    "gce": "Compute Engine is not supported: --on gke has GPUs and every kind of TPU, and --on queued-resource "
    "v4, v5e, v5p and v6e without a cluster",
    "ray": "KubeRay is not supported: --on gke starts the Ray cluster of a run by itself",
}
_PREFIX = "launch."  # prefix of edits of the submission, not of the experiment
_GIB = 1 << 30
_HERE = {"devices": "v6e:1x1", "storage": "dir:runs"}  # defaults on this machine
_WORKERS = 2


_WORDS = "axl.launch.words"  # key of the command after -- in a context's meta


class LaunchCommand(click.Command):
    """`axl launch EXPERIMENT`, `axl launch -- COMMAND`, and `axl launch status RUN` and the like."""

    def make_context(self, info_name: str | None, args: list[str], *given: Any, **extra: Any) -> click.Context:
        """Take the first argument for a subcommand if there is one of that name; what follows -- is another command."""
        if args and args[0] in COMMANDS:
            return COMMANDS[args[0]].make_context(f"{info_name} {args[0]}", args[1:], *given, **extra)
        cut = args.index("--") if "--" in args else len(args)
        context = super().make_context(info_name, args[:cut], *given, **extra)
        context.meta[_WORDS] = tuple(args[cut + 1 :]) if cut < len(args) else None
        return context


@click.command("launch", cls=LaunchCommand)
@partial(edit_options, required=False)
@click.option("--on", "target", default="gke", show_default=True, help="gke, queued-resource, slurm or local.")
@click.option(
    "--tpu", "--gpu", "devices", metavar="KIND:SIZE", help="Devices of the trainer or command: v5p:4x4x4, h100:8."
)
@click.option(
    "--slices", type=int, metavar="N", help="Slices, or groups of GPU machines, of the trainer.  [default: 1]"
)
@click.option("--capacity", metavar="TERMS", help="Terms: on-demand, spot, reserved:NAME, flex.  [default: on-demand]")
@click.option("--workers", type=int, metavar="K", help="Rollout workers of an RL run.")
@click.option(
    "--worker-tpu", "--worker-gpu", "worker_devices", metavar="KIND:SIZE", help="Devices of each worker: v6e:2x2."
)
@click.option("--worker-capacity", metavar="TERMS", help="Terms of the workers' machines.  [default: the trainer's]")
@click.option(
    *("--reference-tpu", "--reference-gpu", "reference_devices"),
    metavar="KIND:SIZE",
    help="Devices of a reference policy that is to be a role alone.",
)
@click.option("--reference-capacity", metavar="TERMS", help="Terms of its machines.  [default: the workers']")
@click.option("--queue", metavar="NAME", help="Queue of Kueue.")
@click.option("--storage", metavar="PLACE", help="gs://BUCKET/FOLDER, pvc:CLAIM/FOLDER, dir:PATH.  [default: pvc:axl]")
@click.option("--name", help="Name of the run.  [default: the experiment's or command's]")
@click.option("--seed", type=int, help="The experiment's argument `seed`.")
@click.option("--price", type=float, help="Price of a trainer's chip for an hour, for the plan.")
@click.option("--worker-price", type=float, help="Price of a worker's chip for an hour.  [default: the trainer's]")
@click.option("--reference-price", type=float, help="Price of the reference's chip.  [default: a worker's]")
@click.option("--dry-run", type=LocalPath(path_type=Path), metavar="DIR", help="Write everything there; ask no cloud.")
@click.option("--wait", is_flag=True, help="Return when the run has ended, with exit status 1 if it has failed.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object on the last line.")
def command(
    experiment: str | None,
    sets: tuple[str, ...],
    applied: tuple[str, ...],
    target: str,
    dry_run: Path | None,
    wait: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run EXPERIMENT on TPUs or GPUs, or on this machine as there (--on local).

    `axl launch [OPTIONS] -- COMMAND ...` runs any other command of axl there: eval, convert, data, bench ... One
    without --tpu or --gpu gets a machine without accelerators.

    `axl launch status|logs|stop|add-worker RUN` looks at a run, ends it, or adds workers. The plan says hosts, chips,
    mesh and whether it fits, by the mesh rules of the target. Manifests, the code in use and a script that submits
    them are written to --dry-run DIR, without a cloud's library or credentials. Without it the run is submitted; the
    same submission resumes a run that has ended. EXPERIMENT may be FILE.py:FUNCTION that returns a Launch.Config;
    options given here replace its fields. --set launch.PATH=VALUE changes the submission (launch.image=...,
    launch.kubernetes.namespace=...).
    """
    words: tuple[str, ...] | None = click.get_current_context().meta[_WORDS]
    _check_names(experiment, words, target)
    from tools.launch.control.handle import keep, launch
    from tools.launch.plan import plan_launch, refuse
    from tools.launch.submission import submission, write

    if words is not None:
        options["command"] = words
    cfg = launch_config(experiment, sets, applied, on=target, **options)
    plan = plan_launch(cfg)
    for line in plan_lines(plan):
        click.echo(line, err=as_json)
    if as_json and plan.refusals:
        click.echo(json.dumps(plan.as_dict()))
    refuse(plan)
    say = partial(click.echo, err=as_json)
    if dry_run is None and cfg.on == "slurm":
        from tools.launch.slurm.jobs import submit

        cfg.require("on", not wait, "another target with --wait: a job of Slurm outlives its limits of time")
        submit(cfg, plan, *submission(cfg, plan), say)
    elif dry_run is None:
        run = launch(cfg, plan, say)
        if cfg.on == "queued-resource":
            if wait:
                keep(cfg, plan, say)
        elif wait and any(one.state != "completed" for one in run.wait(say=say)):
            click.get_current_context().exit(1)
    else:
        files, bundle = submission(cfg, plan)
        write(dry_run, files, bundle)
        if bundle is not None:
            say(bundle.summary)
        say(f"written to {dry_run}: {', '.join(sorted(files))}; nothing was submitted")
    if as_json:
        click.echo(json.dumps(plan.as_dict()))


def _check_names(experiment: str | None, words: tuple[str, ...] | None, target: str) -> None:
    """Refuse what is not there before anything is imported (UserError)."""
    if (experiment is None) == (words is None):
        raise UserError("axl launch: expected EXPERIMENT, or -- and another command, such as -- eval RUN")
    if experiment is not None:
        check_name(experiment)
    if target in _ABSENT:
        raise UserError(f"--on {target}: {_ABSENT[target]}")
    if target not in TARGETS:
        raise UserError(f"--on {target!r}: no such target{did_you_mean(target, TARGETS)}")


def launch_config(
    experiment: str | None, sets: tuple[str, ...], applied: tuple[str, ...], queue: str | None = None, **options: Any
) -> Launch.Config:
    """Return the config of a submission: that of a function, of an experiment or of a command, with these options.

    Raises:
        UserError: an option or an edit does not fit, or a device is missing.
    """
    from tools.experiment import apply_edits, load_experiment
    from tools.launch.launch import DEVICES, Launch

    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    own = [edit.removeprefix(_PREFIX) for edit in sets if edit.startswith(_PREFIX)]
    others = tuple(edit for edit in sets if not edit.startswith(_PREFIX))
    found: Any = load_experiment(experiment) if experiment is not None and ":" in experiment else None
    if given.get("on") == "slurm":
        given = {"storage": _HERE["storage"], **given}
    if given.get("on") == "local" and not isinstance(found, Launch.Config):
        given = _here(experiment, given)
    if isinstance(found, Launch.Config):
        found.set(sets=(*found.sets, *others), applied=(*found.applied, *applied), **given)
    elif experiment is not None and "devices" not in given:
        raise UserError(f"axl launch: expected {DEVICES} for the trainer, such as --tpu v5p:4x4x4 or --gpu h100:8")
    else:
        found = Launch.Config(experiment=experiment, sets=others, applied=applied, **given)
    if queue is not None:
        found.kubernetes.queue = queue
    apply_edits(found, own, _PREFIX)
    return found


def _here(experiment: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return options for this machine: one device a role, in `runs`, and two workers for an RL experiment."""
    from tools.experiment import load_experiment

    if experiment is None:
        return {"storage": _HERE["storage"], **given}
    known = getattr(load_experiment(experiment), "commands", tuple)()
    if known[:1] == ("rl",):
        return {"workers": _WORKERS, "worker_devices": _HERE["devices"], **_HERE, **given}
    return {**_HERE, **given}


def plan_lines(plan: LaunchPlan) -> list[str]:
    """Return the plan as lines for a reader."""
    data = plan.as_dict()
    cost = "" if plan.cost is None else f", {plan.cost:,.2f} an hour at the price given"
    lines = [f"{plan.name}: {data['hosts']} hosts, {data['chips']} chips, {data['processes']} processes{cost}"]
    if plan.words:
        return [*lines, *(_command_line(role, plan.words) for role in plan.roles)]
    lines += [_role_line(role) for role in plan.roles]
    if plan.refusals:
        return lines
    return [
        *lines,
        "by arithmetic of what a device keeps all the time, it fits; `axl aot` asks the compiler for a step",
    ]


def _command_line(role: Role, words: tuple[str, ...]) -> str:
    machine = "one machine without accelerators"
    if role.slices is not None:
        machine = f"{role.slices}, 1 x {role.slices.machine_type}"
    return (
        f"  {shlex.join(['axl', *words])}: {machine}, {role.capacity.kind}; what it needs of memory is not known here"
    )


def _role_line(role: Role) -> str:
    number = f"{role.count} x " if role.count > 1 else ""
    if role.slices is None:
        return f"  {role.name}: one machine without accelerators, {role.memory_gib} GiB, {role.capacity.kind}"
    mesh = " x ".join(f"{axis} {size}" for axis, size in role.mesh.items()) or "one device"
    held = " + ".join(f"{name} {size / _GIB:.2f}" for name, size in role.holds.items())
    used, there = math.prod(role.mesh.values()), len(role.slices.devices.described)
    unused = f" ({used} of {there} devices: the others are not used)" if used < there else ""
    machines = f"{role.jobs * role.pods} x {role.slices.machine_type}"
    return (
        f"  {role.name}: {number}{role.slices}, {machines}, {role.capacity.kind}; mesh {mesh}{unused}; "
        f"a device keeps {held} of {role.device_memory / _GIB:.2f} GiB"
    )
