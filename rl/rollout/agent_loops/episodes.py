"""The episodes of a process that draws: requests that play an environment, and the records of how they went."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from axlearn_like.config import ConfigBase
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError
from rl.environments.environment import Environment, row_of
from rl.environments.task import environments_of
from rl.environments.thread import EnvironmentThread
from rl.protocol.messages import WHOLE, Episode, Prompt, Rollout, Score
from rl.rollout.agent_loops.episode_loop import EpisodeLoop
from rl.rollout.agent_loops.role_episodes import RolePlay
from rl.rollout.request import Request
from rl.tasks.mixture import TaskMixture
from rl.verification.failures import FailureWatch

__all__ = ["RERUN", "Episodes"]

RERUN = "rerun"  # tag of a rollout that may have been made before, in an environment that is not pure
_CLOSE_S = 5.0


class Episodes:
    """Environments of tasks: what their episodes share is built once, each episode when it begins. One thread's."""

    def __init__(self, tasks: TaskMixture, tokenizer: Tokenizer, seed: int):
        """Build nothing yet; `seed`: of the run, by which, with a problem's id, the problem's episodes are seeded."""
        self._tasks, self._tokenizer, self._seed = tasks, tokenizer, seed
        self._shared: dict[str, tuple[Environment.Config, Any]] = {}  # task label -> shared environment
        self._records: dict[int, dict[int, Episode]] = {}  # problem number -> sample -> record, until `recorded`
        self._threads: list[EnvironmentThread] = []
        self._failures = FailureWatch(what="the environment")

    @classmethod
    def of(cls, tasks: ConfigBase[Any], tokenizer: Tokenizer, seed: int) -> "Episodes | None":
        """Return the episodes of tasks; None if they have no environment."""
        return cls(tasks.build(), tokenizer, seed) if environments_of(tasks) else None

    def request(self, prompt: Prompt, samples: int, seed: int, partial: Iterable[Rollout] = ()) -> Request:
        """Return the request that plays the episodes of a problem; `partial`: of `continuable`."""
        if self._tasks.environment(prompt.id) is None:
            return Request(prompt, samples, seed, partial=tuple(partial))
        parts = self._parts(prompt)
        loop = EpisodeLoop(*parts, shared=self._shared[self._tasks.problem(prompt.id).family][1])
        loop.episodes.update({one.sample_id: one.episode for one in partial if one.episode is not None})
        self.record(prompt.id, loop.episodes)
        return Request(prompt, samples, seed, agent_loop=loop, partial=tuple(partial))

    def play(self, prompt: Prompt) -> RolePlay:
        """Return the episodes of a problem whose environment has roles, for their requests."""
        return RolePlay(*self._parts(prompt))

    def record(self, problem_id: int, episodes: dict[int, Episode]) -> None:
        """Take the records of a problem's episodes, by sample, from who plays them; until `recorded`."""
        self._records[problem_id] = episodes

    def continuable(self, partial: Iterable[Rollout]) -> tuple[Rollout, ...]:
        """Return rollouts handed back, those of unfinished episodes empty: their environments are gone."""
        return tuple(
            rollout if _whole(rollout) or self._tasks.environment(rollout.prompt_id) is None else _empty(rollout)
            for rollout in partial
        )

    def recorded(self, rollouts: Sequence[Rollout], partial: Sequence[Rollout] = (), *, again: bool) -> list[Rollout]:
        """Return rollouts with the records of their episodes, as far as these are over.

        Args:
            partial: those that the requests were made with.
            again: the others may have been made before, and were lost: tag those of environments that are not pure.

        Raises:
            ScorerFails: many episodes in a row have failed.
        """
        kept = {(one.prompt_id, one.sample_id) for one in partial if _whole(one)}
        found = [self._recorded(one, again and (one.prompt_id, one.sample_id) not in kept) for one in rollouts]
        for problem_id in {one.prompt_id for one in rollouts}:
            self._records.pop(problem_id, None)
        self._threads = [thread for thread in self._threads if not thread.join(0.0)]
        over = [(one.prompt_id, one.episode) for one in found if one.episode is not None]
        self._failures.check([number for number, _ in over], [_verdict(episode) for _, episode in over])
        return found

    def close(self) -> None:
        """Wait, for a while, until all episodes are closed; then close what they share."""
        end = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        for _, shared in self._shared.values():
            if callable(close := getattr(shared, "close", None)):
                with suppress(Exception):  # errors of user code have no reader left
                    close()
        self._shared.clear()

    def _recorded(self, rollout: Rollout, again: bool) -> Rollout:
        episode = self._records.get(rollout.prompt_id, {}).get(rollout.sample_id)
        environment = self._tasks.environment(rollout.prompt_id)
        if episode is not None and isinstance(environment, Environment.Config) and not environment.is_pure():
            figures = tuple(sorted({"rerun": 0.0, **dict(episode.figures), **({RERUN: 1.0} if again else {})}.items()))
            episode = dataclasses.replace(episode, figures=figures)
            tags = {*rollout.tags, RERUN} if again else rollout.tags
            rollout = dataclasses.replace(rollout, tags=tuple(sorted(tags)))
        return dataclasses.replace(rollout, episode=episode)

    def _parts(self, prompt: Prompt) -> tuple[Any, ...]:
        """Return the arguments of an `EpisodeLoop` or `RolePlay`."""
        problem = self._tasks.problem(prompt.id)
        if problem.family not in self._shared:
            environment = self._tasks.environment(prompt.id)
            assert isinstance(environment, Environment.Config)
            try:
                self._shared[problem.family] = environment, environment.share_with(self._tokenizer)
            except Exception as error:
                if isinstance(error, UserError):
                    raise
                what = f"{type(error).__name__}: {error}"
                raise UserError(f"the environment of task {problem.family!r} cannot be built: {what}") from error
        cfg, shared = self._shared[problem.family]
        make: Callable[[], Environment] = lambda: cfg.build(shared=shared)  # noqa: E731
        row = row_of(problem, episode_seed(self._seed, problem.id))
        return cfg, make, self._tokenizer, problem, row, lambda thread: self._threads.append(thread)


def episode_seed(seed: int, problem_id: int) -> int:
    """Return 32 bits for the randomness of an environment: the samples of a problem begin alike."""
    digest = hashlib.blake2b(f"{seed}/{problem_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def _whole(rollout: Rollout) -> bool:
    return rollout.finish_reason in WHOLE


def _empty(rollout: Rollout) -> Rollout:
    nothing = {name: getattr(rollout, name)[:0] for name in ("tokens", "logprobs", "versions", "action_mask")}
    return dataclasses.replace(rollout, **nothing, routing=None, candidate_tokens=None, episode=None, tags=())


def _verdict(episode: Episode) -> Score:
    return Score(0.0, "error", error=episode.error) if episode.ended == "error" else Score(0.0)
