"""Problems from the rows of a table: files, datasets, or what a function returns."""

import itertools
from collections.abc import Iterator
from typing import Any, override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase
from axlearn_like.input.rows.forms import LOOKED_AT, form_of
from axlearn_like.input.shuffle import derived_seed, shuffled
from axlearn_like.input.source import InputError
from rl.protocol.messages import Problem
from rl.tasks.heldout import question_digest
from rl.tasks.rows.columns import Columns, form_columns
from rl.tasks.rows.final_number import FinalNumber, final_number
from rl.tasks.rows.sources import RowSource
from rl.tasks.rows.table import RowTable
from rl.tasks.source import ProblemSource

_LAPS = 32  # orders of the rows in an epoch: the first, and those that stand in where a row cannot be used


class TaskRows(ProblemSource):
    """Rows in epochs, each shuffled in its own order: a pure function of (seed, turn), so that nothing is stored.

    An item's number says its row and its epoch, so that a row that comes again is drawn with other random keys. A row
    that cannot be used (its prompt is too long) is replaced by the one at the same place of another order; each usable
    row still comes at least once an epoch.

    Held out are the rows of `heldout`, which are then never trained on, even if `rows` has the same question; or, where
    there are none, the rows that `TaskMixture.heldout_every` says by their text.
    """

    class Config(ProblemSource.Config):
        rows: ConfigBase[Any] = REQUIRED  # RowFiles, RowFunction, or another `RowSource`
        heldout: ConfigBase[Any] | None = None  # the same
        columns: Columns.Config | None = None  # None: by the form of the first rows, see `form_columns`
        shuffle: bool = True

    def __init__(self, cfg: Config, *, seed: int):
        super().__init__(cfg)
        source: RowSource = cfg.rows.build()
        self._columns: Columns = (cfg.columns or found_columns(source, self.label)).build()
        self._shuffle, self._seed = cfg.shuffle, seed
        self._numbers = self._columns.cfg.final == "number"
        self._table = RowTable(self._columns, self.label)
        self._table.add(source)
        self._own = len(self._table)  # held-out rows follow these
        if cfg.heldout is not None:
            self._table.add(cfg.heldout.build())
        self._digests = self._table.digests
        self._heldout = frozenset(self._digests[self._own :].tolist())
        self._train = np.arange(0)
        self.split(0)

    @override
    def split(self, heldout_every: int) -> None:
        own = self._digests[: self._own]
        if self._heldout:
            kept = ~np.isin(own, np.array(sorted(self._heldout), np.uint64))
        else:
            kept = own % np.uint64(heldout_every) != 0 if heldout_every else np.ones(len(own), bool)
        self._train = np.flatnonzero(kept)

    @override
    def candidates(self, turn: int) -> Iterator[int]:
        if not len(self._train):
            raise InputError(f"{self.label}: every row is held out; there is nothing to train on")
        epoch, place = divmod(turn, len(self._train))
        for lap in range(epoch * _LAPS, (epoch + 1) * _LAPS):
            yield lap * len(self._table) + int(self._train[self._place(place, lap)])

    @override
    def heldout_candidates(self, wanted: int, heldout_every: int) -> Iterator[int]:
        return iter(range(self._own if self._heldout else 0, len(self._table)))

    @override
    def is_heldout(self, problem: Problem, heldout_every: int) -> bool:
        digest = question_digest(problem.question)
        return digest in self._heldout if self._heldout else digest % heldout_every == 0

    @override
    def make(self, item: int, problem_id: int) -> Problem:
        number = item % len(self._table)
        row, where = self._table[number], f"{self.label}, row {number}"
        question, messages = self._columns.question(row, where)
        answer = self._columns.answer(row, where)
        tools = self._columns.tools(row, where)
        return Problem(problem_id, self.label, question, answer, entry=row, messages=messages, tools=tools)

    @override
    def canonical(self, item: int) -> int:
        return item % len(self._table)

    @override
    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """Return 1.0 if what is scored of an answer is the reference's, as text or as a number; else 0.0."""
        reference = self._columns.answer(entry, self.label)
        if self._numbers:
            found = self._read(answer).value
            return float(found is not None and found == self._read(reference).value)
        expected = self._columns.final(reference)
        return float(same_answer(self._columns.final(answer), expected))

    @property
    @override
    def heldout_size(self) -> int:
        return len(self._table) - (self._own if self._heldout else 0)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of rows that are trained on, and that are held out."""
        return len(self._train), len(self._table) - (self._own if self._heldout else len(self._train))

    @override
    def form(self, answer: str) -> str | None:
        return self._read(answer).form if self._numbers else None

    @override
    def vote(self, answer: str) -> str:
        if self._numbers:
            value = self._read(answer).value
            return "" if value is None else str(value)
        if self._columns.cfg.answer_after not in answer:
            return ""
        final = self._columns.final(answer)
        number = _number(final)
        return final if number is None else repr(number)

    @property
    @override
    def has_answers(self) -> bool:
        return self._columns.cfg.answer is not None

    @property
    @override
    def digest(self) -> str:
        return self._table.digest

    @property
    @override
    def widen(self) -> str:
        return "hold out more rows (`heldout`, or a smaller heldout_every)"

    def _read(self, text: str) -> FinalNumber:
        return final_number(text, self._columns.cfg.answer_after)

    def _place(self, place: int, lap: int) -> int:
        if not self._shuffle and lap % _LAPS == 0:
            return place
        seed = derived_seed("rows", self._seed, self.label, lap)
        return int(shuffled(np.array([place]), len(self._train), seed)[0])


def found_columns(source: RowSource, name: str) -> Columns.Config:
    """Return the columns of a source by the form of its first rows; InputError has the task's name."""
    first = list(itertools.islice(source.rows(), LOOKED_AT))
    if not first:
        raise InputError(f"task {name!r} has no rows")
    try:
        return form_columns(form_of(first), first[0][1], reference=True)
    except InputError as error:
        raise InputError(f"task {name!r}: {error}") from None


def same_answer(answer: str, expected: str) -> bool:
    """Return True for equal texts, and for equal decimal numbers: "1,000" is "1000", and "72." is "72"."""
    if answer == expected:
        return bool(expected)
    numbers = [_number(text) for text in (answer, expected)]
    return numbers[0] is not None and numbers[0] == numbers[1]


def _number(text: str) -> float | None:
    plain = text.strip().lstrip("$").rstrip(".").replace(",", "")
    if not plain or len(plain) > 40 or not plain.lstrip("+-").replace(".", "", 1).isdecimal():
        return None
    return float(plain)
