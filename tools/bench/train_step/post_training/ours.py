"""A benchmark worker for our trainer: experiments that are held between steps by an evaluator.

    axl train tools.bench.train_step.post_training.ours:dpo_gsm8k

runs one as users run theirs, in a folder where `write_model` has put the parameters that it begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.config import REQUIRED, ConfigBase, Configurable, replace
from axlearn_like.input import FirstFitDecreasing, PreferenceInput, SupervisedInput
from axlearn_like.input.preferences import Completion, preference
from axlearn_like.kernels.attention.xla_blocks import BlockedXla
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import split
from axlearn_like.layers.decoder import Decoder
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.training.alignment.preferences import DPO
from axlearn_like.training.losses import SupervisedLoss
from axlearn_like.training.trainer import LossConfig, Trainer
from models.huggingface import hf_weights
from models.huggingface.architectures import config_json
from models.huggingface.checkpoints.exporting import write_json
from models.huggingface.convert import to_huggingface
from models.tiny import tiny
from tools.bench.train_step.ours import NEVER, EachStep
from tools.bench.train_step.post_training.job import EOS, JOBS, PostTrainingJob

MODEL = "model"  # folder of the first parameters, in the form of Hugging Face


class Texts(Configurable):
    """A source of a job's texts; completions are learned."""

    class Config(ConfigBase["Texts"]):
        job: str = REQUIRED  # of `JOBS`

    def __init__(self, cfg: Config):
        self._rows = [(_ids(row["prompt"]), _ids(row["completion"], EOS)) for row in JOBS[cfg.job].texts()]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        prompt, completion = self._rows[index]
        mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
        return {"tokens": np.append(prompt, completion), "loss_mask": mask}


class Pairs(Configurable):
    """A source of a job's pairs."""

    class Config(ConfigBase["Pairs"]):
        job: str = REQUIRED  # of `JOBS`

    labelled = True

    def __init__(self, cfg: Config):
        self._rows = JOBS[cfg.job].pairs()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self._rows[index]
        chosen, rejected = (_completion(row["prompt"], row[side]) for side in ("chosen", "rejected"))
        return preference(chosen, rejected)


def _completion(prompt: str, text: str) -> Completion:
    ids = _ids(text, EOS)
    return Completion(_ids(prompt), ids, np.ones(len(ids), bool))


def _ids(text: str, *more: int) -> np.ndarray:
    return np.array([*text.encode("ascii"), *more], np.int32)


def sft_gsm8k() -> Trainer.Config:
    """Return the job of sft_step, with the lengths of GSM8K."""
    return _sft("gsm8k")


def sft_equal() -> Trainer.Config:
    """Return that of texts of one length."""
    return _sft("equal")


def sft_quick() -> Trainer.Config:
    """Return a tiny one, as a smoke test."""
    return _sft("quick")


def dpo_gsm8k() -> Trainer.Config:
    """Return the job of dpo_step, with the lengths of GSM8K."""
    return _dpo("gsm8k")


def dpo_equal() -> Trainer.Config:
    """Return that of texts of one length."""
    return _dpo("equal")


def dpo_quick() -> Trainer.Config:
    """Return a tiny one, as a smoke test."""
    return _dpo("quick")


def _sft(name: str) -> Trainer.Config:
    job = JOBS[name]
    needs = [sum(lengths) - 1 for lengths in job.lengths]  # the last token is only a target
    rows = SupervisedInput.Config(source=Texts.Config(job=name), **_packed(needs))
    return _trainer(f"sft_{name}", job, rows, SupervisedLoss.Config())


def _dpo(name: str) -> Trainer.Config:
    job = JOBS[name]
    needs = [2 * prompt + chosen + rejected for prompt, chosen, rejected in job.pair_lengths()]
    rows = PreferenceInput.Config(source=Pairs.Config(job=name), **_packed(needs))
    return _trainer(f"dpo_{name}", job, rows, DPO.Config(beta=job.beta))


def _packed(needs: Sequence[int]) -> dict[str, Any]:
    """Return the fields of an input whose batches hold each of these examples once, in rows as long as the longest."""
    arrangement = FirstFitDecreasing.Config(window=len(needs))  # as many rows, whatever the order
    rows = arrangement.build().rows(np.array(needs), max(needs))
    return {"seq_len": max(needs), "batch_size": int(rows.max()) + 1, "rows": arrangement}


def _trainer(name: str, job: PostTrainingJob, rows: SupervisedInput.Config, loss: LossConfig) -> Trainer.Config:
    """Return the trainer of the experiment of this name, with the usual run directory."""
    return Trainer.Config(
        model=decoder(job),
        start_from=hf_weights(MODEL),
        input=rows,
        loss=loss,
        learner=Learner.Config(
            optimizer=AdamW.Config(b2=0.999),
            schedule=Constant.Config(lr=job.learning_rate),
            clip_norm=job.clip,
        ),
        checkpoint=Checkpointer.Config(save_every=NEVER),
        num_steps=NEVER,
        log_every=1,
        evaluators=(EachStep.Config(run=f"runs/{name}"),),
        seed=job.seed,
    )


def decoder(job: PostTrainingJob) -> Decoder.Config:
    """Return the policy."""
    cfg = tiny(
        vocab_size=job.vocab,
        dim=job.dim,
        num_layers=job.layers,
        num_heads=job.heads,
        num_kv_heads=job.kv_heads,
        head_dim=job.head_dim,
        hidden=job.ffn,
    )
    replace(cfg, Attention.Config, lambda attention: attention.set(kernel=BlockedXla.Config()))
    return cfg


def write_model(job: PostTrainingJob, folder: Path) -> None:
    """Write the random policy that all systems begin with, as Hugging Face's files."""
    from safetensors.numpy import save_file

    cfg = decoder(job)
    _, params = split(cfg.build(rngs=nnx.Rngs(job.seed)))
    folder.mkdir(parents=True)
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
    write_json(folder / "config.json", config_json(cfg, **ids))
    save_file(to_huggingface(jax.device_get(params), cfg), folder / "model.safetensors", {"format": "pt"})
