"""Published datasets by name: what `NAME=FILE` means where tasks are named on a command line.

    @dataset(verifier=by_results)
    def mine(files: str) -> TaskRows.Config:
        "Rows of a file as a task, labelled `mine`."

in any module of this package adds one. Their files are the user's, by path; nothing is downloaded.
"""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from experiments.registry import Entry, read_entries
from mesh.errors import UserError, nearest
from rl.tasks.family import TaskFamily
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.datasets import rows
from rl.tasks.rows.task_rows import TaskRows
from rl.tasks.source import ProblemSource
from rl.verification.scorers import ReasoningGymScorer, Scorer
from rl.verification.service import Verifier
from rl.verification.verifiers.by_task import ByTask, labels_of
from rl.verification.verifiers.code import CodeVerifier

__all__ = ["Dataset", "dataset", "find_dataset", "humaneval", "known_datasets", "named_tasks", "verifier_of"]

Verify = Callable[[TaskMixture.Config], Scorer.Config]


class Dataset(NamedTuple):
    """Rows of files as a task, and the verifier of answers; None: what is compared is in the rows' columns."""

    rows: Callable[..., TaskRows.Config]
    verifier: Verify | None


_imported: dict[str, Dataset] = {}


def dataset[F: Callable[..., TaskRows.Config]](*, verifier: Verify | None = None) -> Callable[[F], F]:
    """Mark a function of a file, or of files, as the published dataset of its name.

    Args:
        verifier: returns the verifier's config, given that of the tasks; None: answers are compared with the rows'.
    """

    def mark(function: F) -> F:
        _imported[function.__name__] = Dataset(function, verifier)
        return function

    return mark


@cache
def known_datasets() -> Mapping[str, Entry]:
    """The datasets of this package by name, sorted; no application is imported.

    Raises:
        UserError: two modules have a dataset of one name.
    """
    return read_entries(Path(__file__).parent, __package__ or "experiments", "dataset")


def find_dataset(name: str) -> Dataset | None:
    """Return the dataset of a name, or None; imports the application that has it."""
    if name in known_datasets():
        importlib.import_module(known_datasets()[name].module)
    return _imported.get(name)


def with_name(file: str) -> str:
    """Return NAME=FILE of a file without a name; where it does not exist, of the nearest one."""
    path = Path(file)
    if not path.exists() and path.parent.is_dir():
        path = next((path.with_name(near) for near in nearest(path.name, os.listdir(path.parent), 1)), path)
    return f"{path.name.partition('.')[0]}={path}"


def named_tasks(parts: Sequence[str]) -> TaskMixture.Config:
    """Return the mixture of "NAME=FILE" and families of reasoning-gym, of whose rows all are held out."""
    families: list[ProblemSource.Config] = []
    for part in parts:
        label, equals, file = part.partition("=")
        if not equals:
            if "." in part or os.sep in part:
                raise UserError(f"--tasks {part}: expected NAME=FILE, such as {with_name(part)}")
            if find_dataset(part) is not None:
                raise UserError(f"--tasks {part}: expected the file of its rows, {part}=FILE")
            families.append(TaskFamily.Config(name=label))
            continue
        published = find_dataset(label)
        family = rows(file).set(label=label) if published is None else published.rows(file)
        families.append(family.set(heldout=family.rows.clone()))
    return TaskMixture.Config(families=tuple(families))


def verifier_of(tasks: TaskMixture.Config) -> Verifier.Config:
    """Return the verifier of tasks: of published datasets their own, of the others what the rows' columns say."""
    other = ReasoningGymScorer.Config(mixture=tasks, pass_mark=1.0)
    found = {label: published for label in labels_of(tasks) if (published := find_dataset(label))}
    scorers = {label: published.verifier(tasks) for label, published in found.items() if published.verifier}
    return Verifier.Config(scorer=ByTask.Config(mixture=tasks, scorers=scorers, other=other) if scorers else other)


def by_tests(mixture: TaskMixture.Config) -> CodeVerifier.Config:
    """Tests of the row, on the prompt's function as the answer completes or repeats it."""
    return CodeVerifier.Config(mixture=mixture, prompt_field="prompt")


@dataset(verifier=by_tests)
def humaneval(files: str | tuple[str, ...]) -> TaskRows.Config:
    """Python functions to complete (openai/human-eval): a verifier of code runs the row's `test` on `entry_point`."""
    return rows(files, prompt="prompt", answer="canonical_solution", id="task_id").set(label="humaneval")
