"""Supervised input by Grain: shuffled, packed, deterministic, resumable in mid-epoch."""

from typing import Any, Protocol

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from mesh.errors import UserError


class InputError(UserError, ValueError):
    """An example or a setting that cannot be trained on."""


class Source(Protocol):
    """Random access to examples `{"tokens": int32[n], "loss_mask": bool[n]}`.

    `loss_mask[i]` says whether token i is to be learned, i.e. predicted from the tokens before it.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


class SupervisedInput(Configurable):
    """An endless iterator of packed batches; epoch after epoch, each in its own order.

    A batch is a dict of numpy arrays [batch_size, seq_len]: `tokens`, `targets` (the next token of
    the same segment), `positions` (from 0 in each segment), `segment_ids` (from 1 in each row, 0 on
    padding), all int32, and `weights` float32: 1 / (number of learned targets in the whole batch)
    on those targets, else 0.

    An example of n tokens takes n - 1 places: its last token is only a target. Every process makes
    the whole batch and puts its own part on its devices, so the data order depends neither on the
    number of hosts nor on the mesh.
    """

    class Config(ConfigBase["SupervisedInput"]):
        source: ConfigBase = REQUIRED
        seq_len: int = REQUIRED
        batch_size: int = REQUIRED  # rows of the global batch
        seed: int = 0

    def __init__(self, cfg: Config):
        if cfg.seq_len < 1 or cfg.batch_size < 1:
            raise InputError(
                "SupervisedInput.Config: expected seq_len >= 1 and batch_size >= 1, "
                f"got seq_len={cfg.seq_len}, batch_size={cfg.batch_size}"
            )
        self.seq_len, self.batch_size = cfg.seq_len, cfg.batch_size
        source: Source = cfg.source.build()
        if len(source) == 0:
            raise InputError(f"source {type(source).__name__} has no examples")
        self._iterator = iter(_packed(source, cfg))

    def __iter__(self) -> "SupervisedInput":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        packed = next(self._iterator)
        learned = packed["learned"].astype(np.float32)
        return {
            "tokens": packed["tokens"],
            "targets": packed["targets"],
            "positions": packed["tokens_positions"],
            "segment_ids": packed["tokens_segment_ids"],
            "weights": learned / np.float32(max(learned.sum(), 1.0)),
        }

    def state(self) -> dict[str, Any]:
        """Where the next batch comes from; JSON-able, and small whatever the size of the data."""
        return self._iterator.get_state()

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where `state()` was taken; the following batches are the same to the bit."""
        self._iterator.set_state(state)


def _packed(source: Source, cfg: SupervisedInput.Config) -> Any:
    """Grain's pipeline.

    Grain's packer fills `num_packing_bins` rows, gives them all out and starts again with empty
    ones; its state is where the rows now given out began. With as many bins as batch rows nothing
    is ever open between two batches, so the state is exact and a resume packs at most one batch
    again.
    """
    import grain

    def shift(index: int, example: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return _shift(index % len(source), example, cfg.seq_len)

    examples = (
        # Grain asks no more of a source than `Source` does, but its annotation is a class of its
        # own.
        grain.MapDataset.source(source)  # pyright: ignore[reportArgumentType]
        .map_with_index(shift)
        .seed(cfg.seed)
        .shuffle()
        .repeat()
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=64))
    )
    rows = grain.experimental.FirstFitPackIterDataset(
        examples,
        length_struct={"tokens": cfg.seq_len, "targets": cfg.seq_len, "learned": cfg.seq_len},
        num_packing_bins=cfg.batch_size,
        shuffle_bins=False,
    )
    return rows.batch(cfg.batch_size, drop_remainder=True)


def _shift(index: int, example: dict[str, np.ndarray], seq_len: int) -> dict[str, np.ndarray]:
    tokens = np.asarray(example["tokens"], np.int32)
    learned = np.asarray(example["loss_mask"], bool)
    if tokens.ndim != 1 or tokens.shape != learned.shape or len(tokens) < 2:
        raise InputError(
            f"example {index}: expected tokens and loss_mask of one shape [n] with n >= 2, "
            f"got {tokens.shape} and {learned.shape}"
        )
    if len(tokens) - 1 > seq_len:
        raise InputError(
            f"example {index} has {len(tokens)} tokens and needs rows of {len(tokens) - 1}, "
            f"but seq_len is {seq_len}; raise seq_len or shorten the example"
        )
    return {"tokens": tokens[:-1], "targets": tokens[1:], "learned": learned[1:]}
