"""Dry runs of every experiment on every target: tests/tools/launch/test_every.py compares them.

    python -m tests.golden.launch.every             # those that are not stored yet, or whose experiment is gone
    python -m tests.golden.launch.every NAME ...    # these
    python -m tests.golden.launch.every --render    # all files again, of the plans as they are stored

An experiment runs on the smallest slice for which it has a mesh rule. What is stored of its plan is what its files are
made of, so that they can be compared without planning. A target has one text: all files of an RL experiment and of a
trainer, and of the others the lines in which they differ, with NAME for the name of each.
"""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from experiments.registry import entries, get
from mesh import UserError
from mesh.generations import GENERATIONS
from mesh.topology import parse_topology
from tests.golden.launch.manifests import DIGEST, DIRECTORY
from tests.golden.rules import smallest_slice
from tools.experiment import commands_of
from tools.launch.launch import Launch, TpuApi
from tools.launch.plan import LaunchPlan, Role, plan_launch
from tools.launch.submission import render

FOLDER = DIRECTORY / "every"
PLANS = FOLDER / "plans.json"
_FIRST = {True: "demo", False: "demo_sft"}  # whose files are stored as a whole: of RL experiments, and of trainers
_WORKERS = {"qwq_32b_rl": "v5p:2x2x2"}  # slices of workers that are not the trainer's
_KINDS = ("v6e", "v5p", *GENERATIONS)  # in the order in which a slice is looked for
TARGETS: dict[str, dict[str, Any]] = {
    "gke": {},
    "queued-resource": {"tpu_api": TpuApi.Config(project="mine", zone="us-east5-a")},
    "local": {"storage": "dir:/runs"},
}

Stored = dict[str, Any]


def config(name: str, stored: Stored) -> Launch.Config:
    """Return the submission of an experiment; an RL run has two workers on spot machines."""
    given: dict[str, Any] = {"devices": stored["tpu"], "storage": "gs://bucket/runs"}
    if "worker_tpu" in stored:
        given |= {"workers": 2, "worker_devices": stored["worker_tpu"], "worker_capacity": "spot"}
    return Launch.Config(experiment=name, **given)


def planned(name: str) -> Stored:
    """Plan an experiment; a refusal is stored, too."""
    found: Any = get(name)
    topology = next(filter(None, (smallest_slice(found, kind) for kind in _KINDS)), parse_topology("v6e:1x1"))
    stored: Stored = {"tpu": topology.name}
    if commands_of(found)[:1] == ("rl",):
        stored["worker_tpu"] = _WORKERS.get(name, topology.name)
    try:
        plan = plan_launch(config(name, stored))
    except UserError as error:
        return {**stored, "refused": str(error).splitlines()[0].replace(f"{Path.cwd()}/", "")}
    if plan.refusals:
        return {**stored, "refused": plan.refusals[0]}
    roles = {role.name: {"mesh": role.mesh, "memory_gib": role.memory_gib} for role in plan.roles}
    return {**stored, "sets": list(plan.sets), "fleet": plan.fleet, "roles": roles}


def rendered(plans: dict[str, Stored]) -> dict[str, str]:
    """Return the text of each target."""
    return {target: "".join(_sections(plans, target)) for target in TARGETS}


def _sections(plans: dict[str, Stored], target: str) -> Iterator[str]:
    refused = {name: one["refused"] for name, one in plans.items() if "refused" in one}
    for rl, first in _FIRST.items():
        several = {name: one for name, one in plans.items() if ("worker_tpu" in one) == rl and name not in refused}
        whole, same = _files(first, several.pop(first), target), [first]
        yield f"==> {first} <==\n{whole}"
        for name, one in several.items():
            if (text := _files(name, one, target)) == whole:
                same.append(name)
                continue
            yield f"==> {name}, where it is not as {first} <==\n"
            changes = difflib.unified_diff(whole.splitlines(), text.splitlines(), lineterm="", n=0)
            yield from (f"{line}\n" for line in changes if not line.startswith(("---", "+++", "@@")))
        yield f"==> as {first} <==\n" + "\n".join(same[1:]) + "\n"
    yield "==> refused <==\n" + "".join(f"{name}: {why}\n" for name, why in refused.items())


def _files(name: str, stored: Stored, target: str) -> str:
    """Return all files for a target, or why it refuses the run."""
    cfg = config(name, stored).clone(on=target, **TARGETS[target])
    try:
        files = render(cfg, _plan(cfg, stored), DIGEST)
    except UserError as error:
        files = {"refused": f"{error}\n"}
    if (script := files.get("startup.sh")) is not None:  # it is in the request as well, on a line
        files = {file: content.replace(json.dumps(script), '"that of startup.sh"') for file, content in files.items()}
    text = "".join(f"--> {file} <--\n{content}" for file, content in files.items())
    return text.replace(cfg.run_name, "NAME").replace(name, "NAME")


def _plan(cfg: Launch.Config, stored: Stored) -> LaunchPlan:
    command = "rl" if "worker_tpu" in stored else "train"
    roles = tuple(_role(cfg, name, **one) for name, one in stored["roles"].items())
    return LaunchPlan(cfg.run_name, command, None, tuple(stored["sets"]), stored["fleet"], roles, (), 0.0)


def _role(cfg: Launch.Config, name: str, *, mesh: dict[str, int], memory_gib: int) -> Role:
    count = cfg.workers if name == "worker" else 1
    slices = None if name == "head" else cfg.slices_of("worker") if name == "worker" else cfg.slices_of("trainer")
    return Role(name, count, cfg.terms(name), slices, mesh, memory_gib=memory_gib)


def load() -> dict[str, Stored]:
    """Return the stored plans."""
    return json.loads(PLANS.read_text()) if PLANS.exists() else {}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--render", "again", is_flag=True, help="Files of all stored plans again.")
def main(names: tuple[str, ...], again: bool) -> None:
    """Plan experiments, and write all files."""
    stored = {name: one for name, one in load().items() if name in entries()}
    for name in names or ([] if again else [name for name in entries() if name not in stored]):
        stored[name] = planned(name)
        click.echo(f"{name}: {stored[name]}")
    plans = dict(sorted(stored.items()))
    FOLDER.mkdir(exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in plans.items()]  # an experiment a line
    PLANS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for target, text in rendered(plans).items():
        (FOLDER / f"{target}.txt").write_text(text)


if __name__ == "__main__":
    main()
