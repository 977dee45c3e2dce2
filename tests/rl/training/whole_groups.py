"""Groups as arrays of one update: in padded rows, or as whole sequences for a plain forward pass."""

from collections.abc import Sequence
from typing import Any

from rl.objective import Objective
from rl.protocol.headers import header_of
from rl.protocol.messages import Group, contents_of
from rl.training.batching import Batch, PaddedRows, arrange, fill_padded
from rl.training.logprobs import fill_rows, row_length


def pack_groups(
    groups: Sequence[Group],
    objective: Objective,
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    row_multiple: int = 1,
    samples_per_row: int | None = None,
) -> tuple[Batch, dict[str, float]]:
    """Arrays of one update in padded rows, and figures about its data; see `arrange` and `fill_padded`."""
    headers = [header_of(group) for group in groups]
    layout = PaddedRows(max_prompt_tokens, max_new_tokens, row_multiple, samples_per_row)
    arranged = arrange(headers, objective, layout)
    (microbatch,) = arranged.microbatches
    samples = layout.samples(headers)
    filled = fill_padded(
        microbatch.rows, arranged.prepared, contents_of(groups), max_prompt_tokens, max_new_tokens, samples
    )
    return filled, arranged.figures


def pack_rows(
    groups: Sequence[Group], *, max_prompt_tokens: int, max_new_tokens: int, row_multiple: int = 1
) -> dict[str, Any]:
    """Whole sequences as arrays of one shape for all batches of as many rollouts.

    Returns:
        tokens, targets: int32 [rows, length], right-padded, targets[i] being the token after tokens[i].
        first: for each rollout, the index at which its completion's first token is a target.
    """
    sequences = [(group.prompt.tokens, rollout.tokens) for group in groups for rollout in group.rollouts]
    rows = -(-len(sequences) // row_multiple) * row_multiple
    first = [len(prompt) - 1 for prompt, _ in sequences]
    return {**fill_rows(sequences, rows, row_length(max_prompt_tokens, max_new_tokens)), "first": first}
