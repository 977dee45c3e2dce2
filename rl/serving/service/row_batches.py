"""Rows of passes of several models, put together into batches for programs of few shapes."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from mesh import UserError
from rl.serving.service.losses import NAMES, NUMBERS, loss_arrays, loss_numbers
from rl.serving.service.messages import ServiceError, TrainPass
from rl.serving.service.row_programs import RowBatch


@dataclasses.dataclass(frozen=True)
class SlotLimits:
    """Sizes of the training slots of a service."""

    slots: int = 8  # models at the same time
    rank: int = 32  # the largest rank; all take as much memory and time as one of this rank
    alpha: float = 32.0  # a product of factors is multiplied by alpha / rank
    context_length: int = 2048  # the longest row
    # Tokens of a program, padding included: with few, small requests waste less, and large ones wait longer
    tokens: int = 2048
    shortest: int = 32  # rows are padded to this length, or to twice, four times, ... as many tokens.
    gradient_bytes: int = 1 << 30  # most memory that the gradients of a program's rows may take

    def __post_init__(self) -> None:
        """Refuse sizes without room."""
        for field in ("slots", "rank", "context_length", "tokens"):
            if getattr(self, field) < 1:
                raise UserError(f"SlotLimits.{field}: got {getattr(self, field)}; expected 1 or more")
        if self.shortest < 16 or self.shortest & (self.shortest - 1):
            raise UserError(f"SlotLimits.shortest: got {self.shortest}; expected a power of two, 16 or more")

    def length(self, tokens: int) -> int:
        """Return the length to which a row of so many tokens is padded."""
        return max(self.shortest, 1 << (tokens - 1).bit_length())


class RowProgram(NamedTuple):
    """A program: the length of its rows, whether they are only evaluated, and the targets of a token."""

    length: int
    forward_only: bool
    targets: int = 1


@dataclasses.dataclass(frozen=True)
class WaitingRow:
    """A row that waits for its program."""

    index: int  # number of its pass
    row: int  # number in its pass
    job: TrainPass
    program: RowProgram
    # Tokens, targets and inputs of the loss by name, [length], or [length, targets]
    arrays: Mapping[str, np.ndarray]

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.arrays["tokens"])


def rows_of_pass(index: int, job: TrainPass, limits: SlotLimits, vocab_size: int) -> list[WaitingRow]:
    """Return the rows of a pass (ServiceError: none, too long, unknown tokens, or a loss that cannot be computed)."""
    numbers, most, rows = loss_numbers(job.loss, job.config), limits.context_length, list[WaitingRow]()
    if not job.rows:
        raise ServiceError(f"model {job.model!r}: no rows; expected one or more")
    for row, datum in enumerate(job.rows):
        which, length = f"datum {row}", len(datum.tokens)
        if not 0 < length <= most:
            raise ServiceError(f"{which} has {length} tokens; expected 1 to {most}, the context of this service")
        arrays = loss_arrays(job.loss, numbers, datum, which)
        ids = {"tokens": datum.tokens, "target_tokens": np.asarray(datum.inputs["target_tokens"])}
        for name, tokens in ids.items():
            if len(wrong := np.argwhere((tokens < 0) | (tokens >= vocab_size))):
                at, got = ", ".join(map(str, wrong[0])), tokens[tuple(wrong[0])]
                raise ServiceError(f"{which}: {name}[{at}] is {got}; expected 0 to {vocab_size - 1}")
        # As few programs as may be: two, four, eight, ... targets a token; what is added has no weight.
        targets = 1 if ids["target_tokens"].ndim == 1 else max(2, 1 << (ids["target_tokens"].shape[1] - 1).bit_length())
        program = RowProgram(limits.length(length), job.forward_only, targets)
        rows.append(WaitingRow(index, row, job, program, {**arrays, **ids}))
    return rows


def _in_order(passes: Sequence[Sequence[WaitingRow]]) -> list[WaitingRow]:
    """Return the rows of passes program by program, in an order that no model's sums notice.

    The gradients of a model's rows are added up as if its passes came alone: of one pass program by program, of several
    one after another. So passes of a model that follow each other share a round only if all are of one program.
    """
    rounds: list[tuple[int, WaitingRow]] = []
    last: dict[str, tuple[int, set[RowProgram]]] = {}
    for rows in passes:
        model, programs = rows[0].job.model, {row.program for row in rows}
        before, known = last.get(model, (0, programs))
        turn = before if len(programs | known) == 1 or model not in last else before + 1
        last[model] = turn, programs
        rounds += [(turn, row) for row in rows]
    return [row for _, row in sorted(rounds, key=lambda one: (one[0], one[1].program))]


def batches(
    passes: Sequence[Sequence[WaitingRow]], rows_of: Callable[[int], int]
) -> Iterator[tuple[RowProgram, Sequence[WaitingRow]]]:
    """Yield the rows of passes by programs, those of a model in order; `rows_of` a length are the most of a program."""
    for program, group in groupby(_in_order(passes), lambda row: row.program):
        own, most = list(group), rows_of(program.length)
        yield from ((program, own[at : at + most]) for at in range(0, len(own), most))


def filled(rows: Sequence[WaitingRow], program: RowProgram, count: int, slots: Sequence[tuple[int, float]]) -> RowBatch:
    """Return the arrays of a program of `count` rows: these, with (slot, scale) of their models, and empty ones."""
    shape = (count, program.length)
    each, names = ((*shape, program.targets), ("weights",)) if program.targets > 1 else (shape, NAMES)
    arrays = {name: np.zeros(each, np.float32) for name in names}
    tokens, targets, live = np.zeros(shape, np.int32), np.zeros(each, np.int32), np.zeros(shape, bool)
    for place, row in enumerate(rows):
        own, given = (place, slice(row.length)), row.arrays["target_tokens"]
        tokens[own], live[own] = row.arrays["tokens"], True
        inside = (*own, slice(given.shape[1])) if program.targets > 1 else own
        targets[inside] = given
        for name in names:
            arrays[name][inside] = row.arrays.get(name, 0.0)
    empty = (0, count - len(rows))
    kinds = np.pad(np.array([NUMBERS[row.job.loss] for row in rows], np.int32), empty)
    numbers = np.pad(np.array([slot for slot, _ in slots], np.int32), empty)
    scales = np.pad(np.array([scale for _, scale in slots], np.float32), empty)
    return RowBatch(tokens, targets, live, arrays, numbers, kinds, scales)
