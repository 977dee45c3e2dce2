"""Sweeps: what is tried, of supervised and RL experiments; what is refused; how the answer is drawn."""

import shlex
from typing import Any

import pytest

from axlearn_like.config import get_path, set_path
from experiments.registry import get
from mesh.topology import parse_topology
from rl.experiment import RLExperiment
from tests.elsewhere import elsewhere
from tests.mesh.described import described_mesh
from tests.tools.aot.test_aot import needs_compiler, run_cli, tiny
from tools.aot.candidates import candidates
from tools.aot.sweep import print_sweep

PLENTY = 1 << 35


def test_all_shapes_that_divide_are_tried():
    found = candidates(tiny(), parse_topology("v6e:2x2"), PLENTY)
    meshes = {tuple(one.mesh.items()) for one in found}
    two, four = (("data", 2), ("fsdp", 2), ("tensor", 2)), (("data", 4), ("fsdp", 4), ("tensor", 4))
    pairs = {(a, b) for i, a in enumerate(two) for b in two[i + 1 :]}
    assert meshes == pairs | {(one,) for one in four}
    assert {one.microbatches for one in found if one.mesh == {"fsdp": 4}} == {1, 2, 4}  # of 16 rows
    assert {one.microbatches for one in found if one.mesh == {"tensor": 4}} == {1, 2, 4, 8}


def test_what_is_tried_of_an_rl_experiment_are_its_own_fields_and_batches_divide():
    cfg = get("demo")
    assert isinstance(cfg, RLExperiment.Config)
    found = candidates(cfg, parse_topology("v6e:2x4"), PLENTY)
    assert len({str(one) for one in found}) == len(found) > 20
    for one in found:
        changed = one.applied(cfg)
        assert (changed.trainer.mesh, get_path(changed, "policy.remat")) == (one.mesh, one.remat)
        assert changed.trainer.microbatches == one.microbatches
        changed.trainer.check_rows(described_mesh(None, **one.mesh))


def result(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    same = {"slices": 1, "devices": 4, "available": 32 << 30, "error": (0.9, 1.5), "experiment": "a<b"}
    return {"topology": "v6e:2x2", **same, "tried": rows, "best": rows[0], **changes}


def row(mesh: dict[str, int], **changes: Any) -> dict[str, Any]:
    figures = {"fits": True, "needed": 16 << 30, "arguments": 4 << 30, "estimated_step_s": 2.0, "mfu_estimate": 0.4}
    return {"mesh": mesh, "remat": "context", "microbatches": 2, "exposed_s": 0.1, "set": [], **figures, **changes}


def test_the_best_is_printed_as_a_shell_takes_it(capsys):
    edits = ["trainer.mesh={'fsdp': 2, 'tensor': 2}", "policy.remat=context"]
    print_sweep(result([row({"fsdp": 4}, set=edits)]))
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words == ["best:", "--set", edits[0], "--set", edits[1]]
    cfg = get("demo")
    for edit in words[2::2]:
        set_path(cfg, *edit.split("=", 1))
    assert get_path(cfg, "trainer.mesh") == {"fsdp": 2, "tensor": 2}


@pytest.mark.full
@needs_compiler
def test_an_rl_experiment_is_swept():
    words = ["demo", "--topology", "v6e:2x2", "--sweep", "--sweep-limit", "2", "--json"]
    found = elsewhere(run_cli, words, timeout=280)["json"]
    assert found["experiment"] == "demo" and [one["fits"] for one in found["tried"]] == [True, True]
    assert all(any(edit.startswith("trainer.mesh=") for edit in one["set"]) for one in found["tried"])
    assert found["best"] == min(found["tried"], key=lambda one: one["estimated_step_s"])
