"""Sources of examples: random access, and an index of their lengths where there is one."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mesh.errors import UserError


class InputError(UserError, ValueError):
    """Data, an example or a setting that cannot be trained on."""


class Source(Protocol):
    """Random access to examples `{"tokens": int32[n], "loss_mask": bool[n]}`, n >= 2.

    `loss_mask[i]` is True if token i is learned, i.e. predicted from the tokens before it. The methods are those of
    Grain's `RandomAccessDataSource`, so a Grain `MapDataset` of such examples is a source.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


@runtime_checkable
class IndexedSource(Protocol):
    """A source that knows its examples' lengths without reading them.

    Every host plans the rows of all hosts, so it asks for the lengths of all examples, but reads only its own.
    """

    digest: str  # a checksum of all examples: a run resumes only with the data that it began with

    longest: tuple[int, str]  # tokens of the longest example, and its location; the shortest has at least 2

    def __len__(self) -> int: ...

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each example: int64 [k]."""
        ...

    def learned(self, indices: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return how many of the tokens [start, stop) of each example are learned: int64 [k]."""
        ...

    def read(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens [start, stop) of an example (int32) and their loss mask (bool)."""
        ...


def indexed(source: Source | IndexedSource) -> IndexedSource:
    """Return the source itself, or one that finds the lengths by reading the examples."""
    if isinstance(source, IndexedSource):
        return source
    return LabelledReadAhead(source) if getattr(source, "labelled", False) else ReadAhead(source)


class ReadAhead:
    """Any `Source` as an indexed one: the examples whose lengths were last asked for are kept in memory."""

    def __init__(self, source: Source):
        self._source = source
        self._name = type(source).__name__
        self.digest = f"{self._name} of {len(source)} examples"
        self.longest: tuple[int, str] = getattr(source, "longest", (0, ""))  # unknown before it is read
        self._kept: dict[int, tuple[Any, ...]] = {}

    def __len__(self) -> int:
        return len(self._source)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each example: int64 [k]."""
        kept = self._kept
        self._kept = {int(i): kept.get(int(i)) or self._read(int(i)) for i in indices}
        return np.array([len(self._kept[int(i)][0]) for i in indices], np.int64)

    def learned(self, indices: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return how many of the tokens [start, stop) of each example are learned: int64 [k]."""
        parts = zip(indices.tolist(), starts.tolist(), stops.tolist(), strict=True)
        return np.array([np.count_nonzero(self._example(i)[1][a:b]) for i, a, b in parts], np.int64)

    def read(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens [start, stop) of an example (int32) and their loss mask (bool)."""
        tokens, mask, *_ = self._example(index)
        return tokens[start:stop], mask[start:stop]

    def _example(self, index: int) -> tuple[Any, ...]:
        return self._kept.get(index) or self._read(index)

    def _read(self, index: int) -> tuple[Any, ...]:
        example = self._source[index]
        return check_example(example["tokens"], example["loss_mask"], f"example {index} of {self._name}")


class LabelledReadAhead(ReadAhead):
    """A source of labelled examples (see labelled.py) as an indexed one.

    Its tokens are followed by one that is only a target, as the last of other examples is, so that an example of n
    tokens takes n positions; the loss mask is that of the labels, moved on by one like targets.
    """

    def labels(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return labels (float32, NaN where there is none) and positions (int32) of an example's tokens."""
        return self._example(index)[2:4]

    def others(self, index: int) -> dict[str, np.ndarray]:
        """Return further arrays of an example, int32, a number for each token."""
        return self._example(index)[4]

    def _read(self, index: int) -> tuple[Any, ...]:
        example, where = self._source[index], f"example {index} of {self._name}"
        tokens, labels = np.asarray(example["tokens"], np.int32), np.asarray(example["labels"], np.float32)
        positions = np.asarray(example.get("positions", np.arange(len(tokens))), np.int32)
        has_label = ~np.isnan(labels)
        if tokens.ndim != 1 or not tokens.shape == labels.shape == positions.shape or not has_label.any():
            raise InputError(
                f"{where}: expected tokens, labels and positions of one shape [n] with at least one label, got "
                f"{tokens.shape}, {labels.shape} with {int(has_label.sum())}, and {positions.shape}"
            )
        known = ("tokens", "labels", "positions")
        others = {name: np.asarray(array, np.int32) for name, array in example.items() if name not in known}
        for name, array in others.items():
            if array.shape != tokens.shape:
                raise InputError(f"{where}: expected {name} of the shape of tokens, {tokens.shape}, got {array.shape}")
        return np.append(tokens, np.int32(0)), np.append(False, has_label), labels, positions, others


def check_example(
    tokens: Sequence[int] | np.ndarray, loss_mask: Sequence[bool] | np.ndarray, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return both as int32 and bool arrays; InputError, with `where`, unless they are of one shape [n], n >= 2."""
    ids, mask = np.asarray(tokens, np.int32), np.asarray(loss_mask, bool)
    if ids.ndim != 1 or ids.shape != mask.shape or len(ids) < 2:
        raise InputError(
            f"{where}: expected tokens and loss_mask of one shape [n] with n >= 2, got {ids.shape} and {mask.shape}"
        )
    return ids, mask
