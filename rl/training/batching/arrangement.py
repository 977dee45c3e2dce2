"""Arrangement of a batch: advantages and weights by the objective, and the rollouts of each row."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rl.objective import NegativeReward, Objective, Prepared
from rl.objective.rollouts import PerToken
from rl.protocol.headers import GroupHeader
from rl.protocol.messages import Episode
from rl.training.batching.layout import Layout
from rl.training.batching.metrics import batch_metrics, token_metrics
from rl.training.batching.trees import trees_of
from rl.training.packing import Microbatch


class Minibatch(NamedTuple):
    """Rows of one optimizer step before their tokens are there."""

    # Arrays of the objective, [groups, samples, ...]; zero beyond the rollouts of a smaller group
    prepared: Prepared
    microbatches: list[Microbatch]  # the rollouts of each row
    has_gradient: bool  # False if no update is to be made of it


class Arranged(NamedTuple):
    """A batch before its tokens are there."""

    minibatches: list[Minibatch]  # one, or the parts asked for
    figures: dict[str, float]  # reward, reward/<family>, counts and fractions over the whole batch
    # Targets of a critic, float64 [rollouts, tokens], and bool, the tokens of the loss; empty without one
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


def arrange(
    headers: Sequence[GroupHeader],
    objective: Objective,
    layout: Layout,
    *,
    parts: Callable[[np.ndarray], Sequence[np.ndarray]] | None = None,
    divergence: np.ndarray | None = None,
    values: np.ndarray | None = None,
    correct_threshold: float = 1.0,
) -> Arranged:
    """Advantages and weights of an update, and the rollouts of each of its rows.

    What carries no gradient (by the objective) is left out: with packed rows every such rollout, with padded ones every
    row of which none does. What depends on the whole group is known before groups are cut into rows, so the update
    does not depend on the layout.

    Args:
        parts: maps the live groups to those of each mini-batch, both bool[groups]; None: there is one mini-batch.
        divergence: divergence of every token of every rollout from the reference, [rollouts, max_new_tokens], if the
            objective needs it.
        values: values of every token of every rollout, [rollouts, max_new_tokens], if the objective needs them.
        correct_threshold: reward from which on a rollout is right, for metrics.

    Raises:
        NegativeReward: the objective takes none, and there is one; names its problem.
    """
    if objective.advantage.needs_positive:
        _check_positive(headers)
    counts = np.asarray([len(header.rollouts) for header in headers])
    samples = layout.samples(headers)
    present = np.arange(-(-counts.max() // samples) * samples) < counts[:, None]  # [groups, samples]
    mask = _action_mask(headers, present, layout.max_new_tokens)
    flat = _prepare(headers, objective, mask, present, divergence, values)
    targets = () if flat.returns is None else ((flat.returns, flat.arrays["weights"] > 0),)
    arrays = {name: _by_group(array, present) for name, array in flat.arrays.items()}
    prepared = flat._replace(returns=None, arrays=arrays)
    live = prepared.arrays["weights"].any(axis=-1)
    minibatches: list[Minibatch] = []
    for chosen in (None,) if parts is None else parts(live.any(axis=1)):
        part = prepared if chosen is None else objective.part(prepared, chosen)
        placed = layout.place(headers, part.arrays["weights"].any(axis=-1))
        minibatches.append(Minibatch(part, placed, objective.has_gradient(part)))
    diverged = {} if divergence is None else {"divergence_mean": float(np.mean(divergence.sum(axis=1)))}
    microbatches = [one for minibatch in minibatches for one in minibatch.microbatches]
    tokens = token_metrics(headers, live, mask, microbatches, layout)
    figures = {**prepared.stats, **diverged, **batch_metrics(headers, correct_threshold), **tokens}
    return Arranged(minibatches, {name: float(value) for name, value in figures.items()}, *targets)


def _check_positive(headers: Sequence[GroupHeader]) -> None:
    """Refuse rewards that are negative: what the reward function returned would be no success rate."""
    for header in headers:
        for rollout, score in zip(header.rollouts, header.scores, strict=True):
            if score.status == "ok" and score.reward < 0:
                raise NegativeReward(
                    f"problem {header.prompt_id} of {header.family!r}, sample {rollout.sample_id}: the verifier's "
                    f"reward is {score.reward:g}, and objective.advantage divides by the mean reward of a prompt "
                    "(MaxRL); expected 0 or more (meant: 0 or 1). Updates so far are saved. Correct the function "
                    "and run the same command again, which goes on from there; or start from this run with another "
                    "advantage (GroupAdvantage.Config() takes any reward)"
                )


def _prepare(
    headers: Sequence[GroupHeader],
    objective: Objective,
    mask: np.ndarray,
    present: np.ndarray,
    divergence: np.ndarray | None,
    values: np.ndarray | None,
) -> Prepared:
    """Return what the objective adds, arrays [rollouts, ...] of those present; trees are joined for it."""
    rollouts = [rollout for header in headers for rollout in header.rollouts]
    scores = [score for header in headers for score in header.scores]
    groups, mask, turns = np.nonzero(present)[0], mask[present], [_turns(rollout.episode) for rollout in rollouts]
    length = mask.shape[1]
    if (trees := trees_of(headers)) is not None:
        turns, groups, mask = trees.turns(scores), groups[trees.samples], trees.join(mask)
        divergence, values = trees.join(divergence), trees.join(values)
        rollouts, scores = [rollouts[n] for n in trees.samples], [scores[n] for n in trees.samples]
    prepared = objective.prepare(
        np.asarray([score.reward for score in scores]),
        mask,
        groups=groups,
        truncated=np.asarray([rollout.finish_reason == "length" for rollout in rollouts]),
        scored=np.asarray([score.status == "ok" for score in scores]),
        demonstrations=np.asarray([rollout.demonstration for rollout in rollouts]),
        turns=turns,
        per_token=PerToken(divergence, values),
    )
    if trees is None:
        return prepared
    return prepared._replace(arrays={name: trees.split(array, length) for name, array in prepared.arrays.items()})


def _action_mask(headers: Sequence[GroupHeader], present: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """Return bool[groups, samples, max_new_tokens], true at tokens that the policy drew."""
    mask = np.zeros((*present.shape, max_new_tokens), bool)
    for g, header in enumerate(headers):
        for n, rollout in enumerate(header.rollouts):
            mask[g, n, : rollout.length] = True if rollout.action_mask is None else rollout.action_mask
    return mask


def _turns(episode: Episode | None) -> list[tuple[int, float]]:
    """Return the end and the reward of each turn."""
    return [] if episode is None else [(turn.end, turn.reward) for turn in episode.turns]


def _by_group(array: np.ndarray, present: np.ndarray) -> np.ndarray:
    """[rollouts, ...] -> [groups, samples, ...], zero where a group has no such rollout."""
    placed = np.zeros((*present.shape, *array.shape[1:]), array.dtype)
    placed[present] = array
    return placed
