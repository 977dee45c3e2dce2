"""A source's examples without those that are held out, or those alone: by a hash of what is given."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input.source import InputError


class HeldOutSplit(Configurable):
    """Examples of a source of one side of a split.

    What decides is a hash of the tokens before the first that is learned, so that all answers to one prompt are on one
    side; of all tokens, where every one is learned.
    """

    class Config(ConfigBase["HeldOutSplit"]):
        source: ConfigBase[Any] = REQUIRED
        every: int = 8  # one prompt in so many is held out
        heldout: bool = False  # read those that are held out

    def __init__(self, cfg: Config):
        self._source: Any = cfg.source.build()
        self.labelled = getattr(self._source, "labelled", False)
        self._kept = np.flatnonzero(_held_out(self._source, cfg.every) == cfg.heldout)
        if not len(self._kept):
            side = "held out" if cfg.heldout else "left to train on"
            raise InputError(f"of {len(self._source)} examples none is {side}: a file of held-out rows says which are")
        self.longest = self._source.longest

    @staticmethod
    def sizes(source: Any, every: int) -> tuple[int, int]:
        """Return how many examples of a built source are trained on, and held out."""
        held = int(_held_out(source, every).sum())
        return len(source) - held, held

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._source[int(self._kept[index])]

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))


def _held_out(source: Any, every: int) -> np.ndarray:
    marks = (_mark(source[index]) % every == 0 for index in range(len(source)))
    return np.fromiter(marks, bool, len(source))


def _mark(example: dict[str, np.ndarray]) -> int:
    learned = example["sides"] != 0 if "sides" in example else example["loss_mask"]
    first = int(np.argmax(learned))
    return xxhash.xxh3_64_intdigest(np.asarray(example["tokens"][: first or None], np.int32).tobytes())
