"""The programs of a role that are compiled before it starts are those that it calls."""

import os
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.modifiers import exact_kl
from mesh.programs import stored
from mesh.programs.executables import VARIABLE, executable_name, find_executable, keep_executables
from rl.fleet.fleet import place
from rl.fleet.role_programs import role_programs
from rl.objective.presets import grpo
from tests.elsewhere import elsewhere
from tests.rl.runtime.ray.experiments import parameters, run_here
from tests.rl.training.critic.test_separate import with_critic
from tests.rl.training.scoring.test_reference_role import config

ALONE = ("critic", "exact KL", "scored by the trainer")  # without a reference role


def experiment(kind: str, path: Path) -> Any:
    """Return two updates with a reference on a device of its own, or the trainer's with a teacher or a critic."""
    if kind == "critic":
        return with_critic().set(num_steps=2, evaluation=None)
    if kind == "exact KL":
        cfg = config("padded", path).set(objective=grpo(kl_coef=0.5))
        exact_kl(cfg)
        return cfg
    return config("teacher", path) if kind in ALONE else config(kind, path, "cpu:1")


def shipped(path: str, kinds: list[str], compiled: bool) -> list[dict[str, list[bool]]]:
    """Return of each kind which of the programs that its run asked for were there, or by name if none is `compiled`."""
    jax.config.update("jax_num_cpu_devices", 2)
    return [_shipped(Path(path) / kind, kind, compiled) for kind in kinds]


def same_bits(path: str, kinds: list[str]) -> list[bool]:
    """Return of each kind if the run of `shipped` has the bits of one that compiled all."""
    jax.config.update("jax_num_cpu_devices", 2)
    found: list[bool] = []
    for kind in kinds:
        compiled = run_here(Path(path) / kind / "compiled", experiment(kind, Path(path) / kind))
        first, second = (parameters(run) for run in (compiled, Path(path) / kind / "loaded"))
        found.append(first == second)
    return found


def _shipped(path: Path, kind: str, compiled: bool) -> dict[str, list[bool]]:
    path.mkdir()
    names: dict[int, set[str]] = {}  # by device, for roles may have the same
    roles = ("trainer",) if kind in ALONE else ("trainer", "reference")
    for role, device in zip(roles, jax.devices(), strict=False):  # as in one process they have
        placed = place(experiment(kind, path))
        mesh, traces = role_programs(role, placed.cfg.build(), [device], placed.fleet.trainer.described)
        with jax.set_mesh(mesh):
            lowered = [trace().lower() for trace in traces]
            names[device.id] = {executable_name(one, [device]) for one in lowered}
            if compiled:
                keep_executables(lowered, [device], _folder(path, device))
    asked: dict[str, list[bool]] = {}

    def found(lowered: Any, devices: Any) -> Any:
        os.environ[VARIABLE] = str(_folder(path, devices[0]))
        program = find_executable(lowered, devices) if compiled else None
        name = lowered.as_text().split("@jit_", 1)[1].split()[0]
        if not name.startswith("run_"):  # of an engine
            known = program is not None if compiled else executable_name(lowered, devices) in names[devices[0].id]
            asked.setdefault(name, []).append(known)
        return program

    stored.find_executable = found
    os.environ[VARIABLE] = str(path)
    run_here(path / "loaded", experiment(kind, path))
    del os.environ[VARIABLE]
    return asked


def _folder(path: Path, device: Any) -> Path:
    """Return the folder of a role's programs: jax loads one on the device alone that it was compiled for."""
    return path / "programs" / str(device.id)


def test_a_trainer_and_its_reference_find_what_was_compiled_for_them(tmp_path: Path):
    """The trainer scores by either pass, and the reference by that of the update."""
    assert elsewhere(shipped, str(tmp_path), ["padded"], False) == [{"logprobs": [True, True], "score": [True]}]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["padded", "packed", "penalty", "adapters", "teacher", "replayed", *ALONE])
def test_so_they_do_with_packed_rows_another_model_and_whole_rollouts(tmp_path: Path, kind: str):
    (asked,) = elsewhere(shipped, str(tmp_path), [kind], True, timeout=280)
    assert len(asked) >= 2 and all(all(one) for one in asked.values()), asked
    assert elsewhere(same_bits, str(tmp_path), [kind], timeout=280) == [True]
