"""Arrays of an update's rows: what each layout has, described or empty, and what all write into them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rl.objective import Prepared
from rl.protocol.messages import Rollout
from rl.training.packing import Packing

Batch = dict[str, np.ndarray]
Described = dict[str, jax.ShapeDtypeStruct]
Added = Mapping[str, tuple[int, Any]]  # arrays that an objective adds: rank (2, of tokens 3) and dtype

PREFIX = ("prefix", "prefix_segments", "prefix_positions")  # arrays of packed rows


def padded_arrays(added: Added, *, rows: int, samples: int, max_prompt_tokens: int, max_new_tokens: int) -> Described:
    """Return the arrays of `fill_padded`, which says what they are."""
    each = (rows, samples, max_new_tokens)
    return {
        **_of(np.int32, (rows, max_prompt_tokens - 1), "prefix"),
        **_of(np.int32, (rows,), "prefix_lengths"),
        **_of(np.int32, each, "inputs", "targets"),
        **_of(np.bool_, each, "action_mask"),
        **_of(np.float32, each, "logprobs_behaviour"),
        **{name: jax.ShapeDtypeStruct(each[:rank], dtype) for name, (rank, dtype) in added.items()},
    }


def packed_arrays(added: Added, packing: Packing, *, rows: int, length: int) -> Described:
    """Return the arrays of `fill_packed`, or of `fill_trees`, which say what they are."""
    each = (rows, packing.completions)
    tokens = (*each, packing.max_new_tokens) if packing.tree else (rows, length)
    places, beside = (("ends",), ("paths",)) if packing.tree else (("starts",), ())
    return {
        **_of(np.int32, (rows, packing.prompts), *PREFIX),
        **_of(np.int32, (rows, length), "inputs", "targets", "segments", "positions", *places),
        **_of(np.int32, each, "lengths", *(() if packing.tree else ("first",))),
        **_of(np.int32, tokens, *beside),
        **_of(np.bool_, tokens, "action_mask"),
        **_of(np.float32, tokens, "logprobs_behaviour"),
        **{name: jax.ShapeDtypeStruct(tokens if rank == 3 else each, dtype) for name, (rank, dtype) in added.items()},
    }


def _of(dtype: Any, shape: tuple[int, ...], *names: str) -> Described:
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name in names}


def added_by(prepared: Prepared) -> Added:
    """Return what an objective has added to a batch."""
    return {name: (array.ndim, array.dtype) for name, array in prepared.arrays.items()}


def empty(described: Described) -> Batch:
    """Return such arrays, of zeros."""
    return {name: np.zeros(one.shape, one.dtype) for name, one in described.items()}


def write_prompt(batch: Batch, r: int, at: int, segment: int, prompt: np.ndarray) -> int:
    """Write a prompt, without its last token, into a packed row, from index `at` on; return where the next begins."""
    prefix = slice(at, at + len(prompt) - 1)
    for name, values in zip(PREFIX, (prompt[:-1], segment, np.arange(len(prompt) - 1)), strict=True):
        batch[name][r, prefix] = values
    return prefix.stop


def write_completion(batch: Batch, where: tuple[int, ...], at: int, prompt: np.ndarray, rollout: Rollout) -> None:
    """Write a rollout's tokens into a row, from index `at` on: `[last, y_0, ...]` with targets `[y_0, y_1, ...]`."""
    size = len(rollout.tokens)
    part = (*where, slice(at, at + size))
    if size:
        batch["inputs"][part][0], batch["inputs"][part][1:] = prompt[-1], rollout.tokens[:-1]
    batch["targets"][part] = rollout.tokens
    batch["action_mask"][part] = rollout.action_mask
    batch["logprobs_behaviour"][part] = rollout.logprobs
