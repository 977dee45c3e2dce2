"""Headers: scored groups without their tokens, from which every trainer process finds the rows that it needs."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import xxhash

from rl.protocol.messages import Episode, FinishReason, Group, Rollout, RolloutData, Score, TreeNode
from rl.protocol.token_tree import TokenTree, token_tree

_GREATEST = np.iinfo(np.int32).max
MARK = 8  # hexadecimal digits of a mark in the log: of a group of a batch, of an array of a version


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutHeader:
    """A rollout without its tokens."""

    sample_id: int
    length: int  # tokens
    action_mask: np.ndarray | None  # bool [length]; None: all tokens are actions
    finish_reason: FinishReason
    oldest: int  # version of its tokens, the least
    newest: int  # the greatest
    digest: str  # digest of all its arrays
    episode: Episode | None = None  # episode without its answer; None: it is none
    demonstration: bool = False  # given and not drawn
    node: TreeNode | None = None  # None: a sample of the prompt

    @property
    def is_sample(self) -> bool:
        """See `Rollout.is_sample`."""
        return not self.demonstration and self.node is None


@dataclasses.dataclass(frozen=True, slots=True)
class GroupHeader:
    """A group without its tokens; `digest` is of the prompt's, `tree` what its rollouts have in common."""

    prompt_id: int
    family: str
    prompt_length: int
    digest: str
    rollouts: tuple[RolloutHeader, ...]
    scores: tuple[Score, ...]
    tree: TokenTree


def header_of(group: Group) -> GroupHeader:
    """Return the header of a group."""
    prompt = group.prompt
    rollouts = tuple(_header(rollout) for rollout in group.rollouts)
    tree = token_tree([rollout.tokens for rollout in group.rollouts])
    return GroupHeader(
        prompt.id, prompt.family, len(prompt.tokens), _digest(prompt.tokens), rollouts, group.scores, tree
    )


def digest_of_headers(headers: Sequence[GroupHeader]) -> str:
    """Return a digest of everything that affects the update, without timings."""
    digest = xxhash.xxh3_128()
    for header in headers:
        scores = [(score.reward, score.status) for score in header.scores]
        ends = [(rollout.sample_id, rollout.finish_reason, rollout.digest) for rollout in header.rollouts]
        turns = [rollout.episode.turns for rollout in header.rollouts if rollout.episode is not None]
        digest.update(repr((header.prompt_id, header.family, header.digest, scores, ends, turns)).encode())
    return digest.hexdigest()


def batch_marks(headers: Sequence[GroupHeader]) -> dict[str, str]:
    """Return marks of a batch for the log, eight hexadecimal digits a group, in the order of the update.

    `drawn` is of prompts and rollouts (tokens, log-probabilities, versions), `rewards` of scores and turns.
    """
    drawn, rewards = "", ""
    for header in headers:
        ends = [(rollout.sample_id, rollout.finish_reason, rollout.digest) for rollout in header.rollouts]
        turns = [rollout.episode.turns for rollout in header.rollouts if rollout.episode is not None]
        scores = [(score.reward, score.status) for score in header.scores]
        drawn += _mark((header.prompt_id, header.digest, ends))
        rewards += _mark((scores, turns))
    return {"drawn": drawn, "rewards": rewards}


def _mark(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())[:MARK]


def matches(contents: RolloutData, headers: Sequence[GroupHeader]) -> bool:
    """Return True if these are contents of the batch that has these headers."""
    return all(
        _digest(prompt) == headers[g].digest
        and all(_header(rollout).digest == headers[g].rollouts[n].digest for n, rollout in rollouts.items())
        for g, (prompt, rollouts) in contents.items()
    )


def _header(rollout: Rollout) -> RolloutHeader:
    mask, versions, episode = rollout.action_mask, rollout.versions, rollout.episode
    recorded = tuple(record for record in (rollout.routing, rollout.candidate_tokens) if record is not None)
    return RolloutHeader(
        sample_id=rollout.sample_id,
        length=len(rollout.tokens),
        action_mask=None if np.logical_and.reduce(mask) else mask,
        finish_reason=rollout.finish_reason,
        oldest=int(np.minimum.reduce(versions, initial=_GREATEST)),
        newest=int(np.maximum.reduce(versions, initial=-1)),
        digest=_digest(rollout.tokens, rollout.logprobs, versions, mask, *recorded),
        episode=None
        if episode is None
        else Episode(episode.turns, None, episode.ended, episode.error, episode.figures),
        demonstration=rollout.demonstration,
        node=rollout.node,
    )


def _digest(*arrays: np.ndarray) -> str:
    parts = [part for array in arrays for part in (_described(array.shape, array.dtype), array.tobytes())]
    return xxhash.xxh3_128_hexdigest(b"".join(parts))


@functools.lru_cache(1 << 14)
def _described(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    return repr((shape, str(dtype))).encode()
