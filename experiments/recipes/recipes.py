"""Recipes: jobs for published models, a line each of `recipes.txt`; their experiments are in composed.py."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh.errors import UserError

if TYPE_CHECKING:
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
