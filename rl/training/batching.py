"""Scored groups -> the arrays of one update, in the layout of `GroupContext`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from rl.objective import Objective
from rl.roles.messages import Group

Batch = dict[str, np.ndarray]


def pack_groups(
    groups: Sequence[Group],
    objective: Objective,
    *,
    max_prompt: int,
    max_new: int,
    row_multiple: int = 1,
    samples_per_row: int | None = None,
) -> tuple[Batch, dict[str, float]]:
    """Arrays of one update and figures about its data.

    Prompts are cut into trunk and last token; every branch is `[last, y_0, ..., y_{T-2}]` with targets
    `[y_0, ..., y_{T-1}]`, so all masks follow from positions. Rows that carry no gradient (by the objective) are left
    out, and the rest is padded to a multiple of `row_multiple` rows, which bounds the number of shapes compiled.

    A row is a group, or so many samples of one: then its trunk is in several rows, each to be computed by itself. What
    depends on the whole group is known by then, so the update is the same.

    Returns:
        batch: trunk int32 [g, p], trunk_lengths int32 [g], inputs and targets int32 [g, n, t], action_mask bool,
            logprobs_behaviour, weights, metric_weights float32 [g, n, t], advantages float32 [g, n].
        figures: reward, reward/<family>, counts and fractions over the whole batch.
    """
    count, samples = len(groups), len(groups[0].rollouts)
    tokens = {
        "trunk": np.zeros((count, max_prompt - 1), np.int32),
        "trunk_lengths": np.zeros(count, np.int32),
        "inputs": np.zeros((count, samples, max_new), np.int32),
        "targets": np.zeros((count, samples, max_new), np.int32),
        "action_mask": np.zeros((count, samples, max_new), bool),
        "logprobs_behaviour": np.zeros((count, samples, max_new), np.float32),
    }
    for g, group in enumerate(groups):
        prompt = group.prompt.tokens
        tokens["trunk"][g, : len(prompt) - 1] = prompt[:-1]
        tokens["trunk_lengths"][g] = len(prompt) - 1
        tokens["inputs"][g, :, 0] = prompt[-1]
        for n, rollout in enumerate(group.rollouts):
            length = len(rollout.tokens)
            tokens["inputs"][g, n, 1:length] = rollout.tokens[:-1]
            tokens["targets"][g, n, :length] = rollout.tokens
            tokens["action_mask"][g, n, :length] = rollout.action_mask
            tokens["logprobs_behaviour"][g, n, :length] = rollout.logprobs
    rewards = np.asarray([[score.reward for score in group.scores] for group in groups])
    prepared = objective.prepare(
        rewards,
        tokens["action_mask"],
        truncated=np.asarray([[r.finish_reason == "length" for r in g.rollouts] for g in groups]),
        scored=np.asarray([[score.status == "ok" for score in g.scores] for g in groups]),
    )
    batch = {**tokens, **prepared.arrays}
    if samples_per_row is not None:
        batch = {name: _cut(name, array, samples // samples_per_row) for name, array in batch.items()}
    live = np.flatnonzero(batch["weights"].any(axis=(1, 2)))
    rows = max(row_multiple, -(-len(live) // row_multiple) * row_multiple)
    batch = {name: _take(array, live, rows) for name, array in batch.items()}
    return batch, {**prepared.stats, **_figures(groups, rewards)}


def digest_of_groups(groups: Sequence[Group]) -> str:
    """Return a digest of everything that affects the update, without timings."""
    digest = xxhash.xxh3_128()
    for group in groups:
        scores = [(score.reward, score.status) for score in group.scores]
        ends = [(rollout.prompt_id, rollout.sample_id, rollout.finish_reason) for rollout in group.rollouts]
        arrays = [array for r in group.rollouts for array in (r.tokens, r.logprobs, r.versions, r.action_mask)]
        shapes = [array.shape for array in arrays]
        digest.update(repr((group.prompt.id, group.prompt.family, scores, ends, shapes)).encode())
        for array in (group.prompt.tokens, *arrays):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _take(array: np.ndarray, rows: np.ndarray, total: int) -> np.ndarray:
    padding = [(0, total - len(rows))] + [(0, 0)] * (array.ndim - 1)
    return np.pad(array[rows], padding)


def _cut(name: str, array: np.ndarray, parts: int) -> np.ndarray:
    """[g, n, ...] -> [g * parts, n / parts, ...]; of the trunk as many copies."""
    if name in ("trunk", "trunk_lengths"):
        return np.repeat(array, parts, axis=0)
    return array.reshape(array.shape[0] * parts, array.shape[1] // parts, *array.shape[2:])


def _figures(groups: Sequence[Group], rewards: np.ndarray) -> dict[str, float]:
    lengths = [len(rollout.tokens) for group in groups for rollout in group.rollouts]
    failures = [score.status != "ok" for group in groups for score in group.scores]
    figures: dict[str, Any] = {
        "reward": rewards.mean(),
        "completion_length": np.mean(lengths),
        "gen_tokens": np.sum(lengths),
        "verifier_failures": np.sum(failures),
    }
    families = np.asarray([group.prompt.family for group in groups])
    for family in sorted(set(families)):
        figures[f"reward/{family}"] = rewards[families == family].mean()
    return {name: float(value) for name, value in figures.items()}
