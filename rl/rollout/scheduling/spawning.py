"""Trees of completions: those that a completion spawns, and waiting for completions.

A spawned completion is a request of its own, under the seed, the sampler and the deadline of its parent's. Its sample
id is a hash of its parent's and of its place among that one's children: the tree alone decides what is drawn, and a
lost tree is drawn again to the bit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from mesh import UserError, did_you_mean
from rl.protocol.messages import Rollout
from rl.protocol.players import BASE
from rl.rollout.agent_loops.commands import Completion, Join, Spawn, child_sample
from rl.rollout.model_runner.adapter_slots import LoadedAdapter
from rl.rollout.request import Request, StopConditions
from rl.rollout.scheduling.scheduler import Scheduler
from rl.rollout.sequence import Sequence, SequenceGroup, State

MAX_DEPTH = 4  # spawned completions above one another
MAX_CHILDREN = 64  # completions that one may spawn
MAX_TREE = 256  # completions that a sample may come to spawn with all below it


class Spawning:
    """Starts of completions by others; the requests that they become have negative numbers."""

    def __init__(self, scheduler: Scheduler, validate: Callable[[Request], StopConditions]):
        """`validate` gives a request's stop conditions, or refuses it."""
        self._scheduler, self._validate = scheduler, validate
        self._spawned = 0

    def spawn(self, parent: Sequence, command: Spawn) -> Sequence:
        """Return a new sequence whose loop has not begun.

        Raises:
            UserError: the tree is too deep or too large, the request has no such policy, or the engine no room for
                such a prompt.
        """
        _check_tree(parent)
        group, adapter = parent.group, _adapter(parent, command.policy)
        tokens = np.asarray(command.prompt, np.int32)
        limit = group.stop.max_new_tokens if command.max_new_tokens is None else command.max_new_tokens
        request = dataclasses.replace(
            group.request,
            prompt=dataclasses.replace(group.request.prompt, tokens=tokens),
            samples=1,
            adapter=None if adapter is None else adapter.name,
            stop=dataclasses.replace(group.stop, max_new_tokens=limit),
            agent_loop=command.agent_loop,
            partial=(),
            earlier=(),
            segments=command.segments,
        )
        try:
            stop = self._validate(request)
        except UserError as error:
            raise UserError(f"{parent.name}, child {len(parent.children)}: {error}") from error
        self._spawned += 1
        numbers = -self._spawned, request, group.sampler, stop, group.due, None, adapter
        child = SequenceGroup(*numbers, started=True, parent=parent, policies=group.policies)
        sample = child_sample(parent.sample, len(parent.children))
        parent.spawned(child)
        self._scheduler.kv_cache.remember(parent)
        return Sequence(child, sample, tokens.tolist(), command.agent_loop)


def _adapter(parent: Sequence, policy: str | None) -> LoadedAdapter | None:
    """Return the adapter of the policy that a command names."""
    if policy is None:
        return parent.group.adapter
    known = {BASE: None, **parent.group.policies}
    if policy not in known:
        names = ", ".join(map(repr, sorted(known)))
        raise UserError(
            f"{parent.name} spawns a completion of policy {policy!r}, which the request's `policies` do not name; "
            f"there are: {names}{did_you_mean(policy, known)}"
        )
    return known[policy]


def _check_tree(parent: Sequence) -> None:
    if parent.group.depth >= MAX_DEPTH:
        raise UserError(f"{parent.name} spawns at depth {MAX_DEPTH + 1}; expected {MAX_DEPTH} at most")
    if len(parent.children) >= MAX_CHILDREN:
        raise UserError(f"{parent.name} spawns more than {MAX_CHILDREN} completions")
    top = parent
    while top.group.parent is not None:
        top = top.group.parent
    if sum(1 for _ in top.descendants()) >= MAX_TREE:
        raise UserError(f"{top.name} and those below it spawn more than {MAX_TREE} completions")


def check_join(sequence: Sequence, join: Join) -> None:
    """Refuse a wait that would never end, and numbers of tokens that do not fit the completions (UserError)."""
    if join.after is not None and len(join.after) != len(join.completions):
        known, all_of_them = len(join.after), len(join.completions)
        raise UserError(f"{sequence.name} joins {all_of_them} completions after {known} numbers of tokens")
    if any(completion is sequence for completion in join.completions):
        raise UserError(f"{sequence.name} joins itself, which would never end")
    if _waits_for(sequence, join, set()):
        raise UserError(f"{sequence.name} joins a completion that waits for it, which would never end")


def _waits_for(sequence: Sequence, join: Join, visited: set[int]) -> bool:
    """Return True if one of the completions of a join waits, itself or through others, for the sequence."""
    for completion in join.completions:
        if completion is sequence:
            return True
        if not isinstance(completion, Sequence) or completion.ended or id(completion) in visited:
            continue
        visited.add(id(completion))
        waits_for = completion.waits_for if completion.state is State.SUSPENDED else None
        if isinstance(waits_for, Join) and _waits_for(sequence, waits_for, visited):
            return True
    return False


def known(join: Join) -> tuple[Any, Exception | None] | None:
    """Return the answer to a join, or what it raises; None: it has to wait."""
    if join.after is None:
        over = all(completion.ended for completion in join.completions)
    else:
        pairs = zip(join.completions, join.after, strict=True)
        over = any(one.ended or (isinstance(one, Sequence) and one.settled > known) for one, known in pairs)
    if not over and join.completions:
        return None
    for completion in join.completions:
        if isinstance(completion, Sequence) and completion.group.parent is not None and completion.group.error:
            return None, UserError(completion.group.error)
    return [_so_far(completion) for completion in join.completions], None


def _so_far(completion: Completion) -> Rollout:
    """Return the rollout of a completion, of one that has not ended as far as no token of it can be dropped."""
    whole = completion.rollout()
    if completion.ended or not isinstance(completion, Sequence):
        return whole
    names = ("tokens", "logprobs", "versions", "action_mask")
    first = {name: getattr(whole, name)[: completion.settled] for name in names}
    return dataclasses.replace(whole, finish_reason="abort", routing=None, candidate_tokens=None, **first)
