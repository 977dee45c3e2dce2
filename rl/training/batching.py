"""Scored groups -> the arrays of one update, in rows for `GroupContext` or `PackedGroupContext`.

What depends on the whole batch (advantages, weights, which rollout is in which row) follows from the headers of its
groups. The tokens are needed only of the rollouts in the rows that are filled.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rl.objective import Objective, Prepared
from rl.roles.headers import GroupHeader, header_of
from rl.roles.messages import Contents, Episode, Group, Rollout, contents_of
from rl.roles.token_tree import token_tree
from rl.training.packing import Microbatch, Packing, Row, Sizes

Batch = dict[str, np.ndarray]


class Minibatch(NamedTuple):
    """Rows of one optimizer step before their tokens are there.

    Attributes:
        prepared: what the objective adds, arrays [groups, samples, ...]; zero beyond the rollouts of a smaller group.
        microbatches: the rollouts of each row.
        has_gradient: False if no update is to be made of it.
    """

    prepared: Prepared
    microbatches: list[Microbatch]
    has_gradient: bool


class Arranged(NamedTuple):
    """A batch before its tokens are there.

    Attributes:
        minibatches: one, or the parts asked for.
        figures: reward, reward/<family>, counts and fractions over the whole batch.
        targets: a critic's, float64 [rollouts, tokens], and bool, the tokens of the loss; empty without one.
    """

    minibatches: list[Minibatch]
    figures: dict[str, float]
    targets: tuple[np.ndarray, np.ndarray] = (np.zeros((0, 0)), np.zeros((0, 0), bool))

    @property
    def prepared(self) -> Prepared:
        """Arrays that the objective adds to the one mini-batch."""
        (whole,) = self.minibatches
        return whole.prepared

    @property
    def microbatches(self) -> list[Microbatch]:
        """Rows of all mini-batches."""
        return [one for minibatch in self.minibatches for one in minibatch.microbatches]


def pack_groups(
    groups: Sequence[Group],
    objective: Objective,
    *,
    max_prompt: int,
    max_new: int,
    row_multiple: int = 1,
    samples_per_row: int | None = None,
) -> tuple[Batch, dict[str, float]]:
    """Arrays of one update in rows of equal sizes, and figures about its data; see `arrange` and `fill_padded`."""
    headers = [header_of(group) for group in groups]
    sizes: dict[str, Any] = {"max_prompt": max_prompt, "max_new": max_new, "row_multiple": row_multiple}
    arranged = arrange(headers, objective, **sizes, samples_per_row=samples_per_row)
    (microbatch,) = arranged.microbatches
    samples = samples_per_row or arranged.prepared.arrays["weights"].shape[1]
    filled = fill_padded(microbatch.rows, arranged.prepared, contents_of(groups), max_prompt, max_new, samples)
    return filled, arranged.figures


def arrange(
    headers: Sequence[GroupHeader],
    objective: Objective,
    *,
    max_prompt: int,
    max_new: int,
    row_multiple: int = 1,
    samples_per_row: int | None = None,
    packing: Packing | None = None,
    shards: int = 1,
    parts: Callable[[np.ndarray], Sequence[np.ndarray]] | None = None,
    divergence: np.ndarray | None = None,
    values: np.ndarray | None = None,
) -> Arranged:
    """Advantages and weights of an update, and the rollouts of each of its rows.

    Rows that carry no gradient (by the objective) are left out. With a packing that holds for every rollout. Without
    one, a row is a group, or `samples_per_row` samples of one: then its prompt is in several rows, each to be computed
    by itself; and the number of rows is padded to a multiple of `row_multiple`, which bounds the number of shapes
    compiled. What depends on the whole group is known by then, so the update is the same. Groups may be of any sizes.
    `parts` maps the live groups to those of each mini-batch, both bool[groups]; None: there is one.
    `divergence`: of every rollout from the reference, in their order, if the objective needs it.
    `values`: of every token of every rollout, [rollouts, max_new], if the objective needs them.
    """
    sizes = np.asarray([len(header.rollouts) for header in headers])
    each_row = samples_per_row or int(sizes.max())
    present = np.arange(-(-int(sizes.max()) // each_row) * each_row) < sizes[:, None]  # [groups, samples]
    mask = np.zeros((*present.shape, max_new), bool)
    for g, header in enumerate(headers):
        for n, rollout in enumerate(header.rollouts):
            mask[g, n, : rollout.length] = True if rollout.action_mask is None else rollout.action_mask
    rollouts = [rollout for header in headers for rollout in header.rollouts]
    scores = [score for header in headers for score in header.scores]
    flat = objective.prepare(
        np.asarray([score.reward for score in scores]),
        mask[present],
        groups=np.nonzero(present)[0],
        truncated=np.asarray([rollout.finish_reason == "length" for rollout in rollouts]),
        scored=np.asarray([score.status == "ok" for score in scores]),
        divergence=divergence,
        turns=[_turns(rollout.episode) for rollout in rollouts],
        values=values,
    )
    targets = () if flat.returns is None else ((flat.returns, flat.arrays["weights"] > 0),)
    prepared = flat._replace(
        returns=None, arrays={name: _placed(array, present) for name, array in flat.arrays.items()}
    )
    live = prepared.arrays["weights"].any(axis=-1)
    minibatches: list[Minibatch] = []
    for chosen in (None,) if parts is None else parts(live.any(axis=1)):
        part = prepared if chosen is None else objective.part(prepared, chosen)
        learned = part.arrays["weights"].any(axis=-1)
        if packing is None:
            placed = [_padded(learned, sizes, max_new, row_multiple, each_row)]
        else:
            placed = packing.plan(_contents(headers, learned), shards, [header.tree for header in headers])
        minibatches.append(Minibatch(part, placed, objective.has_gradient(part)))
    microbatches = [one for minibatch in minibatches for one in minibatch.microbatches]
    if packing is None:
        computed = sum(len(one.rows) for one in microbatches) * (max_prompt - 1 + each_row * max_new)
    else:
        computed = sum(len(one.rows) * (packing.prompts + one.length) for one in microbatches)
    apart = {} if divergence is None else {"divergence_mean": float(np.mean(divergence))}
    tokens = _tokens(headers, live, mask, microbatches, computed, tree=packing is not None and packing.tree)
    figures = {**prepared.stats, **apart, **_figures(headers), **tokens}
    figures = {name: float(value) for name, value in figures.items()}
    return Arranged(minibatches, figures, *targets)


def fill_padded(
    rows: Sequence[Row], prepared: Prepared, contents: Contents, max_prompt: int, max_new: int, samples: int
) -> Batch:
    """Arrays of rows in the layout of `GroupContext`, of `samples` samples each.

    Prompts are cut into prefix and last token; every completion is `[last, y_0, ..., y_{T-2}]` with targets
    `[y_0, ..., y_{T-1}]`, so all masks follow from positions.

    Returns:
        prefix int32 [g, p], prefix_lengths int32 [g], inputs and targets int32 [g, n, t], action_mask bool,
        logprobs_behaviour, weights, metric_weights float32 [g, n, t], advantages float32 [g, n].
    """
    batch: Batch = {
        "prefix": np.zeros((len(rows), max_prompt - 1), np.int32),
        "prefix_lengths": np.zeros(len(rows), np.int32),
        **_token_arrays(len(rows), samples, max_new),
        **_objective_arrays(prepared, (len(rows), samples), (max_new,)),
    }
    for r, row in enumerate(rows):
        for g, rollouts in row:
            prompt, found = contents[g]
            batch["prefix"][r, : len(prompt) - 1] = prompt[:-1]
            batch["prefix_lengths"][r] = len(prompt) - 1
            batch["inputs"][r, :, 0] = prompt[-1]
            for i, n in enumerate(rollouts):
                _write(batch, (r, i), 0, prompt, found[n])
            for name, array in prepared.arrays.items():
                batch[name][r, : len(rollouts)] = array[g, list(rollouts)]
    return batch


def fill_packed(rows: Sequence[Row], length: int, prepared: Prepared, contents: Contents, packing: Packing) -> Batch:
    """Arrays of rows in the layout of `PackedGroupContext`, p tokens for prompts and t for completions.

    With `packing.tree` the t tokens are those of trees (`fill_trees`).

    Returns:
        prefix, prefix_segments and prefix_positions int32 [b, p]; inputs, targets, segments, positions and starts int32
        [b, t], action_mask bool, logprobs_behaviour and the objective's arrays of tokens float32 [b, t]; of the row's
        completions, first (index of its first token) and lengths int32 [b, c], and the objective's others.
    """
    if packing.tree:
        return fill_trees(rows, length, prepared, contents, packing)
    count, alignment = len(rows), packing.alignment(length)
    batch: Batch = {
        **{name: np.zeros((count, packing.prompts), np.int32) for name in PREFIX},
        **_token_arrays(count, length),
        **{name: np.zeros((count, length), np.int32) for name in ("segments", "positions", "starts")},
        **{name: np.zeros((count, packing.completions), np.int32) for name in ("first", "lengths")},
        **_objective_arrays(prepared, (count,), (length,), (packing.completions,)),
    }
    for r, row in enumerate(rows):
        front = at = index = 0
        for segment, (g, rollouts) in enumerate(row, start=1):
            prompt, found = contents[g]
            front = _write_prompt(batch, r, front, segment, prompt)
            for n in rollouts:
                size = len(found[n].tokens)
                part = slice(at, at + size)
                _write(batch, (r,), at, prompt, found[n])
                batch["segments"][r, part], batch["starts"][r, part] = segment, at
                batch["positions"][r, part] = len(prompt) - 1 + np.arange(size)
                batch["first"][r, index], batch["lengths"][r, index] = at, size
                for name, array in prepared.arrays.items():
                    if array.ndim == 3:
                        batch[name][r, part] = array[g, n, :size]
                    else:
                        batch[name][r, index] = array[g, n]
                at, index = -(-part.stop // alignment) * alignment, index + 1
        batch["starts"][r, at:] = at  # what is left sees itself alone
    return batch


def fill_trees(rows: Sequence[Row], length: int, prepared: Prepared, contents: Contents, packing: Packing) -> Batch:
    """Arrays of rows in the layout of `PackedGroupContext` with trees: what rollouts of a prompt begin with is once.

    A token has its place by its target, so where rollouts part each has a token of its own, of the same input. What
    belongs to a rollout, and not to its tokens, is in an order of its own, from which `paths` leads to the row's.

    Returns:
        prefix, prefix_segments and prefix_positions int32 [b, p]; inputs, targets, segments, positions and ends int32
        [b, t]; of the row's completions lengths int32 [b, c], paths (indices of their tokens) int32 [b, c, max_new],
        action_mask bool, logprobs_behaviour and the objective's arrays of tokens float32 [b, c, max_new], its others.
    """
    each = (len(rows), packing.completions)
    batch: Batch = {
        **{name: np.zeros((len(rows), packing.prompts), np.int32) for name in PREFIX},
        **_token_arrays(*each, packing.max_new),
        **{name: np.zeros((len(rows), length), np.int32) for name in TREES},
        "lengths": np.zeros(each, np.int32),
        "paths": np.zeros((*each, packing.max_new), np.int32),
        **_objective_arrays(prepared, each, (packing.max_new,)),
    }
    batch["ends"][:] = length  # what is left sees itself alone
    for r, row in enumerate(rows):
        front = at = index = 0
        for segment, (g, rollouts) in enumerate(row, start=1):
            prompt, found = contents[g]
            front = _write_prompt(batch, r, front, segment, prompt)
            tree, path = token_tree([found[n].tokens for n in rollouts]), np.zeros(0, np.int32)
            for n, common in zip((rollouts[i] for i in tree.order), tree.common, strict=True):
                batch["ends"][r, path[common:]] = at  # nothing more continues these
                size = len(found[n].tokens)
                own = np.arange(at, at + size - common)
                path, at = np.concatenate([path[:common], own]).astype(np.int32), at + len(own)
                tokens = found[n].tokens
                batch["inputs"][r, own] = np.concatenate([prompt[-1:], tokens])[common:size]
                batch["targets"][r, own], batch["segments"][r, own] = tokens[common:], segment
                batch["positions"][r, own] = len(prompt) - 1 + np.arange(common, size)
                batch["paths"][r, index, :size], batch["lengths"][r, index] = path, size
                batch["action_mask"][r, index, :size] = found[n].action_mask
                batch["logprobs_behaviour"][r, index, :size] = found[n].logprobs
                for name, array in prepared.arrays.items():
                    batch[name][r, index] = array[g, n]
                index += 1
            batch["ends"][r, path] = at
    return batch


PREFIX = ("prefix", "prefix_segments", "prefix_positions")
TREES = ("inputs", "targets", "segments", "positions", "ends")


def _write_prompt(batch: Batch, r: int, at: int, segment: int, prompt: np.ndarray) -> int:
    """Write a prompt, without its last token, into a row, from index `at` on; returns where the next begins."""
    prefix = slice(at, at + len(prompt) - 1)
    for name, values in zip(PREFIX, (prompt[:-1], segment, np.arange(len(prompt) - 1)), strict=True):
        batch[name][r, prefix] = values
    return prefix.stop


def _turns(episode: Episode | None) -> list[tuple[int, float]]:
    """Return the end and the reward of each turn."""
    return [] if episode is None else [(turn.end, turn.reward) for turn in episode.turns]


def _contents(headers: Sequence[GroupHeader], live: np.ndarray) -> list[Sizes]:
    """Return the tokens of each group's prompt, and of its live rollouts."""
    return [
        (header.prompt_length - 1, {int(n): header.rollouts[n].length for n in np.flatnonzero(live[g])})
        for g, header in enumerate(headers)
    ]


