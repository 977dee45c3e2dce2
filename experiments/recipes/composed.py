"""Experiments that recipes are: weights and data by name, before they are fitted to a machine."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axlearn_like.config import ConfigBase, replace
from axlearn_like.input import Chat, JsonLines, SupervisedInput
from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
from experiments.gsm8k.data import gsm8k
from experiments.pretraining import llama31_8b
from experiments.qwen_rl import qwen25_0_5b_rl
from experiments.recipes.recipes import Recipe, recipes
from models.catalog import published_model
from models.huggingface import hf_weights
from rl.tasks.mixture import TaskMixture
from rl.verification.scorers import ReasoningGymScorer


def recipe_experiment(name: str) -> Callable[..., ConfigBase[Any]]:
    """Return a recipe's function of an experiment.

    Weights and tokenizer are read in the folder of the model's name in that of $AXL_MODELS, examples in $AXL_DATA:
    chats.jsonl, or gsm8k.
    """
    recipe = recipes()[name]

    def experiment(*, steps: int = 500, seed: int = 0) -> ConfigBase[Any]:
        return (_sft if recipe.job == "sft" else _rl)(recipe, steps, seed)

    experiment.__name__, experiment.__doc__ = name, recipe.summary
    return experiment


def _sft(recipe: Recipe, steps: int, seed: int) -> ConfigBase[Any]:
    tokenizer = HuggingFaceTokenizer.Config(path=str(_folder(recipe)))
    chats = JsonLines.Config(files="$AXL_DATA/chats.jsonl", tokenizer=tokenizer, example=Chat.Config())
    cfg = llama31_8b(seed=seed)
    cfg.learner.schedule.set(peak_lr=1e-5, warmup_steps=steps // 20, total_steps=steps, end_lr=1e-6)
    return cfg.set(
        model=published_model(recipe.model),
        start_from=hf_weights(_folder(recipe)),
        input=SupervisedInput.Config(
            source=chats, seq_len=recipe.prompt + recipe.answer, batch_size=recipe.most, seed=seed
        ),
        loss=cfg.loss.clone(z_loss=0.0),
        mesh_rules=(),
        num_steps=steps,
    )


def _rl(recipe: Recipe, steps: int, seed: int) -> ConfigBase[Any]:
    files = (f"$AXL_DATA/gsm8k/{split}.jsonl.gz" for split in ("train", "test"))
    tasks = TaskMixture.Config(families=(gsm8k(*files),), seed=seed)
    cfg = qwen25_0_5b_rl(prompts_per_step=recipe.most, samples_per_prompt=recipe.samples, seed=seed, steps=steps)
    replace(cfg, ReasoningGymScorer.Config, lambda scorer: scorer.set(mixture=tasks))
    return cfg.set(
        policy=published_model(recipe.model),
        start_from=hf_weights(_folder(recipe)),
        tokenizer=HuggingFaceTokenizer.Config(path=str(_folder(recipe))),
        tasks=tasks,
        max_prompt_tokens=recipe.prompt,
        max_new_tokens=recipe.answer,
        mesh_rules=(),
    )


def _folder(recipe: Recipe) -> Path:
    return Path(os.environ.get("AXL_MODELS", "hf-models")) / recipe.model
