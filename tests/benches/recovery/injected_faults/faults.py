"""Faults at one update of a run, by replacing a method for as long as a block lasts; the product has no hook."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.parameter_names import path_name
from axlearn_like.training.updates.minibatches import MinibatchStep
from rl.controller.controller import Controller
from rl.controller.leasing import Leasing
from rl.controller.ledger import Ledger
from rl.controller.plan import Plan
from rl.protocol.messages import Group, Prompt, Rollout, Score
from rl.rollout.leased_work import LeasedWork
from rl.rollout.request import draw_seed
from rl.training.steps.fill import FillStep

Fault = Callable[[int], AbstractContextManager[None]]  # function of the update, returns a block with the fault


@contextmanager
def replaced(owner: type, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method by what `make` makes of it."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def flipped_ulp(path: str, index: tuple[int, ...], ulps: int = 1) -> Fault:
    """Move one element of the state by some units of the last place, once the update is made.

    Args:
        path: path of the array in the state, such as "params/embedding/weight_vd".
        index: element.
        ulps: how far, away from zero.
    """

    def fault(update: int) -> AbstractContextManager[None]:
        def make(original: Any) -> Any:
            def step(self: Any, state: Any, minibatches: Any) -> Any:
                state, metrics = original(self, state, minibatches)
                if int(state["step"]) == update:
                    state = jax.tree_util.tree_map_with_path(
                        lambda key, leaf: _moved(leaf, index, ulps) if path_name(key) == path else leaf, state
                    )
                return state, metrics

            return step

        return replaced(MinibatchStep, "__call__", make)

    return fault


def _moved(leaf: jax.Array, index: tuple[int, ...], ulps: int) -> jax.Array:
    array = np.array(leaf)
    array.view(np.int32)[index] += ulps
    return jax.device_put(array, leaf.sharding)


def changed_groups(change: Callable[[Group], Group], place: int = 1) -> Fault:
    """Change one scored group of the batch, by its place in a work item."""

    def fault(update: int) -> AbstractContextManager[None]:
        def make(original: Any) -> Any:
            def verified(self: Ledger, lease: int, groups: tuple[Group, ...]) -> bool:
                if (item := self.find(lease)) is not None and item.step == update - 1:
                    groups = _with(groups, place, change)
                return original(self, lease, groups)

            return verified

        return replaced(Ledger, "verified", make)

    return fault


def rollout_change(sample: int, change: Callable[[Rollout], Rollout]) -> Callable[[Group], Group]:
    """Return the change of a group by one of its rollouts."""
    return lambda group: dataclasses.replace(group, rollouts=_with(group.rollouts, sample, change))


def score_change(sample: int, score: Score) -> Callable[[Group], Group]:
    """Return the change of a group by one of its scores."""
    return lambda group: dataclasses.replace(group, scores=_with(group.scores, sample, lambda _: score))


def _with[T](found: Sequence[T], place: int, change: Callable[[T], T]) -> tuple[T, ...]:
    return tuple(change(one) if i == place else one for i, one in enumerate(found))


def other_token(at: int) -> Callable[[Rollout], Rollout]:
    """Return the change of a rollout by its token at a position."""
    return lambda rollout: dataclasses.replace(rollout, tokens=_next_token(rollout.tokens, at))


def _next_token(tokens: np.ndarray, at: int) -> np.ndarray:
    tokens = tokens.copy()
    tokens[at] = (tokens[at] + 1) % 128
    return tokens


def other_logprob(at: int) -> Callable[[Rollout], Rollout]:
    """Return the change of a rollout by a unit of the last place of a log-probability."""

    def changed(rollout: Rollout) -> Rollout:
        logprobs = rollout.logprobs.copy()
        logprobs.view(np.int32)[at] += 1
        return dataclasses.replace(rollout, logprobs=logprobs)

    return changed


def exchanged_groups(update: int) -> AbstractContextManager[None]:
    """Exchange the first two groups of the batch."""

    def make(original: Any) -> Any:
        def next_batch(self: Any, step: int, timeout: float = 0.0) -> Any:
            found = original(self, step, timeout)
            return [found[1], found[0], *found[2:]] if found and step == update - 1 else found

        return next_batch

    return replaced(Controller, "next_batch", make)


def _changed_fill(update: int, change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Change the filled batch of the update."""

    def make(original: Any) -> Any:
        def fill(self: Any, scored: Any, params: Any) -> Any:
            filled = original(self, scored, params)
            return change(filled) if scored.step == update - 1 else filled

        return fill

    return replaced(FillStep, "__call__", make)


def exchanged_rows(update: int) -> AbstractContextManager[None]:
    """Exchange the first two rows of the update."""

    def swapped(rows: Any) -> Any:
        order = np.array([1, 0, *range(2, len(rows.arrays["targets"]))])
        arrays = {name: jax.device_put(np.asarray(x)[order], x.sharding) for name, x in rows.arrays.items()}
        return rows._replace(arrays=arrays)

    def change(filled: Any) -> Any:
        return filled._replace(minibatches=[[swapped(rows) for rows in part] for part in filled.minibatches])

    return _changed_fill(update, change)


def other_advantages(update: int) -> AbstractContextManager[None]:
    """Change an advantage of the update by a unit of the last place."""

    def change(filled: Any) -> Any:
        arrays = filled.minibatches[0][0].arrays
        place = tuple(int(i) for i in np.argwhere(np.asarray(arrays["advantages"]))[0])
        arrays["advantages"] = _moved(arrays["advantages"], place, 1)
        return filled

    return _changed_fill(update, change)


def other_prompt_token(update: int) -> AbstractContextManager[None]:
    """Change the last token of the first prompt of each work item of the update."""

    def make(original: Any) -> Any:
        def prompts(self: Any, step: int, item: int) -> tuple[Prompt, ...]:
            first, *others = original(self, step, item)
            tokens = _next_token(first.tokens, -1) if step == update - 1 else first.tokens
            return dataclasses.replace(first, tokens=tokens), *others

        return prompts

    return replaced(Plan, "prompts", make)


def other_seed(update: int) -> AbstractContextManager[None]:
    """Draw one prompt of each work item of the update by another seed."""

    def make(original: Any) -> Any:
        def begin(self: LeasedWork, engine: Any, adapter: str | None = None) -> None:
            if self.lease.step != update - 1:
                return original(self, engine, adapter)
            submit, others = engine.submit, []

            def submitted(request: Any) -> Any:
                others.append(request)
                seed = draw_seed(self.policy.seed + 1, 0)
                return submit(dataclasses.replace(request, seed=seed) if len(others) == 2 else request)

            engine.submit = submitted
            try:
                return original(self, engine, adapter)
            finally:
                del engine.submit

        return begin

    return replaced(LeasedWork, "begin", make)


def stale_weights(update: int) -> AbstractContextManager[None]:
    """Draw the update's rollouts with the version before the one that the lease names."""

    def make(original: Any) -> Any:
        def next_lease(self: Any, *args: Any, **known: Any) -> Any:
            found = original(self, *args, **known)
            if getattr(found, "step", None) == update - 1:
                return dataclasses.replace(found, version=found.version - 1)
            return found

        return next_lease

    return replaced(Leasing, "next_lease", make)
