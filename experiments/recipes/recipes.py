"""Recipes: jobs for published models, a line each of `recipes.txt`, and the experiments that they are."""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh.errors import UserError

if TYPE_CHECKING:
    from axlearn_like.config import ConfigBase
    from experiments.recipes.fit import Fit


class Recipe(NamedTuple):
    """A line of the table."""

    name: str
    model: str
    job: Any  # sft or rl
    prompt: int
    answer: int
    most: int  # examples or prompts of a step, fewer where only those fit
    samples: int
    machines: tuple[str, ...]

    def command(self, found: "Fit") -> str:
        """Return what to type on the machine."""
        if found.engines is None:
            return f"axl train {self.name}"
        together = " --runtime inprocess" if found.engines.devices == "trainer" else ""
        return f'axl rl {self.name} --fleet "{found.fleet}"{together}'

    @property
    def summary(self) -> str:
        """A line about it."""
        what = f"GRPO, {self.samples} answers of a prompt" if self.job == "rl" else "supervised fine-tuning on chats"
        return f"{self.model}: {what}, {self.prompt} + {self.answer} tokens; `axl recipes {self.name}` shows machines."

    def fit(self, devices: Any) -> "Fit":
        """Return the way to run it on a machine, or on a fleet: with as many rows of `most` as fit.

        Raises:
            UserError: even an eighth of them does not fit.
        """
        from experiments.recipes.fit import fit
        from models.catalog import published_model

        sizes: dict[str, Any] = {"prompt_tokens": self.prompt, "answer_tokens": self.answer}
        model, refused = published_model(self.model), list[UserError]()
        for part in (1, 2, 4, 8):
            try:
                return fit(model, self.job, devices, rows=self.most // part * self.samples, **sizes)
            except UserError as error:
                refused.append(error)
        raise refused[0]


@functools.cache
def recipes() -> Mapping[str, Recipe]:
    """The recipes by name, in the order of the table; nothing but it is read."""
    lines = (Path(__file__).with_name("recipes.txt")).read_text().splitlines()
    fields = [line.split() for line in lines if not line.startswith("#")]
    rows = [(row[:3], map(int, row[3:7]), row[7].split(",")) for row in fields]
    return {what[0]: Recipe._make((*what, *numbers, tuple(machines))) for what, numbers, machines in rows}


def recipe_experiment(name: str) -> Callable[..., "ConfigBase[Any]"]:
    """Return a recipe's function of an experiment.

    Weights and tokenizer are read in the folder of the model's name in that of $AXL_MODELS, examples in $AXL_DATA:
    chats.jsonl, or gsm8k.
    """
    recipe = recipes()[name]

    def experiment(*, steps: int = 500, seed: int = 0) -> "ConfigBase[Any]":
        return (_sft if recipe.job == "sft" else _rl)(recipe, steps, seed)

    experiment.__name__, experiment.__doc__ = name, recipe.summary
    return experiment


def _sft(recipe: Recipe, steps: int, seed: int) -> "ConfigBase[Any]":
    from axlearn_like.input import Chat, JsonLines, SupervisedInput
    from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
    from experiments.pretraining import llama31_8b
    from models.catalog import published_model
    from models.huggingface import hf_weights

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


def _rl(recipe: Recipe, steps: int, seed: int) -> "ConfigBase[Any]":
    from axlearn_like.config import replace
    from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
    from experiments.gsm8k.data import gsm8k
    from experiments.qwen_rl import qwen25_0_5b_rl
    from models.catalog import published_model
    from models.huggingface import hf_weights
    from rl.tasks.mixture import TaskMixture
    from rl.verification.scorers import ReasoningGymScorer

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
