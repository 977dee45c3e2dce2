"""Metrics of a batch's data: rewards, lengths, failures, episodes, and the use of its rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.protocol.headers import GroupHeader
from rl.protocol.messages import Episode
from rl.training.batching.layout import Layout, live_sizes
from rl.training.packing import Microbatch

_ROUNDING = 1e-6  # rounding error of a reward that is a weighted sum


def batch_metrics(headers: Sequence[GroupHeader], correct_threshold: float) -> dict[str, float]:
    """Return metrics of a batch's rollouts, demonstrations' apart; `correct_threshold`: reward of a right one."""
    given, headers = {**_demonstrations(headers), **_nodes(headers)}, [_drawn(header) for header in headers]
    rewards = np.asarray([score.reward for header in headers for score in header.scores])
    lengths = [rollout.length for header in headers for rollout in header.rollouts]
    failures = [score.status != "ok" for header in headers for score in header.scores]
    metrics: dict[str, Any] = {
        "completion_length": np.mean(lengths),
        "gen_tokens": np.sum(lengths) + given.get("node_tokens", 0.0),
        "verifier_failures": np.sum(failures),
        **_lengths(headers, correct_threshold),
        **_rewards(headers, rewards, ~np.asarray(failures)),
        **_episodes([rollout.episode for header in headers for rollout in header.rollouts if rollout.episode]),
        **given,
    }
    return {name: float(value) for name, value in metrics.items()}


def token_metrics(
    headers: Sequence[GroupHeader],
    live: np.ndarray,
    mask: np.ndarray,
    microbatches: Sequence[Microbatch],
    layout: Layout,
) -> dict[str, float]:
    """Return how many tokens of the rows are learned from, and the fraction computed in vain: padding and repetition.

    A prompt counts once, in however many rows it is; so does, in trees, what completions have in common, which is
    `shared_tokens`, a fraction of all their tokens.

    Args:
        live: bool[groups, samples], rollouts that are learned from.
        mask: bool[groups, samples, max_new_tokens], tokens that the policy drew.
    """
    placed = [group for microbatch in microbatches for row in microbatch.rows for group in row]
    trained = sum(int(mask[g, list(rollouts)].sum()) + headers[g].prompt_length - 1 for g, rollouts in placed)
    prompts = sum(
        header.prompt_length - 1 for header, any_live in zip(headers, live.any(axis=1), strict=True) if any_live
    )
    rollouts = [own for _, own in live_sizes(headers, live)]
    completions = distinct = sum(sum(own.values()) for own in rollouts)
    shared: dict[str, float] = {}
    if layout.tree:
        distinct = sum(header.tree.distinct(own) for header, own in zip(headers, rollouts, strict=True))
        shared = {"shared_tokens": 1 - distinct / max(completions, 1)}
    computed = layout.computed_tokens(microbatches, headers)
    return {"train_tokens": trained, "wasted_tokens": 1 - (prompts + distinct) / max(computed, 1), **shared}


def _drawn(header: GroupHeader) -> GroupHeader:
    """Return the header with the policy's own answers alone."""
    kept = [n for n, rollout in enumerate(header.rollouts) if rollout.is_sample]
    if len(kept) == len(header.rollouts):
        return header
    rollouts, scores = (tuple(of[n] for n in kept) for of in (header.rollouts, header.scores))
    return dataclasses.replace(header, rollouts=rollouts, scores=scores)


def _demonstrations(headers: Sequence[GroupHeader]) -> dict[str, float]:
    """Return the number of demonstrations and the mean reward of those that could be scored; nothing without any."""
    pairs = [pair for header in headers for pair in zip(header.rollouts, header.scores, strict=True)]
    scores = [score for rollout, score in pairs if rollout.demonstration]
    rewards = [score.reward for score in scores if score.status == "ok"]
    found = {"demonstrations": float(len(scores))} if scores else {}
    return {**found, **({"demonstration_reward": float(np.mean(rewards))} if rewards else {})}


def _nodes(headers: Sequence[GroupHeader]) -> dict[str, float]:
    """Return the number of nodes of plans, their tokens, and their mean reward; nothing without any."""
    pairs = [pair for header in headers for pair in zip(header.rollouts, header.scores, strict=True)]
    found = [(rollout, score) for rollout, score in pairs if rollout.node is not None]
    if not found:
        return {}
    rewards = [score.reward for _, score in found if score.status == "ok"]
    figures = {"nodes": float(len(found)), "node_tokens": float(sum(rollout.length for rollout, _ in found))}
    return {**figures, **({"node_reward": float(np.mean(rewards))} if rewards else {})}


def _lengths(headers: Sequence[GroupHeader], correct_threshold: float) -> dict[str, Any]:
    """Return mean lengths: truncated, else right or wrong; nothing without any, and unscored ends left out."""
    lengths: dict[str, list[int]] = {"right": [], "wrong": [], "truncated": []}
    for header in headers:
        for rollout, score in zip(header.rollouts, header.scores, strict=True):
            if rollout.finish_reason == "length":
                lengths["truncated"].append(rollout.length)
            elif score.status == "ok":
                lengths["right" if score.reward >= correct_threshold - _ROUNDING else "wrong"].append(rollout.length)
    return {f"completion_length/{outcome}": np.mean(found) for outcome, found in lengths.items() if found}


def _rewards(headers: Sequence[GroupHeader], rewards: np.ndarray, scored: np.ndarray) -> dict[str, Any]:
    """Return mean rewards of what could be scored, by family and by term, too; nothing where none could."""
    families = np.asarray([header.family for header in headers for _ in header.scores])
    metrics: dict[str, Any] = {"reward": rewards[scored].mean()} if scored.any() else {}
    for family in sorted(set(families)):
        if (of_family := scored & (families == family)).any():
            metrics[f"reward/{family}"] = rewards[of_family].mean()
    terms: dict[str, list[float]] = {}
    for score in (score for header in headers for score in header.scores if score.status == "ok"):
        for name, value in score.terms:
            terms.setdefault(f"reward_term/{name}", []).append(value)
    return {**metrics, **{name: np.mean(terms[name]) for name in sorted(terms)}}


def _episodes(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return metrics of episodes: means of an episode's, fractions of its ends, and failures of environments."""
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
