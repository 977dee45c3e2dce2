"""An RL experiment on a fleet from the arguments of a command line, and its plan on the console."""

import dataclasses
import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from axlearn_like.config import ConfigBase
from rl.experiment import RLExperiment
from rl.fleet.devices import HERE
from rl.fleet.fleet import Placed, place, refuse_idle
from rl.fleet.plan import FleetPlan, RolePlan, plan_fleet, refuse
from tools.experiment import Chosen, Edits, Modifiers, choose, edit_experiment

_GIB = 1 << 30


def load_placed(
    name: str | ConfigBase,
    sets: Edits,
    seed: int | None,
    applied: Modifiers,
    fleet: str | None,
) -> Placed[RLExperiment.Config]:
    """Return an experiment on its fleet: devices, mesh rules by role, modifiers, then the edits `sets`.

    Args:
        seed: passed to the experiment's function if not None.
        fleet: roles and devices that replace those of the experiment's `fleet`.

    Raises:
        UserError: it is no RL experiment, there are no such devices, or an edit does not fit.
    """
    return on_fleet(choose(name, sets, seed, applied), fleet)


def on_fleet(chosen: Chosen, fleet: str | None = None) -> Placed[RLExperiment.Config]:
    """Return an experiment on its fleet; see `load_placed`."""
    cfg = chosen.for_command("rl")
    if fleet is not None:
        cfg.fleet = cfg.fleet.edited(fleet)
    there = cfg.fleet.build()
    placed: Any = place(chosen.fitted(cfg, there.trainer.name, there))
    edit_experiment(placed.cfg, *chosen.edits)
    placed = dataclasses.replace(placed, fleet=placed.cfg.fleet.build())  # an edit may name devices, too
    refuse_idle(placed)
    return placed


def print_plan(name: str, placed: Placed[RLExperiment.Config], *, as_json: bool) -> None:
    """Print the plan of an experiment, with `as_json` one JSON object as the last line.

    Raises:
        UserError: the fleet cannot run it; after the plan is printed.
    """
    plan = plan_fleet(placed)
    data = plan.as_dict()
    console = Console(stderr=as_json)
    console.print(f"{name}: {data['hosts']} hosts, {data['chips']} chips, {data['processes']} processes")
    console.print(_roles(plan))
    gib = {name: f"{size / _GIB:.2f} GiB" for name, size in data["bytes"].items()}
    console.print(f"a push is {gib['push']}, {gib['push_per_host']} of each of the trainer's hosts")
    each = f", {gib['pull_per_host']} of each of its hosts" if plan.worker.devices.hosts > 1 else ""
    console.print(f"a pull is {gib['pull']} a worker{each}, {gib['pulls_of_all_workers']} of all together")
    if data["bytes"]["frozen"]:
        console.print(f"the first push, and each worker's first pull, are {gib['frozen']} of frozen parameters more")
    if plan.reference is not None:
        console.print(f"the reference reads {gib['reference']} of weights when it starts, and tokens of each update")
    console.print("controller, parameter server and verifier use CPUs")
    if as_json:
        click.echo(json.dumps({"experiment": name, **data}))
    refuse(plan)


def _roles(plan: FleetPlan) -> Table:
    table = Table("role", "devices", "hosts", "processes", "mesh", "GiB of a device", box=None, pad_edge=False)
    for role in plan.roles:
        number = f"{role.instances} x " if role.instances > 1 else ""
        mesh = " x ".join(f"{axis} {size}" for axis, size in role.mesh.items()) or "one device"
        devices = "this machine" if role.devices.text == HERE else role.devices.text
        hosts = f"{number}{role.devices.hosts}" if role.devices.text != HERE else "1"
        name = f"{role.role} ({role.standby} standby)" if role.standby else role.role
        table.add_row(name, f"{number}{devices}", hosts, f"{number}{role.processes}", mesh, _memory(role))
    return table


def _memory(role: RolePlan) -> str:
    lines = [f"{name} {size / _GIB:.2f}" for name, size in role.holds.items()]
    lines += [
        f"program {name} {role.needed(name) / _GIB:.2f} of {program.available / _GIB:.2f}"
        for name, program in role.programs.items()
    ]
    return "\n".join(lines)
