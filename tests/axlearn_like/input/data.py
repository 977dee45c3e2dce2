"""Sources and files for the tests of the input."""

import json
from pathlib import Path
from typing import Any

import grain
import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.tokenizers.bytes import ByteTokenizer

BYTES = ByteTokenizer.Config()


class Numbered(Configurable):
    """Example i holds base + i in every token, so that it can be told from all others; every third is unlearned."""

    class Config(ConfigBase["Numbered"]):
        examples: int = 17
        base: int = 0
        min_length: int = 2
        max_length: int = 9

    def __init__(self, cfg: Config):
        self._base = cfg.base
        self._lengths = np.random.default_rng(cfg.base).integers(cfg.min_length, cfg.max_length + 1, cfg.examples)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        length = self._lengths[index]
        tokens = np.full(length, self._base + index, np.int32)
        return {"tokens": tokens, "loss_mask": np.arange(length) % 3 > 0}


def json_lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def texts(source: Any) -> list[str]:
    """Return the texts of a source of bytes."""
    return [bytes(int(t) for t in source[i]["tokens"] if t < 256).decode() for i in range(len(source))]


def grain_examples(examples: int) -> grain.MapDataset:
    """Return the examples of `Numbered` as a dataset of Grain."""
    return grain.MapDataset.source(Numbered.Config(examples=examples).build())
