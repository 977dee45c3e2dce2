"""Small preferences, in batches of any layout."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.input import EncodedCompletion, OneARow, PreferenceInput, preference, unpaired

COUNT, LENGTH = 8, 36

Batch = dict[str, np.ndarray]


class Pairs(Configurable):
    """Pairs of completions of 1 to 5 tokens, of prompts of 1 to 4."""

    labelled = True

    class Config(ConfigBase["Pairs"]):
        pass

    def __init__(self, cfg: Config):
        rng = np.random.default_rng(0)

        def completion(prompt: np.ndarray) -> EncodedCompletion:
            size = int(rng.integers(1, 6))
            return EncodedCompletion(prompt, rng.integers(1, 40, size).astype(np.int32), np.ones(size, bool))

        prompts = [rng.integers(1, 40, rng.integers(1, 5)).astype(np.int32) for _ in range(COUNT)]
        self.pairs = [(completion(prompt), completion(prompt)) for prompt in prompts]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return preference(*self.pairs[index])


class Judged(Pairs):
    """The first completions of `Pairs`, of which every third is good, each with the next one's."""

    class Config(Pairs.Config):
        pass

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return unpaired(self.pairs[index][0], index % 3 == 0, self.pairs[(index + 1) % COUNT][0])


def batch_of(source: ConfigBase[Any], kind: Any = PreferenceInput) -> Batch:
    """Return the one batch that holds every example, in a row of its own."""
    rows = OneARow.Config(window=COUNT)
    data = kind.Config(source=source, seq_len=LENGTH, batch_size=COUNT, rows=rows, prefetch=0).build()
    batch = next(data)
    data.close()
    return batch


def laid_out(batch: Batch, rows: Sequence[Sequence[int]], garbage: int = 0) -> Batch:
    """Return a batch of the same shape whose row i has the examples that stand in these rows of `batch`, side by side.

    `garbage`: a token and target of all padding.
    """
    out = {name: np.zeros_like(array) for name, array in batch.items()}
    for row, examples in enumerate(rows):
        at = 0
        for example in examples:
            size = int(np.nonzero(batch["weights"][example])[0][-1]) + 1
            for name, array in batch.items():
                shift = out["segment_ids"][row].max() if name == "segment_ids" else 0
                out[name][row, at : at + size] = array[example, :size] + shift
            at += size
    for name in {"tokens", "targets", "other_tokens", "other_targets"} & set(batch):
        out[name][out["segment_ids"] == 0] = garbage
    return out
