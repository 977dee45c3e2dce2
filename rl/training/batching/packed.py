"""Packed rows: completions of several prompts in each, in the layout of `PackedGroupContext`."""

from collections.abc import Sequence

import numpy as np

from rl.objective import Prepared
from rl.protocol.messages import RolloutData
from rl.training.batching.arrays import Batch, added_by, empty, packed_arrays, write_completion, write_prompt
from rl.training.batching.trees import fill_trees
from rl.training.columns import Columns, Place, Places
from rl.training.packing import Packing, Row


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
