"""TRL on the small jobs of supervised fine-tuning and of DPO: its own SFTTrainer and DPOTrainer, torch on CPU.

Run by the benchmark with the interpreter of the peer's environment (see `environments.py`).
"""

# Imports that only the peer's environment can resolve:
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import tempfile
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from harness.protocol import StepServer
from train_step.post_training.job import JOBS, PostTrainingJob
from transformers import Qwen3ForCausalLM
from transformers_policy import parameter_count
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl_grpo import ENDLESS, StepGate, build_tokenizer

STEPS_OF_DATA = 256  # the examples of a step are repeated so often, so that an epoch does not end


def settings(job: PostTrainingJob, rows: int, folder: str) -> dict[str, Any]:
    """Return the job in TRL's terms; everything that costs time and is not part of it is off."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "train_sampling_strategy": "sequential",  # each batch holds every example once
        "max_length": None,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": job.clip,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_steps": ENDLESS,
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "logging_steps": ENDLESS,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": job.seed,
    }


def record_losses(trainer: Any, server: StepServer) -> None:
    """Report the loss of each step, and those before it."""
    training_step, losses = trainer.training_step, list[float]()

    def recorded(*args: Any, **kwargs: Any) -> Any:
        loss = training_step(*args, **kwargs)
        losses.append(float(loss))
        server.note(loss=losses[-1], losses=list(losses))
        return loss

    trainer.training_step = recorded


def make_trainer(kind: str, job: PostTrainingJob, path: str, folder: str, server: StepServer) -> Any:
    """Return the trainer of this kind of job, from the parameters in `path`."""
    examples = job.texts() if kind == "sft" else job.pairs()
    common: dict[str, Any] = {
        "model": Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32),
        "train_dataset": Dataset.from_list(examples * STEPS_OF_DATA),
        "processing_class": build_tokenizer(job),
        "callbacks": [StepGate(server)],
    }
    server.parameters = parameter_count(common["model"])
    options = settings(job, len(examples), folder)
    if kind == "sft":
        return SFTTrainer(args=SFTConfig(completion_only_loss=True, **options), **common)
    return DPOTrainer(args=DPOConfig(beta=job.beta, **options), **common)


def main() -> None:
    """Train one step per request until the runner ends the worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("sft", "dpo"))
    parser.add_argument("model")
    parser.add_argument("lengths", choices=tuple(JOBS))
    arguments = parser.parse_args()
    job = JOBS[arguments.lengths]
    server = StepServer(f"trl {version('trl')} (torch {torch.__version__})", parameters=0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(arguments.kind, job, arguments.model, folder, server)
        record_losses(trainer, server)
        server.begin()
        trainer.train()


if __name__ == "__main__":
    main()
