"""The stream of global batches: every host plans all rows, and reads the tokens of its own rows."""

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from axlearn_like.input.mixture import Drawn, Mixture, Single
from axlearn_like.input.packing import Arrangement, Pieces, RowPlan, TooLong, plan_rows, split_examples
from axlearn_like.input.shuffle import derived_seed, shuffled
from axlearn_like.input.source import IndexedSource, InputError

_log = logging.getLogger(__name__)

# Arrays of a batch of texts, all [rows, seq_len].
TEXTS = {**dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), "int32"), "weights": "float32"}


class Window(NamedTuple):
    """Consecutive examples whose rows are planned together."""

    source: np.ndarray  # int64 [k]: source of each example
    index: np.ndarray  # int64 [k]: its index in the source
    plan: RowPlan
    after: Drawn  # start of the next window


class Batch(NamedTuple):
    """The rows of a global batch that this host holds, and metrics of the whole batch."""

    arrays: dict[str, np.ndarray]
    metrics: dict[str, float]


class BatchStream:
    """An endless iterator of batches. Its state is where the current window begins and how many of its rows are out.

    The rows of a window are a function of what was drawn before it, the lengths of its examples, and the seed. So the
    global batches depend neither on the number of hosts nor on when training was interrupted.
    """

    def __init__(
        self,
        mixture: Mixture | Single,
        arrangement: Arrangement,
        *,
        seq_len: int,
        batch_size: int,
        long: Literal["refuse", "split"],
        seed: int,
        rows: np.ndarray,
        dtypes: Mapping[str, str] = TEXTS,
    ):
        self._mixture, self._arrangement = mixture, arrangement
        self._seq_len, self._batch_size, self._seed = seq_len, batch_size, seed
        self._long: Literal["refuse", "split"] = long
        self._rows = rows  # rows of the global batch, ascending
        self._dtypes = {name: dtype for name, dtype in dtypes.items() if name != "weights"}
        self._drawn, self._row = mixture.begin(), 0
        self._window: Window | None = None
        self._left_out: dict[str, float] = {}  # share of the window's pieces that has no token to be learned
        self._warned = self._once = False

    def __iter__(self) -> "BatchStream":
        return self

    def get_state(self) -> dict[str, Any]:
        """Return the position, JSON-able (the protocol of Grain's iterators)."""
        return {"drawn": [list(counts) for counts in self._drawn], "row": self._row}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position of `get_state`."""
        self._drawn = Drawn(*(tuple(counts) for counts in state["drawn"]))
        self._row, self._window = state["row"], None

    def __next__(self) -> Batch:
        shape = (len(self._rows), self._seq_len)
        out = {name: np.zeros(shape, dtype) for name, dtype in self._dtypes.items()}
        learned = np.zeros(shape, bool)
        epochs = self._epochs()
        done = targets = live = 0
        while done < self._batch_size and not self._is_over():
            window = self._window = self._window or self._next_window()
            n = min(self._batch_size - done, window.plan.rows - self._row)
            count, places = self._totals(window, self._row, self._row + n)
            targets, live = targets + count, live + places
            for at in range(*np.searchsorted(self._rows, (done, done + n))):
                row = self._row + int(self._rows[at]) - done
                self._fill(window, row, {name: array[at] for name, array in out.items()}, learned[at])
            done, self._row = done + n, self._row + n
            if self._row == window.plan.rows:
                self._drawn, self._row, self._window = window.after, 0, None
        if not done:
            raise StopIteration
        weights = learned.astype(np.float32) / np.float32(targets)
        return Batch(
            {**out, "weights": weights},
            {"packing": live / (self._batch_size * self._seq_len), **epochs, **self._left_out},
        )

    def one_epoch(self) -> Iterator[Batch]:
        """Return a stream of each example once, from the beginning; the rows that its last batch lacks weigh nothing.

        Raises:
            InputError: the stream is a mixture, whose sources end at different times.
        """
        if len(self._mixture.sources) > 1:
            raise InputError(f"a mixture of {', '.join(self._mixture.names)} has no end; name a number of batches")
        stream = copy.copy(self)
        stream._drawn, stream._row, stream._window, stream._once = self._mixture.begin(), 0, None, True
        return stream

    def _is_over(self) -> bool:
        return self._once and self._window is None and self._drawn.total >= len(self._mixture.sources[0])

    def _epochs(self) -> dict[str, float]:
        """Return how often each source has been drawn, at the beginning of the window."""
        each = zip(self._mixture.names, self._drawn.ever, self._mixture.sources, strict=True)
        epochs = {name: round(count / len(source), 6) for name, count, source in each}
        return {"epoch" if len(epochs) == 1 else f"epoch/{name}": epoch for name, epoch in epochs.items()}

    def _next_window(self) -> Window:
        """Return the next window with a row. InputError: an epoch of every source has no token to be learned."""
        began = self._drawn.total
        while not (window := self._plan()).plan.rows:
            self._drawn = window.after
            if self._drawn.total - began >= sum(map(len, self._mixture.sources)):
                raise InputError(f"no example of {', '.join(self._mixture.names)} has a token that is learned")
        return window

    def _plan(self) -> Window:
        sources, count = self._mixture.sources, self._arrangement.window
        if len(sources) == 1:  # Windows end with an epoch: no example comes twice before all came once.
            count = min(count, len(sources[0]) - self._drawn.total % len(sources[0]))
        source, ordinal, after = self._mixture.draw(self._drawn, count)
        index, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
        for number, each in enumerate(sources):
            mine = source == number
            index[mine] = self._shuffled(number, ordinal[mine], len(each))
            lengths[mine] = each.lengths(index[mine])
        try:
            pieces = split_examples(lengths, self._seq_len, self._long)
        except TooLong as error:
            number, length = source[error.example], int(lengths[error.example])
            where = f"example {index[error.example]} of {self._mixture.names[number]}"
            raise too_long(where, length, self._seq_len) from None
        pieces = self._with_targets(source, index, pieces)
        if not len(pieces.start):
            return Window(source, index, RowPlan(pieces, np.zeros(1, np.int64)), after)
        rows = self._arrangement.rows(pieces.stop - pieces.start, self._seq_len)
        # Otherwise the rows that a window opens last, which hold fewer pieces, would always come together.
        count = int(rows.max()) + 1
        order = shuffled(np.arange(count), count, derived_seed(self._seed, "rows", self._drawn.total))
        return Window(source, index, plan_rows(pieces, rows, order), after)

    def _with_targets(self, source: np.ndarray, index: np.ndarray, pieces: Pieces) -> Pieces:
        """Return the pieces with a token to be learned: a batch of others would be a step without a loss."""
        learned = np.zeros(len(pieces.start), np.int64)
        for number, each in enumerate(self._mixture.sources):
            mine = source[pieces.example] == number
            places = (pieces.start[mine] + 1, pieces.stop[mine] + 1)
            learned[mine] = each.learned(index[pieces.example[mine]], *places)
        kept = np.flatnonzero(learned)
        dropped = len(learned) - len(kept)
        self._left_out = {"left_out": round(dropped / len(learned), 6)} if dropped else {}
        if dropped and not self._warned:
            self._warned, names = True, ", ".join(self._mixture.names)
            _log.warning("%d of %d pieces of %s have no learned token and are left out", dropped, len(learned), names)
        return pieces.take(kept)

    def _shuffled(self, number: int, ordinals: np.ndarray, length: int) -> np.ndarray:
        """Return the examples at these positions in the order of their source: each epoch has its own order."""
        epochs, places = np.divmod(ordinals, length)
        found = np.empty_like(ordinals)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            found[mine] = shuffled(places[mine], length, derived_seed(self._seed, number, epoch))
        return found

    def _totals(self, window: Window, begin: int, end: int) -> tuple[int, int]:
        """Return learned targets and filled positions of rows [begin, end) of the window, on all hosts."""
        first = window.plan.first
        pieces = window.plan.pieces.take(np.arange(first[begin], first[end]))
        source, index = window.source[pieces.example], window.index[pieces.example]
        targets = 0
        for number, each in enumerate(self._mixture.sources):
            mine = source == number
            targets += int(each.learned(index[mine], pieces.start[mine] + 1, pieces.stop[mine] + 1).sum())
        return targets, int((pieces.stop - pieces.start).sum())

    def _fill(self, window: Window, row: int, out: dict[str, np.ndarray], learned: np.ndarray) -> None:
        """Read the pieces of a row into arrays [seq_len]."""
        pieces, first, at = window.plan.pieces, window.plan.first, 0
        for piece in range(first[row], first[row + 1]):
            example, start, stop = pieces.example[piece], int(pieces.start[piece]), int(pieces.stop[piece])
            source, to = self._mixture.sources[window.source[example]], slice(at, at + stop - start)
            part = {name: array[to] for name, array in out.items()}
            self._fill_piece(source, int(window.index[example]), start, stop, part, learned[to])
            at = to.stop
        out["segment_ids"][:at] = np.cumsum(out["positions"][:at] == 0)

    def _fill_piece(
        self, source: IndexedSource, index: int, start: int, stop: int, out: dict[str, np.ndarray], learned: np.ndarray
    ) -> None:
        """Read a piece of an example into arrays [stop - start]."""
        tokens, mask = source.read(index, start, stop + 1)
        out["tokens"][:], out["targets"][:], learned[:] = tokens[:-1], tokens[1:], mask[1:]
        out["positions"][:] = np.arange(stop - start)


def too_long(where: str, length: int, seq_len: int) -> InputError:
    """Return the error of an example that needs more than a row."""
    return InputError(
        f"{where} has {length} tokens and needs rows of {length - 1}, but seq_len is {seq_len}; "
        'raise seq_len, shorten the example, or set long="split"'
    )