def _placed(array: np.ndarray, present: np.ndarray) -> np.ndarray:
    """[rollouts, ...] -> [groups, samples, ...], zero where a group has no such rollout."""
    placed = np.zeros((*present.shape, *array.shape[1:]), array.dtype)
    placed[present] = array
    return placed


def _padded(live: np.ndarray, sizes: np.ndarray, max_new: int, row_multiple: int, samples: int) -> Microbatch:
    """Return rows of up to so many samples of groups of these sizes, without those of which none is live."""
    parts = live.reshape(len(live), -1, samples)
    rows: list[Row] = [
        ((int(g), tuple(range(i * samples, min((i + 1) * samples, int(sizes[g]))))),)
        for g, i in np.argwhere(parts.any(-1))
    ]
    total = max(row_multiple, -(-len(rows) // row_multiple) * row_multiple)
    return Microbatch(max_new, (*rows, *[()] * (total - len(rows))))


def _token_arrays(*shape: int) -> Batch:
    kinds = {"inputs": np.int32, "targets": np.int32, "action_mask": bool, "logprobs_behaviour": np.float32}
    return {name: np.zeros(shape, kind) for name, kind in kinds.items()}


def _objective_arrays(
    prepared: Prepared, rows: tuple[int, ...], tokens: tuple[int, ...], others: tuple[int, ...] = ()
) -> Batch:
    """Return empty arrays for what the objective adds, of tokens or of completions."""
    arrays = prepared.arrays.items()
    return {name: np.zeros((*rows, *(tokens if a.ndim == 3 else others)), a.dtype) for name, a in arrays}


def _write(batch: Batch, where: tuple[int, ...], at: int, prompt: np.ndarray, rollout: Rollout) -> None:
    """Write a rollout's tokens into a row, from index `at` on."""
    size = len(rollout.tokens)
    part = (*where, slice(at, at + size))
    if size:
        batch["inputs"][part][0], batch["inputs"][part][1:] = prompt[-1], rollout.tokens[:-1]
    batch["targets"][part] = rollout.tokens
    batch["action_mask"][part] = rollout.action_mask
    batch["logprobs_behaviour"][part] = rollout.logprobs


def _tokens(
    headers: Sequence[GroupHeader],
    live: np.ndarray,
    mask: np.ndarray,
    microbatches: Sequence[Microbatch],
    computed: int,
    *,
    tree: bool,
) -> dict[str, float]:
    """Return how many tokens of the rows are learned from, and the fraction computed in vain: padding and repetition.

    A prompt counts once, in however many rows it is; so does, in trees, what completions have in common, which is
    `shared_tokens`, a fraction of all their tokens.
    """
    placed = [tree for microbatch in microbatches for row in microbatch.rows for tree in row]
    trained = sum(int(mask[g, list(rollouts)].sum()) + headers[g].prompt_length - 1 for g, rollouts in placed)
    prompts = sum(
        header.prompt_length - 1 for header, any_live in zip(headers, live.any(axis=1), strict=True) if any_live
    )
    rollouts = [own for _, own in _contents(headers, live)]
    completions = distinct = sum(sum(own.values()) for own in rollouts)
    shared: dict[str, float] = {}
    if tree:
        distinct = sum(header.tree.distinct(own) for header, own in zip(headers, rollouts, strict=True))
        shared = {"shared_tokens": 1 - distinct / max(completions, 1)}
    return {"train_tokens": trained, "wasted_tokens": 1 - (prompts + distinct) / max(computed, 1), **shared}


def _figures(headers: Sequence[GroupHeader]) -> dict[str, float]:
    rewards = np.asarray([score.reward for header in headers for score in header.scores])
    lengths = [rollout.length for header in headers for rollout in header.rollouts]
    failures = [score.status != "ok" for header in headers for score in header.scores]
    figures: dict[str, Any] = {
        "completion_length": np.mean(lengths),
        "gen_tokens": np.sum(lengths),
        "verifier_failures": np.sum(failures),
        **_rewards(headers, rewards, ~np.asarray(failures)),
        **_episodes([rollout.episode for header in headers for rollout in header.rollouts if rollout.episode]),
    }
    return {name: float(value) for name, value in figures.items()}


def _episodes(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return figures of episodes: means of an episode's, fractions of its ends, and failures of environments."""
    if not episodes:
        return {}
    named: dict[str, list[float]] = {}
    for name, value in (figure for episode in episodes for figure in episode.figures):
        named.setdefault(f"{'time' if name.endswith('_seconds') else 'episode'}/{name}", []).append(value)
    return {
        "episode/turns": np.mean([len(episode.turns) for episode in episodes]),
        "episode/turn_rewards": np.mean([sum(turn.reward for turn in episode.turns) for episode in episodes]),
        "episode/truncated": np.mean([episode.ended == "truncated" for episode in episodes]),
        "episode/failures": np.sum([episode.ended == "error" for episode in episodes]),
        **{name: np.mean(named[name]) for name in sorted(named)},
    }


def _rewards(headers: Sequence[GroupHeader], rewards: np.ndarray, scored: np.ndarray) -> dict[str, Any]:
    """Return the mean rewards of what could be scored: of all, of each family, and of each term of the reward.

    There is no "reward" if nothing could be scored. A family without one is left out likewise.
    """
    families = np.asarray([header.family for header in headers for _ in header.scores])
    figures: dict[str, Any] = {"reward": rewards[scored].mean()} if scored.any() else {}
    for family in sorted(set(families)):
        if (of_family := scored & (families == family)).any():
            figures[f"reward/{family}"] = rewards[of_family].mean()
    terms: dict[str, list[float]] = {}
    for score in (score for header in headers for score in header.scores if score.status == "ok"):
        for name, value in score.terms:
            terms.setdefault(f"reward_term/{name}", []).append(value)
    return {**figures, **{name: np.mean(terms[name]) for name in sorted(terms)}}
