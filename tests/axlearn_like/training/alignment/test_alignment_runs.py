"""Runs of the trainer by preferences: the reference is scored, kept and restored, and a mesh changes nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.config import ConfigError
from axlearn_like.input import PreferenceInput, SupervisedInput, UnpairedInput
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.alignment.distillation import DistillationLoss
from axlearn_like.training.alignment.kto import KTO
from axlearn_like.training.alignment.preferences import DPO, SimPO
from axlearn_like.training.alignment.reference import WithoutAdapters
from axlearn_like.training.alignment.teacher import Teacher
from axlearn_like.training.evaluators import LossEvaluator
from axlearn_like.training.losses import SupervisedLoss
from axlearn_like.training.trainer import Trainer
from mesh.errors import UserError
from tests.axlearn_like.layers.small import initialise, small_decoder
from tests.axlearn_like.tiny import Counting
from tests.axlearn_like.training.alignment.judged import LENGTH, Judged, Pairs
from tests.bounds import within

pytestmark = pytest.mark.numerics


def aligned(num_steps: int, loss: Any, **changes: Any) -> Trainer.Config:
    """A trainer of the small decoder, as far as the loss goes."""
    judged = isinstance(loss, KTO.Config)
    source, kind = (Judged, UnpairedInput) if judged else (Pairs, PreferenceInput)
    rows = kind.Config(source=source.Config(), seq_len=LENGTH, batch_size=8)
    return Trainer.Config(
        model=small_decoder(num_layers=1),
        input=rows,
        loss=loss,
        learner=Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=3e-3)),
        checkpoint=Checkpointer.Config(save_every=2, keep=9),
        evaluators=(LossEvaluator.Config(input=rows.clone(), batches=1, every=4),),
        mesh={"fsdp": 1},
        num_steps=num_steps,
        log_every=1,
    ).set(**changes)


@pytest.mark.full
@pytest.mark.parametrize("loss", [DPO.Config(beta=0.3), KTO.Config(beta=0.3)])
def test_it_learns_from_its_reference_and_resumes_to_the_bit(tmp_path: Path, loss: Any):
    whole = tmp_path / "whole"
    aligned(8, loss).build().run(whole, progress=False)
    rows = [row for row in read_rows(whole / "metrics.jsonl") if "loss" in row]
    first = np.log(2) if isinstance(loss, DPO.Config) else 0.5  # policy and reference are one
    assert rows[0]["loss"] == pytest.approx(first, abs=1e-5) and within(rows[0]["divergence"], 1e-9)
    assert rows[-1]["loss"] < first - 0.05 and rows[-1]["margin"] > 0.1 and rows[-1]["divergence"] > 1e-4
    evaluated = [row["eval_accuracy"] for row in rows if "eval_accuracy" in row]
    assert evaluated[-1] > 0.9
    steps = [whole / "checkpoints" / str(step) / "constant" / "d" for step in (2, 8)]
    files = [{os.stat(file).st_ino for file in step.iterdir()} for step in steps]
    assert files[0] and files[0] == files[1], "the reference is written once"

    part = tmp_path / "part"
    aligned(8, loss).build().run(part, progress=False, stop=lambda: (part / "checkpoints" / "4").exists())
    again = aligned(8, loss).build().run(part, progress=False)
    assert again["finished"]
    for row in read_rows(part / "metrics.jsonl"):
        (expected,) = (other for other in rows if other["step"] == row["step"])
        assert row["loss"] == expected["loss"] and row["grad_norm"] == expected["grad_norm"]
    shutil.rmtree(part)


def test_a_loss_gets_its_input_and_its_reference_or_is_refused_before_the_run(tmp_path: Path):
    pairs, judged = aligned(1, DPO.Config()), aligned(1, KTO.Config())
    with pytest.raises(ConfigError, match=r"input: expected a UnpairedInput.Config, as loss is KTO.Config"):
        pairs.clone(loss=KTO.Config()).check()
    with pytest.raises(ConfigError, match=r"input: expected a PreferenceInput.Config, as loss is SimPO.Config"):
        judged.clone(loss=SimPO.Config()).check()
    with pytest.raises(ConfigError, match=r"input: expected a SupervisedInput.Config, as loss is SupervisedLoss"):
        pairs.clone(loss=SupervisedLoss.Config()).check()
    cfg = pairs.clone(loss=DPO.Config(reference=WithoutAdapters.Config()))
    with pytest.raises(ConfigError, match=r"loss\.reference: expected a policy of LoRA.*; the policy has no adapters"):
        cfg.build().run(tmp_path / "run", progress=False)
    with pytest.raises(UserError, match="loss.chunks: 36 tokens a row do not divide into 5 chunks"):
        pairs.clone(loss=DPO.Config(chunks=5)).build().run(tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_mesh_changes_neither_scores_nor_updates(tmp_path: Path, checkout: Path):
    """Chunked head and two microbatches on fsdp 2 x tensor 2, against one device."""
    code = "import sys, jax; jax.config.update('jax_num_cpu_devices', 4); "
    code += "from tests.axlearn_like.training.alignment.test_alignment_runs import run_on as r; "
    code += "r(sys.argv[1], 'many', {'fsdp': 2, 'tensor': 2}, 2)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=checkout,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run_on(str(tmp_path), "one", {"fsdp": 1}, 1)
    for name in ("DPO", "KTO", "DistillationLoss"):
        one, many = (read_rows(tmp_path / f"{name}-{where}" / "metrics.jsonl") for where in ("one", "many"))
        assert len(one) == len(many) == 3
        for a, b in zip(one, many, strict=True):
            for key in {"loss", "grad_norm", "margin", "divergence", "accuracy", "kl"} & a.keys():
                assert a[key] == pytest.approx(b[key], rel=2e-4, abs=1e-6), (name, a["step"], key)


def run_on(folder: str, where: str, mesh: dict[str, int], microbatches: int) -> None:
    """Run three updates by each loss on this mesh, which has all devices of the process."""
    for loss in (DPO.Config(beta=0.3, chunks=3), KTO.Config(beta=0.3, chunks=3), distilled(folder)):
        name = type(loss).__qualname__.partition(".")[0]
        cfg = aligned(3, loss, mesh=mesh, microbatches=microbatches, evaluators=())
        if isinstance(loss, DistillationLoss.Config):
            cfg.set(input=SupervisedInput.Config(source=Counting.Config(), seq_len=LENGTH, batch_size=8))
        cfg.build().run(Path(folder) / f"{name}-{where}", progress=False)


def distilled(folder: str) -> DistillationLoss.Config:
    """Return the loss with a teacher whose parameters are written to the folder."""
    model = small_decoder(num_layers=1, dim=64)
    checkpointer = Checkpointer.Config().build(directory=Path(folder) / "teacher" / "checkpoints")
    if not (Path(folder) / "teacher").exists():
        checkpointer.save(1, {"params": initialise(model)[1], "step": jnp.int32(1)}, {})
    checkpointer.close()
    start = StartFrom.Config(path=str(Path(folder) / "teacher"))
    return DistillationLoss.Config(teacher=Teacher.Config(model=model, start_from=start), top_k=5, chunks=3)
