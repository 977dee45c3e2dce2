"""Supervised input: shuffled, mixed, packed, deterministic, and resumable in mid-epoch on any number of hosts."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal, override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable, owner_name, to_text
from axlearn_like.input.batches import TEXTS, Batch, BatchStream, too_long
from axlearn_like.input.mixture import Mixture, Single, build_source
from axlearn_like.input.packing import FirstFit
from axlearn_like.input.source import IndexedSource, InputError, LabelledReadAhead

Contents = Literal["texts", "labels", "pairs", "judgements"]
_FORMAT = 2  # format of the state


class SupervisedInput(Configurable):
    """An endless iterator of packed batches; epoch after epoch, each in its own order.

    A batch is a dict of numpy arrays [rows, seq_len]: `tokens`, `targets` (the next token of the same segment),
    `positions` (from 0 in each segment), `segment_ids` (from 1 in each row, 0 on padding), all int32, and `weights`
    float32: 1 / (number of learned targets in the whole batch, of all processes) on those targets, else 0.

    A process reads and returns `rows` of the global batch, by default all of them. The global batches do not depend on
    which: a run can be resumed on another number of hosts, to the bit.

    Each process prepares `prefetch` batches ahead, on a thread (Grain's).

    >>> import json
    >>> from pathlib import Path
    >>> from axlearn_like.input import JsonLines, SupervisedInput
    >>> from axlearn_like.tokenizers.bytes import ByteTokenizer
    >>> lines = Path("train.jsonl")
    >>> _ = lines.write_text("".join(json.dumps({"text": f"line {n}"}) + chr(10) for n in range(20)))
    >>> source = JsonLines.Config(files=str(lines), tokenizer=ByteTokenizer.Config())
    >>> batches = SupervisedInput.Config(source=source, seq_len=16, batch_size=4).build()
    >>> {name: array.shape for name, array in sorted(next(batches).items())}["tokens"]
    (4, 16)
    >>> batches.close()
    """

    class Config(ConfigBase["SupervisedInput"]):
        source: ConfigBase = REQUIRED  # a source, or a Mixture of several
        seq_len: int = REQUIRED
        batch_size: int = REQUIRED  # rows of the global batch
        rows: ConfigBase = FirstFit.Config()  # packing of examples into rows
        long: Literal["refuse", "split"] = "refuse"  # examples that need more than a row
        prefetch: int = 4  # batches
        seed: int = 0

        @override
        def check_fields(self) -> None:
            self.require_least(1, "seq_len", "batch_size")
            self.require_least(0, "prefetch")

        @property
        def dtypes(self) -> dict[str, str]:
            """The dtype of each array of a batch, all [rows, seq_len]."""
            return dict(TEXTS)

        @property
        def contents(self) -> Contents:
            """Kind of examples, which a loss must fit."""
            return "texts"

    _stream = BatchStream  # makes the batches
    _labelled = False  # sources have labels

    def __init__(self, cfg: Config, *, rows: Sequence[int] | np.ndarray | None = None):
        """`rows`: indices of this process's rows, ascending (see `mesh.batches.local_rows`); None: all."""
        from grain.experimental import ThreadPrefetchDatasetIterator  # slow to import

        self.seq_len, self.batch_size = cfg.seq_len, cfg.batch_size
        own = np.arange(cfg.batch_size) if rows is None else np.asarray(rows)
        _check(cfg.batch_size, own)
        arrangement = cfg.rows.build()
        name = owner_name(cfg.source)
        if isinstance(cfg.source, Mixture.Config):
            mixture: Mixture | Single = cfg.source.build()
        else:
            mixture = Single(build_source(cfg.source, name), name)
        for source in mixture.sources:
            self.check_source(source, f"{owner_name(cfg)} of {name}")
            length, where = source.longest
            if cfg.long == "refuse" and length - 1 > cfg.seq_len:
                raise too_long(where, length, cfg.seq_len)
        self._made_with = {
            "seq_len": cfg.seq_len,
            "seed": cfg.seed,
            "rows": to_text(cfg.rows),
            "long": cfg.long,
            "weights": mixture.describe(),
            **{f"data of {n}": source.digest for n, source in zip(mixture.names, mixture.sources, strict=True)},
        }
        stream = self._stream(
            mixture,
            arrangement,
            seq_len=cfg.seq_len,
            batch_size=cfg.batch_size,
            long=cfg.long,
            seed=cfg.seed,
            rows=own,
            dtypes=cfg.dtypes,
        )
        self._epoch = stream.one_epoch
        self._metrics: dict[str, float] = {}
        # In a list, which is emptied when this object is collected, at the interpreter's end at the latest: a Grain
        # iterator that outlives the interpreter cannot close itself.
        self._iterator = [ThreadPrefetchDatasetIterator(stream, cfg.prefetch)]
        self._close = weakref.finalize(self, lambda iterator: iterator.pop().close(), self._iterator)

    def check_source(self, source: IndexedSource, name: str) -> None:
        """Refuse a source of other examples (InputError); `name` is that of both."""
        if isinstance(source, LabelledReadAhead) != self._labelled:
            expected = "examples with labels" if self._labelled else "a LabelledInput for examples with labels"
            raise InputError(f"{name}: expected {expected}")

    def __iter__(self) -> "SupervisedInput":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch: Batch = next(self._iterator[0])
        self._metrics = batch.metrics
        return batch.arrays

    def one_epoch(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield batches of each example once, whatever was read before; see `BatchStream.one_epoch`."""
        return (batch.arrays for batch in self._epoch())

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last batch, the same on all hosts.

        Returns:
            `packing`, the fraction of its positions that hold a token, and `epoch`, how often the source has been read
            (of a mixture: `epoch/NAME`); where pieces without a learned token are left out, `left_out`, their share.
        """
        return self._metrics

    def state(self) -> dict[str, Any]:
        """Return the position of the next batch: the same on every host, JSON-able, small whatever the data."""
        return {"format": _FORMAT, **self._iterator[0].get_state(), "made_with": self._made_with}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state()` was taken; the following batches are the same to the bit.

        Raises:
            InputError: the state is of another format, or of other data or settings.
        """
        if state.get("format") != _FORMAT:
            raise InputError(
                "the position of the input in this checkpoint was written by another version, which packed rows in "
                "another way; finish the run with that version, or start a new one"
            )
        before = state["made_with"]
        for name in before | self._made_with:
            if before.get(name) != self._made_with.get(name):
                raise InputError(
                    f"the input cannot resume from this checkpoint: {name} was {before.get(name)!r} "
                    f"and is {self._made_with.get(name)!r}; put it back, or start a new run"
                )
        self._iterator[0].set_state({"drawn": state["drawn"], "row": state["row"]})

    def close(self) -> None:
        """End the thread that prepares batches; no batch can be read afterwards."""
        self._close()


def _check(batch_size: int, rows: np.ndarray) -> None:
    if not len(rows) or rows[0] < 0 or rows[-1] >= batch_size or (np.diff(rows) < 1).any():
        raise InputError(
            f"SupervisedInput: rows {rows.tolist()} of a batch; expected some of 0 to {batch_size - 1} "
            "(SupervisedInput.Config.batch_size - 1), ascending"
        )
