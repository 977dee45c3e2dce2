"""A trainer with replicas: the curve of one without, checkpoints that know nothing of them, plans by counts."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.moe.experts import Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.replicas import Replicas
from axlearn_like.training.trainer import Trainer
from mesh import make_mesh
from tests.axlearn_like.layers.moe.test_moe_mesh import QUICK
from tests.axlearn_like.tiny import tiny_model, tiny_trainer
from tests.bounds import within
from tests.elsewhere import elsewhere

PLAN = Replicas.Config(slots=1, every=3)


def trainer(steps: int, replicas: Replicas.Config | None = None, **changes: Any) -> Trainer.Config:
    model = tiny_model()
    assert isinstance(model.block, Block.Config)
    router = SoftmaxRouter.Config(top_k=2, load_balance=0.01)
    model.block.feed_forward = MoE.Config(num_experts=8, router=router, experts=Experts.Config(hidden=8))
    mesh = {"expert": 4, "fsdp": 2}
    return tiny_trainer(steps, model=model, mesh=mesh, evaluators=(), replicas=replicas, microbatches=1, **changes)


def curves(cut: bool) -> dict[str, Any]:
    """The losses of runs with and without replicas, whole and maybe cut in the middle, and what was planned."""
    jax.config.update("jax_num_cpu_devices", 8)
    folder = Path(tempfile.mkdtemp())

    def run(name: str, cfg: Trainer.Config, *, after: str | None = None) -> list[float]:
        if after is not None:
            shutil.copytree(folder / after, folder / name)
        cfg.build().run(folder / name, progress=False, force=True)
        return [row["loss"] for row in read_rows(folder / name / "metrics.jsonl")]

    found: dict[str, Any] = {"without": run("without", trainer(8)), "with": run("with", trainer(8, PLAN))}
    if cut:
        run("half", trainer(4, PLAN))
        run("plain_half", trainer(4))
        found["resumed"] = run("resumed", trainer(8, PLAN), after="half")
        found["dropped"] = run("dropped", trainer(8), after="half")
        found["taken_up"] = run("taken_up", trainer(8, PLAN), after="plain_half")
    found["columns"] = sorted(read_rows(folder / "with" / "metrics.jsonl")[-1])
    found["events"] = [row for row in read_rows(folder / "with" / "events.jsonl") if "replicas" in row["event"]]
    shutil.rmtree(folder)
    return found


def assert_curve(found: dict[str, Any], name: str) -> None:
    apart = np.abs(np.array(found[name]) / np.array(found["without"]) - 1)
    assert within(float(apart.max()), 1e-5) and len(apart) == 8


@pytest.mark.full
@pytest.mark.numerics
def test_checkpoints_resume_with_replicas_or_without_them():
    found = elsewhere(curves, True, environ=QUICK)
    for name in ("with", "resumed", "dropped", "taken_up"):
        assert_curve(found, name)
    assert found["resumed"] == found["with"]  # to the bit, and a plan was made in between


@pytest.mark.numerics
def test_curves_are_those_without_replicas():
    found = elsewhere(curves, False, environ=QUICK)
    assert_curve(found, "with")
    assert not any(name.endswith("_by_layer") for name in found["columns"])
    began, *planned = found["events"]
    assert began["slots"] == 12
    assert [row["step"] for row in planned] == [3, 6]
    for row in planned:
        assert row["busiest_to_mean"] <= row["busiest_to_mean_before"]
        assert row["busiest_to_mean"] < row["busiest_to_mean_without"]
        assert row["most_replicas"] >= 2


def test_what_has_nothing_to_place_is_refused():
    mesh = make_mesh({}, jax.devices()[:1])
    layout = trainer(1).routing_layout
    assert layout is not None and (layout.num_layers, layout.num_experts) == (2, 8)
    with pytest.raises(ConfigError, match="slots.*axis expert of 2 devices"):
        PLAN.check_layout(layout, mesh)
    with pytest.raises(ConfigError, match="slots.*mixtures of experts"):
        PLAN.check_layout(tiny_trainer(1).routing_layout, mesh)
    with pytest.raises(ConfigError, match="every.*1 or more"):
        PLAN.clone(every=0).check_fields()
