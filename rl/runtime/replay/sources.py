"""Sources of batches for a trainer that makes an update again: a controller that is watched, and one given batch."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mesh.errors import UserError
from rl.protocol.headers import GroupHeader, header_of
from rl.protocol.messages import Group, RolloutData, Score, contents_of
from rl.protocol.protocols import BatchSource

Sample = tuple[int, int]  # id of a prompt, and number of one of its samples


class WatchedBatches:
    """A controller that remembers the last batch that a trainer has taken, and the plan's state after it."""

    def __init__(self, source: BatchSource):
        self._source = source
        self.groups: list[Group] = []
        self.plan: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return a method of the controller."""
        return getattr(self._source, name)

    def next_batch(self, step: int, timeout: float = 0.0) -> list[Group] | None:
        """Return the controller's batch."""
        found = self._source.next_batch(step, timeout)
        if found is not None:
            self.groups = found
        return found

    def plan_after(self, step: int) -> dict[str, Any] | None:
        """Return the controller's."""
        found = self._source.plan_after(step)
        self.plan = found or {}
        return found


class GivenBatch(BatchSource):
    """One batch, for a trainer that has made the updates before it."""

    def __init__(self, step: int, groups: list[Group], plan: Mapping[str, Any]):
        self._step, self._groups, self._plan = step, groups, dict(plan)

    def begin(self, step: int, first_version: int, held: int | None = None, pool: Any = None) -> None:
        """Take no note: there is no plan."""

    def status(self) -> dict[str, Any]:
        """Return the version that the batch updates."""
        return {"version": self._step, "evaluating": None}

    def next_batch(self, step: int, timeout: float = 0.0) -> list[Group] | None:
        """Return the batch, if it is that of the step."""
        return self._groups if step == self._step else None

    def headers(self, step: int, timeout: float = 0.0) -> list[GroupHeader] | None:
        """Return its headers."""
        return [header_of(group) for group in self._groups]

    def contents(self, step: int, wanted: Mapping[int, tuple[int, ...]]) -> RolloutData | None:
        """Return its rollouts."""
        return contents_of(self._groups, wanted)

    def plan_after(self, step: int) -> dict[str, Any] | None:
        """Return the state that the controller's plan had."""
        return self._plan

    def consumed(self, step: int) -> dict[str, float]:
        """Return no figures."""
        return {}

    def finish(self, step: int) -> None:
        """Take no note."""

    def published(self, version: int) -> None:
        """Take no note."""

    def evaluation(self, version: int) -> dict[str, float] | None:
        """Return None: nothing is evaluated."""

    def missing(self, step: int) -> str:
        """Return nothing: all is there."""
        return ""


def changed(groups: list[Group], rewards: Mapping[Sample, float], dropped: Iterable[Sample]) -> list[Group]:
    """Return a batch with other rewards, and samples left out as if not scored (UserError: it has no such one)."""
    left = {**dict.fromkeys(dropped), **rewards}
    made: list[Group] = []
    for group in groups:
        scores = list(group.scores)
        for place, rollout in enumerate(group.rollouts):
            sample = group.prompt.id, rollout.sample_id
            if sample in left:
                reward = left.pop(sample)
                scores[place] = Score(0.0, "error", error="left out") if reward is None else Score(reward)
        made.append(dataclasses.replace(group, scores=tuple(scores)))
    if left:
        prompt, sample = next(iter(left))
        here = {group.prompt.id: [rollout.sample_id for rollout in group.rollouts] for group in groups}
        if prompt not in here:
            raise UserError(f"{prompt}:{sample}: this update has no such prompt; expected one of {_listed(here)}")
        raise UserError(f"{prompt}:{sample}: prompt {prompt} has samples {_listed(here[prompt])}")
    return made


def _listed(found: Iterable[int]) -> str:
    first, *others = map(str, found)
    return ", ".join([first, *others[:15]]) + (f" and {len(others) - 15} more" if len(others) > 15 else "")
