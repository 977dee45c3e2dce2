"""Arrays of rows: padded rows (`GroupContext`), packed rows (`PackedGroupContext`), and rows of token trees."""

from collections.abc import Sequence

import numpy as np

from rl.objective import Prepared
from rl.protocol.messages import Rollout, RolloutData
from rl.protocol.token_tree import token_tree
from rl.training.batching.arrays import (
    Batch,
    added_by,
    empty,
    packed_arrays,
    padded_arrays,
    write_completion,
    write_prompt,
)
from rl.training.columns import Columns, Place, Places
from rl.training.packing import Packing, Row


def fill_padded(
    rows: Sequence[Row],
    prepared: Prepared,
    contents: RolloutData,
    max_prompt_tokens: int,
    max_new_tokens: int,
    samples: int,
    columns: Columns = (),
) -> Batch:
    """Arrays of rows in the layout of `GroupContext`, of `samples` samples each.

    Prompts are cut into prefix and last token; every completion is `[last, y_0, ..., y_{T-2}]` with targets
    `[y_0, ..., y_{T-1}]`, so all masks follow from positions.

    Returns:
        prefix int32 [g, p], prefix_lengths int32 [g], inputs and targets int32 [g, n, t], action_mask bool,
        logprobs_behaviour, weights, metric_weights float32 [g, n, t], advantages float32 [g, n]; and the columns.
    """
    sizes = {"max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}
    batch = empty(padded_arrays(added_by(prepared), rows=len(rows), samples=samples, **sizes))
    places: list[Place] = []
    for r, row in enumerate(rows):
        for g, rollouts in row:
            prompt, found = contents[g]
            batch["prefix"][r, : len(prompt) - 1] = prompt[:-1]
            batch["prefix_lengths"][r] = len(prompt) - 1
            batch["inputs"][r, :, 0] = prompt[-1]
            for i, n in enumerate(rollouts):
                write_completion(batch, (r, i), 0, prompt, found[n])
                places.append(Place(r, found[n], len(prompt) - 1, 0 if i == 0 else None, i * max_new_tokens))
            for name, array in prepared.arrays.items():
                batch[name][r, : len(rollouts)] = array[g, list(rollouts)]
    placed = Places(max_prompt_tokens - 1, batch["targets"].shape, places)
    return batch | {column.name: column.fill(placed) for column in columns}


def fill_trees(
    rows: Sequence[Row], length: int, prepared: Prepared, contents: RolloutData, packing: Packing, columns: Columns = ()
) -> Batch:
    """Arrays of rows in the layout of `PackedGroupContext` with trees: what rollouts of a prompt begin with is once.

    A token has its place by its target, so where rollouts part each has a token of its own, of the same input. What
    belongs to a rollout, and not to its tokens, is in an order of its own, from which `paths` leads to the row's.

    Returns:
        prefix, prefix_segments and prefix_positions int32 [b, p]; inputs, targets, segments, positions and ends int32
        [b, t]; of the row's completions lengths int32 [b, c], paths (indices of their tokens) int32
        [b, c, max_new_tokens], action_mask bool, logprobs_behaviour, the objective's arrays of tokens and the columns
        [b, c, max_new_tokens], its others.
    """
    batch = empty(packed_arrays(added_by(prepared), packing, rows=len(rows), length=length))
    batch["ends"][:] = length  # padding attends only to itself
    places: list[Place] = []
    for r, row in enumerate(rows):
        front = at = index = 0
        for segment, (g, rollouts) in enumerate(row, start=1):
            prompt, found = contents[g]
            front = write_prompt(batch, r, front, segment, prompt)
            tree, path = token_tree([found[n].tokens for n in rollouts]), np.zeros(0, np.int32)
            for n, common in zip((rollouts[i] for i in tree.order), tree.common, strict=True):
                batch["ends"][r, path[common:]] = at  # no later token has these before it
                own = np.arange(at, at + len(found[n].tokens) - common)  # places of the tokens that it does not share
                path, at = np.concatenate([path[:common], own]).astype(np.int32), at + len(own)
                _write_own(batch, r, own, segment, common, prompt, found[n])
                _write_path(batch, (r, index), path, found[n])
                places.append(Place(r, found[n], len(prompt) - 1, None, index * packing.max_new_tokens))
                for name, array in prepared.arrays.items():
                    batch[name][r, index] = array[g, n]
                index += 1
            batch["ends"][r, path] = at
    placed = Places(packing.prompts, batch["paths"].shape, places)
    return batch | {column.name: column.fill(placed) for column in columns}


def _write_own(
    batch: Batch, r: int, own: np.ndarray, segment: int, common: int, prompt: np.ndarray, rollout: Rollout
) -> None:
    """Write the tokens behind the `common` ones that an earlier rollout has written, at their places `own`."""
    tokens, size = rollout.tokens, len(rollout.tokens)
    batch["inputs"][r, own] = np.concatenate([prompt[-1:], tokens])[common:size]
    batch["targets"][r, own], batch["segments"][r, own] = tokens[common:], segment
    batch["positions"][r, own] = len(prompt) - 1 + np.arange(common, size)


def _write_path(batch: Batch, where: tuple[int, int], path: np.ndarray, rollout: Rollout) -> None:
    """Write where a completion's tokens are, and what belongs to them in this rollout."""
    part = (*where, slice(len(path)))
    batch["paths"][part], batch["lengths"][where] = path, len(path)
    batch["action_mask"][part] = rollout.action_mask
    batch["logprobs_behaviour"][part] = rollout.logprobs


def fill_packed(
    rows: Sequence[Row], length: int, prepared: Prepared, contents: RolloutData, packing: Packing, columns: Columns = ()
) -> Batch:
    """Arrays of rows in the layout of `PackedGroupContext`, p tokens for prompts and t for completions.

    With `packing.tree` the t tokens are those of trees (`fill_trees`).

    Returns:
        prefix, prefix_segments and prefix_positions int32 [b, p]; inputs, targets, segments, positions and starts int32
        [b, t], action_mask bool, logprobs_behaviour and the objective's arrays of tokens float32 [b, t]; of the row's
        completions, first (index of its first token) and lengths int32 [b, c], and the objective's others; the columns.
    """
    if packing.tree:
        return fill_trees(rows, length, prepared, contents, packing, columns)
    batch = empty(packed_arrays(added_by(prepared), packing, rows=len(rows), length=length))
    alignment = packing.alignment(length)
    places: list[Place] = []
    for r, row in enumerate(rows):
        front = at = index = 0
        for segment, (g, rollouts) in enumerate(row, start=1):
            prompt, found = contents[g]
            begin, front = front, write_prompt(batch, r, front, segment, prompt)
            for n in rollouts:
                size = len(found[n].tokens)
                part = slice(at, at + size)
                write_completion(batch, (r,), at, prompt, found[n])
                places.append(Place(r, found[n], len(prompt) - 1, begin if n == rollouts[0] else None, at))
                batch["segments"][r, part], batch["starts"][r, part] = segment, at
                batch["positions"][r, part] = len(prompt) - 1 + np.arange(size)
                batch["first"][r, index], batch["lengths"][r, index] = at, size
                for name, array in prepared.arrays.items():
                    if array.ndim == 3:
                        batch[name][r, part] = array[g, n, :size]
                    else:
                        batch[name][r, index] = array[g, n]
                at, index = -(-part.stop // alignment) * alignment, index + 1
        batch["starts"][r, at:] = at  # padding attends only to itself
    placed = Places(packing.prompts, batch["targets"].shape, places)
    return batch | {column.name: column.fill(placed) for column in columns}
