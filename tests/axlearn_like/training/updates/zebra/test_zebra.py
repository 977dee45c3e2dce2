"""A trainer with zebra: refusals, the curve of one mesh, checkpoints that know nothing of groups."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.block_pattern import BlockPattern
from axlearn_like.layers.decoder import Block, SandwichBlock
from axlearn_like.learner import EMA, Muon, ParameterGroup
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.alignment.kto import KTO
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.replicas import Replicas
from axlearn_like.training.trainer import Trainer
from axlearn_like.training.updates.zebra.zebra import Zebra, ZebraTimes
from mesh.mesh import PlaceholderDevice
from tests.axlearn_like.layers.moe.test_moe_mesh import QUICK
from tests.axlearn_like.tiny import tiny_model
from tests.axlearn_like.training.updates.zebra.test_step import mixture, trainer
from tests.bounds import within
from tests.elsewhere import elsewhere

ZEBRA = Zebra.Config(mesh={"expert": 1}, microbatches=2, moved=(1, 0))
TIMES = ZebraTimes.Config(attention_s=3.0, experts_s=4.0, own_s=4.0, bandwidth=1e9)
FOUR = [PlaceholderDevice() for _ in range(4)]


def curves() -> dict[str, Any]:
    """The curves of runs on one mesh and on two groups, whole and resumed, with any way to go on."""
    jax.config.update("jax_num_cpu_devices", 2)
    folder = Path(tempfile.mkdtemp())

    def run(name: str, steps: int, *, after: str | None = None, **changes: Any) -> list[float]:
        if after is not None:
            shutil.copytree(folder / after, folder / name)
        cfg = trainer(mixture(aux=0.01), num_steps=steps, **changes)
        held_out = LossEvaluator.Config(input=cfg.input.clone(seed=9), batches=1, every=4, averaged=True)
        cfg.set(learner=cfg.learner.clone(ema=EMA.Config()), evaluators=(held_out,))
        cfg.build().run(folder / name, progress=False, force=True)
        rows = read_rows(folder / name / "metrics.jsonl")
        return [row["loss"] for row in rows] + [rows[-1]["eval_averaged_loss"]]

    found: dict[str, Any] = {"one": run("one", 8, microbatches=2), "zebra": run("zebra", 8, zebra=ZEBRA)}
    run("half", 4, zebra=ZEBRA)
    run("one_half", 4, microbatches=2)
    found["resumed"] = run("resumed", 8, after="half", zebra=ZEBRA)
    found["joined"] = run("joined", 8, after="half", microbatches=2)
    found["parted"] = run("parted", 8, after="one_half", zebra=ZEBRA.clone(moved=None, times=TIMES))
    found["compiled"] = [row["event"] for row in read_rows(folder / "zebra" / "events.jsonl")].count("compile")
    found["events"] = [
        row for name in ("zebra", "parted") for row in read_rows(folder / name / "events.jsonl") if "moved" in row
    ]
    shutil.rmtree(folder)
    return found


@pytest.mark.full
@pytest.mark.numerics
def test_a_run_has_the_curve_of_one_mesh_and_goes_on_there_or_here():
    found = elsewhere(curves, environ=QUICK)
    assert found["resumed"] == found["zebra"]  # to the bit
    for name in ("zebra", "joined", "parted"):
        apart = np.abs(np.array(found[name]) / np.array(found["one"]) - 1)
        assert within(float(apart.max()), 1e-4) and len(apart) == 9
    assert found["compiled"] == 1
    assert [row["moved"] for row in found["events"]] == [[1, 0], [0, 1]]
    assert "break-even bandwidth" in found["events"][1]["plan"]


def check_sizes(zebra: Zebra.Config, **changes: Any) -> Any:
    cfg = trainer(mixture(), zebra=zebra, **changes)
    cfg.check()
    return cfg.check_sizes(FOUR)


def test_groups_and_experts_that_do_not_fit_are_refused():
    assert dict(check_sizes(ZEBRA, mesh={"data": 2}).shape)["data"] == 2
    with pytest.raises(ConfigError, match=r"zebra\.mesh.*4 devices that fit.*1 of attention's.*the 4 that there are"):
        check_sizes(ZEBRA.clone(mesh={"expert": 4}))
    with pytest.raises(ConfigError, match=r"zebra\.moved.*multiples of 2 below 4.*\(2 for experts, 1 for attention\)"):
        check_sizes(ZEBRA.clone(mesh={"expert": 2}, moved=(1,)))
    with pytest.raises(ConfigError, match=r"zebra\.moved.*one for each of the model's 2 layers"):
        check_sizes(ZEBRA.clone(moved=(1, 1, 1)))
    with pytest.raises(ConfigError, match=r"zebra\.moved.*below 4"):
        check_sizes(ZEBRA.clone(moved=(4,)))
    with pytest.raises(ConfigError, match=r"batch_size.*a multiple of 16: 8 microbatches, each sharded over 2 parts"):
        check_sizes(ZEBRA.clone(mesh={"expert": 2}, microbatches=8, moved=None))
    with pytest.raises(ConfigError, match=r"zebra\.moved.*multiples of 3 below 4"):
        nine = trainer(mixture()).input.clone(batch_size=9)
        check_sizes(ZEBRA.clone(mesh={"expert": 3}, microbatches=1, moved=None), input=nine)
    with pytest.raises(ConfigError, match=r"zebra\.mesh.*1 or more"):
        trainer(mixture(), zebra=ZEBRA.clone(mesh={"expert": -1})).check()


def refused(match: str, model: Any = None, **changes: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        trainer(model or mixture(), zebra=ZEBRA).set(**changes).check()


def test_other_models_are_refused_by_the_path_of_the_field():
    refused(r"model\.block\.feed_forward.*a dense model has none", tiny_model())
    refused(r"model\.remat.*\"nothing\"", mixture().set(remat="everything"))
    blocks: Any = mixture().block
    refused(r"model\.block.*all layers alike", mixture().set(block=BlockPattern.Config(blocks=(blocks, blocks))))
    sandwich = SandwichBlock.Config(attention=Attention.Config(num_heads=2), feed_forward=blocks.feed_forward)
    if type(sandwich) is not Block.Config:
        refused(r"model\.block.*without norms behind", mixture().set(block=sandwich))


def test_what_no_zebra_step_has_is_refused():
    refused(r"microbatches.*1 with zebra, whose own", microbatches=2)
    refused(r"replicas.*None with zebra", replicas=Replicas.Config())
    refused(r"mesh.*no axis pipeline with zebra", mesh={"pipeline": 2})
    with pytest.raises(ConfigError, match=r"loss.*SupervisedLoss\.Config with zebra"):
        ZEBRA.check_trainer(trainer(mixture(), loss=KTO.Config()))
    learner = trainer(mixture()).learner
    refused(r"learner\.groups.*\(\) with zebra", learner=learner.clone(groups=(ParameterGroup.Config(),)))
    refused(r"learner\.optimizer.*AdamW, Lion or SGD", learner=learner.clone(optimizer=Muon.Config()))
    with pytest.raises(ConfigError, match=r"zebra.*None, to compile the step as one program"):
        trainer(mixture(), zebra=ZEBRA).programs(FOUR)


def test_times_decide_microbatches_and_experts():
    cfg: Trainer.Config = trainer(mixture(), zebra=Zebra.Config(mesh={"expert": 1}, times=TIMES))
    assert cfg.zebra is not None
    meshes = cfg.zebra.divide(cfg.mesh, FOUR)
    count, moved = cfg.zebra.settled(cfg, meshes)
    plan = cfg.zebra.plan(cfg, meshes)
    assert plan is not None and (count, moved) == (plan.microbatches, plan.moved) and count > 1
    assert sum(moved) == 1  # a gap of 1 a layer, of which an expert closes 2
    slow = cfg.zebra.clone(times=TIMES.clone(start_s=5.0))
    assert slow.settled(cfg, meshes)[0] < count  # programs that cost more than they compute: fewer of them
    with pytest.raises(ConfigError, match=r"times\.bandwidth.*above 0"):
        trainer(mixture(), zebra=ZEBRA.clone(times=TIMES.clone(bandwidth=0.0))).check()
