"""TRL on the small GRPO job: its own GRPOTrainer with `transformers` generation, torch on CPU.

Run by the benchmark with the interpreter of the peer's environment (see `environments.py`).
"""

# Imports that only the peer's environment can resolve:
# pyright: reportMissingImports=false
from __future__ import annotations

import tempfile
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from grpo_step.job import GrpoJob, digit_share
from harness.protocol import StepServer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers_policy import BOS, EOS, PAD, build_model, parameter_count
from trl import GRPOConfig, GRPOTrainer

ENDLESS = 10**9  # steps; the runner ends the worker before
DISTINCT_STEPS = 64  # steps' worth of prompts in the data set, which is then repeated


def build_tokenizer(job: GrpoJob) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per ASCII character."""
    special = {PAD: "<pad>", BOS: "<bos>", EOS: "<eos>"}
    # Control characters have names of one character, in a private area: one with digits would count for the reward.
    names = {i: special.get(i, chr(0xE000 + i if i < 32 else i)) for i in range(job.vocab)}
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in names.items()}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[PAD],
        bos_token=special[BOS],
        eos_token=special[EOS],
        padding_side="left",
    )


def settings(job: GrpoJob, folder: str) -> GRPOConfig:
    """Return the job in TRL's terms; everything that costs time and is not part of it is off."""
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=job.rollouts,
        gradient_accumulation_steps=1,
        num_generations=job.group,
        num_iterations=1,
        max_completion_length=job.new_tokens,
        generation_kwargs={"min_new_tokens": job.new_tokens},
        temperature=job.temperature,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=job.clip,
        loss_type="grpo",
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        max_steps=ENDLESS,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=ENDLESS,
        save_strategy="no",
        disable_tqdm=True,
        seed=job.seed,
    )


class StepGate(TrainerCallback):
    """A callback that holds the trainer between two steps until the runner requests the next."""

    def __init__(self, server: StepServer):
        self._server = server

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Report the step; the trainer calls this after the optimiser's step."""
        if not self._server.step_done():
            control.should_training_stop = True
        return control


def time_generation(trainer: GRPOTrainer, server: StepServer) -> None:
    """Wrap the trainer's generation with a clock."""
    generate = trainer._generate_single_turn

    def timed(*args: Any, **kwargs: Any) -> Any:
        with server.generation():
            return generate(*args, **kwargs)

    trainer._generate_single_turn = timed


def main() -> None:
    """Train one step per request until the runner ends the worker."""
    job = GrpoJob()
    model = build_model(job)
    server = StepServer(
        f"trl {version('trl')} (torch {torch.__version__})",
        parameter_count(model),
    )

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = [digit_share(completion) for completion in completions]
        server.record(sum(len(ids) for ids in completion_ids), sum(rewards) / len(rewards))
        return rewards

    prompts = [text for step in range(DISTINCT_STEPS) for text in job.prompt_texts(step)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings(job, folder),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=build_tokenizer(job),
            callbacks=[StepGate(server)],
        )
        time_generation(trainer, server)
        server.begin()
        trainer.train()


if __name__ == "__main__":
    main()
