"""A plan: what is derived of model, data and devices, each figure with what it was derived from."""

import dataclasses
from pathlib import Path
from typing import Any

from axlearn_like.config import ConfigBase
from experiments.recipes.fit import Fit

SMALL = 10_000_000  # parameters below which a model is taught rather than tuned: figures measured here apply

# (job, LoRA) -> peak learning rate of models from `SMALL` on, and its source.
_RATES = {
    ("sft", False): (2e-5, "as TRL and Alpaca"),
    ("sft", True): (2e-4, "QLoRA, arXiv 2305.14314"),
    ("dpo", False): (5e-7, "Zephyr, arXiv 2310.16944"),
    ("dpo", True): (5e-6, "ten times that of all parameters, as for SFT"),
    ("rl", False): (1e-6, "DeepSeekMath, arXiv 2402.03300"),
    ("rl", True): (1e-5, "ten times that of all parameters, as for SFT"),
}
_SMALL_RATES = {"sft": 1e-3, "dpo": 1e-4, "rl": 5e-4}


class Plan:
    """Entries (what, value, derived from), in order."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, str]] = []

    def say[T](self, what: str, value: T, why: str, shown: str | None = None) -> T:
        """Note an entry and return its value; `shown`: the value as text."""
        self.entries.append((what, str(value) if shown is None else shown, why))
        return value

    def rate(self, job: str, parameters: int, *, lora: bool) -> float:
        """Note and return the learning rate of "sft", "dpo" or "rl" (`entries` has its source)."""
        small = parameters < SMALL
        value, why = (
            (_SMALL_RATES[job], "measured here for models below 10 M parameters") if small else _RATES[job, lora]
        )
        return self.say("learner.schedule.peak_lr", value, why, f"{value:g}")

    def activations(self, part: str, found: Fit, *, small: bool) -> dict[str, str]:
        """Note and return the dtype of activations of the decoder at `part`, and what its backward pass recomputes."""
        dtype = "float32" if found.machine.platform == "cpu" else "bfloat16"
        self.say(f"{part}.dtype", dtype, f"activations on {found.machine.platform}; parameters are float32")
        why = "a model so small keeps all" if small else "results of attention are kept, if they fit; else nothing is"
        return {"dtype": dtype, "remat": self.say(f"{part}.remat", "nothing" if small else found.remat, why)}


@dataclasses.dataclass(frozen=True)
class Start:
    """A derived experiment."""

    config: ConfigBase[Any]  # config to run, which is edited as any other
    plan: Plan  # entries that say how it came about
    examples: tuple[tuple[str, str], ...]  # first two rows as they are read, as text: prompt and answer
    about: str  # a sentence that says what is trained on what
    base: Path  # directory of the model that it begins with
    inprocess: bool = True  # all roles of RL are one process


def rounded(length: int, multiple: int = 8) -> int:
    """Return a length rounded up to a multiple."""
    return -(-length // multiple) * multiple


def held_out_every(rows: int) -> int:
    """Return which share of so many rows is held out, one in so many: about 256 rows, and at most one in 4."""
    return max(8 if rows >= 128 else 4, rows // 256)
