"""Padded rows: a group, or some samples of it, in each, in the layout of `GroupContext`."""

from collections.abc import Sequence

from rl.objective import Prepared
from rl.protocol.messages import RolloutData
from rl.training.batching.arrays import Batch, added_by, empty, padded_arrays, write_completion
from rl.training.columns import Columns, Place, Places
from rl.training.packing import Row


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
