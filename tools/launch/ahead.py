"""Programs of trainer, engines and reference, compiled where the run is submitted, to travel with the code.

    python -m tools.launch.ahead FOLDER < ASKED.json

It is a process of its own, for a TPU's compiler and CPUs that stand in for one are chosen before jax is imported. What
the run lowers to another program, by other versions say, is compiled there as ever.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axlearn_like.run.scratch import scratch
from mesh import UserError
from tools.launch.launch import Launch
from tools.launch.plan import LaunchPlan, Role

_ROOT = Path(__file__).parents[2]


def compile_ahead(cfg: Launch.Config, plan: LaunchPlan) -> dict[str, bytes]:
    """Return the executables of trainer, workers and reference by the names of their files.

    Raises:
        UserError: it is not a trainer's run, there is no compiler for its devices, or compiling fails.
    """
    roles = [role for role in plan.roles if role.name in ("trainer", "worker", "reference")]
    fits = bool(roles) and all(role.slices is not None for role in roles)
    cfg.require("compile", fits, "False: a command has no trainer to compile")
    found: dict[str, bytes] = {}
    for role in roles:
        found |= _compiled(cfg, plan, role)
    return found


def _compiled(cfg: Launch.Config, plan: LaunchPlan, role: Role) -> dict[str, bytes]:
    """Return the executables of a role, by a process that has its devices, or their description."""
    assert role.slices is not None
    slices = role.slices
    local = cfg.on == "local"
    cfg.require("compile", local or not slices.gpus, "False: programs for GPUs are compiled where those are")
    asked: dict[str, Any] = {"experiment": cfg.experiment, "seed": cfg.seed, "applied": cfg.applied, "role": role.name}
    asked |= {"sets": plan.sets, "fleet": plan.fleet, "topology": slices.text, "slices": slices.count}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)}
    if local:
        one = role.jobs * role.pods == 1
        cfg.require("compile", one, f"False, or a {role.name} of one process, with --on local")
        asked["topology"] = None
        environment["JAX_NUM_CPU_DEVICES"] = str(slices.devices.each_host)
    with scratch("ahead") as folder:
        command = [sys.executable, "-m", "tools.launch.ahead", str(folder)]
        given = json.dumps(asked)
        done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True)
        if done.returncode:
            said = "".join(done.stderr.strip().splitlines()[-1:])
            raise UserError(f"launch.compile=True: the {role.name} cannot be compiled here: {said}")
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _devices(asked: dict[str, Any]) -> list[Any]:
    """Return the devices to compile for: those of a topology that is not there, or this process's."""
    import jax

    from mesh.topology import parse_topology, prepare_compiler, topology_devices

    if asked["topology"] is None:
        return jax.devices()
    prepare_compiler()
    return topology_devices(parse_topology(asked["topology"], asked["slices"]))


def _traces(asked: dict[str, Any], devices: list[Any]) -> tuple[Any, list[Callable[[], Any]]]:
    """Return the mesh of a role, and functions that trace its programs."""
    name, sets, seed, applied = (asked[key] for key in ("experiment", "sets", "seed", "applied"))
    if asked["fleet"] is not None:
        from rl.fleet.role_programs import role_programs
        from tools.fleet import load_placed

        placed = load_placed(name, sets, seed, applied, asked["fleet"])
        return role_programs(asked["role"], placed.cfg.build(), devices, placed.fleet.trainer.described)
    from mesh.devices import device_name
    from tools.experiment import load_experiment

    experiment: Any = load_experiment(name, sets, seed, device=lambda: device_name(devices), applied=applied)
    program = experiment.programs(devices)["train"]()
    return program.mesh, [program.trace]


def main(folder: Path) -> None:
    """Compile the programs of a role into a folder."""
    asked = json.load(sys.stdin)
    import jax

    from mesh.programs.executables import keep_executables

    mesh, traces = _traces(asked, _devices(asked))
    with jax.set_mesh(mesh):
        keep_executables([trace().lower() for trace in traces], list(mesh.devices.flat), folder)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(f"axl: {error}")
