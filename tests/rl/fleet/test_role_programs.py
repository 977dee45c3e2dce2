"""The programs of a role that are compiled before it starts are those that it calls."""

import os
from pathlib import Path
from typing import Any

import jax
import pytest

from mesh.programs import stored
from mesh.programs.executables import VARIABLE, find_executable, keep_executables
from rl.fleet.fleet import place
from rl.fleet.role_programs import role_programs
from tests.elsewhere import elsewhere
from tests.rl.runtime.ray.experiments import parameters, run_here
from tests.rl.training.scoring.test_reference_role import config


def shipped(path: str, kinds: list[str]) -> list[dict[str, list[bool]]]:
    """Return of each kind which of the programs that its run asked for were there."""
    jax.config.update("jax_num_cpu_devices", 2)
    return [_shipped(Path(path) / kind, kind) for kind in kinds]


def same_bits(path: str, kinds: list[str]) -> list[bool]:
    """Return of each kind if the run of `shipped` has the bits of one that compiled all."""
    jax.config.update("jax_num_cpu_devices", 2)
    found: list[bool] = []
    for kind in kinds:
        compiled = run_here(Path(path) / kind / "compiled", config(kind, Path(path) / kind, "cpu:1"))
        first, second = (parameters(run) for run in (compiled, Path(path) / kind / "loaded"))
        found.append(first == second)
    return found


def _shipped(path: Path, kind: str) -> dict[str, list[bool]]:
    path.mkdir()
    for role, device in zip(("trainer", "reference"), jax.devices(), strict=True):  # as in one process they have
        placed = place(config(kind, path, "cpu:1"))
        mesh, traces = role_programs(role, placed.cfg.build(), [device], placed.fleet.trainer.described)
        with jax.set_mesh(mesh):
            keep_executables([trace().lower() for trace in traces], [device], _folder(path, device))
    asked: dict[str, list[bool]] = {}

    def found(lowered: Any, devices: Any) -> Any:
        os.environ[VARIABLE] = str(_folder(path, devices[0]))
        program = find_executable(lowered, devices)
        name = lowered.as_text().split("@jit_", 1)[1].split()[0]
        asked.setdefault(name, []).append(program is not None)
        return program

    stored.find_executable = found
    os.environ[VARIABLE] = str(path)
    run_here(path / "loaded", config(kind, path, "cpu:1"))
    del os.environ[VARIABLE]
    return {name: one for name, one in asked.items() if name in ("logprobs", "score")}


def _folder(path: Path, device: Any) -> Path:
    """Return the folder of a role's programs: jax loads one on the device alone that it was compiled for."""
    return path / "programs" / str(device.id)


def test_a_trainer_and_its_reference_find_what_was_compiled_for_them(tmp_path: Path):
    """The trainer scores by either pass, and the reference by that of the update."""
    assert elsewhere(shipped, str(tmp_path), ["padded"]) == [{"logprobs": [True, True], "score": [True]}]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["packed", "penalty", "adapters", "teacher", "replayed"])
def test_so_they_do_with_packed_rows_another_model_and_whole_rollouts(tmp_path: Path, kind: str):
    (asked,) = elsewhere(shipped, str(tmp_path), [kind], timeout=280)
    assert len(asked) == 2 and all(all(one) for one in asked.values()), asked
    assert elsewhere(same_bits, str(tmp_path), [kind], timeout=280) == [True]
