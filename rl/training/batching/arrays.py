"""Empty arrays of an update's rows, and what every layout writes into them."""

from collections.abc import Sequence

import numpy as np

from rl.objective import Prepared
from rl.protocol.messages import Rollout

Batch = dict[str, np.ndarray]

PREFIX = ("prefix", "prefix_segments", "prefix_positions")  # arrays of packed rows


def token_arrays(*shape: int) -> Batch:
    """Return the empty arrays of tokens, what was drawn and with which probability."""
    kinds = {"inputs": np.int32, "targets": np.int32, "action_mask": bool, "logprobs_behaviour": np.float32}
    return {name: np.zeros(shape, kind) for name, kind in kinds.items()}


def int_arrays(names: Sequence[str], *shape: int) -> Batch:
    """Return empty arrays of int32."""
    return {name: np.zeros(shape, np.int32) for name in names}


def objective_arrays(
    prepared: Prepared, rows: tuple[int, ...], tokens: tuple[int, ...], others: tuple[int, ...] = ()
) -> Batch:
    """Return empty arrays for what the objective adds, of tokens or of completions."""
    arrays = prepared.arrays.items()
    return {name: np.zeros((*rows, *(tokens if a.ndim == 3 else others)), a.dtype) for name, a in arrays}


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
