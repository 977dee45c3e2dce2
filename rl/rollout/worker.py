"""The rollout worker: lease, pull weights, generate, score, submit; and again.

It holds nothing that cannot be made again: kill it at any moment and its lease goes to another worker. Asked to leave,
it hands back what it has, for another worker to continue.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from axlearn_like.run.events import EventLog, span
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh import UserError
from rl.environments.scoring import score_rollouts
from rl.parameter_server.errors import WeightsError
from rl.protocol.messages import Details, Group, Lease, Prompt, PullStats, Rollout
from rl.protocol.protocols import LeaseSource, ScoreSource, WeightSource
from rl.rollout.agent_loops.branching import Branching
from rl.rollout.agent_loops.demonstrations import GroupDemonstrations
from rl.rollout.agent_loops.episodes import Episodes
from rl.rollout.agent_loops.interruption import Interruption
from rl.rollout.engine import RolloutEngine, Swap
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.request import Request, draw_seed

_PULL_ATTEMPTS = 5  # failures in a row before the run fails


@dataclasses.dataclass(frozen=True)
class WorkerServices:
    """The roles that a worker calls.

    Attributes:
        controller: leases to it.
        weights: weights of the policy.
        verifier: scores the answers.
        events: events of the run.
        pull_timeout: seconds that a pull of weights may take.
    """

    controller: LeaseSource
    weights: WeightSource[PlacedWeights]
    verifier: ScoreSource
    events: EventLog
    pull_timeout: float = 60.0


@dataclasses.dataclass(frozen=True)
class WorkerFeatures:
    """Features of a worker's rollouts, none by default.

    Attributes:
        wants: what the scorer wants to know of a rollout beside its answer (`Scorer.Config.wants`).
        episodes: episodes of the tasks' environments.
        branching: samples of a prompt share their first tokens, except in evaluations.
        demonstrations: these are among the samples, except in evaluations; None: the policy draws all.
        interruption: long thinking is interrupted, in evaluations too.
    """

    wants: frozenset[str] = frozenset()
    episodes: Episodes | None = None
    branching: Branching | None = None
    demonstrations: GroupDemonstrations | None = None
    interruption: Interruption | None = None


class RolloutWorker:
    """Worker of this name: carries out the leases of the controller."""

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        seed: int,
        services: WorkerServices,
        features: WorkerFeatures | None = None,
        *,
        swap: Swap = "keep_cache",
        began: float | None = None,
    ):
        """Build a worker.

        Args:
            name: name of the worker.
            engine: draws the rollouts.
            tokenizer: decodes the answers.
            seed: seed of the run.
            services: roles that it calls.
            features: features of its rollouts; None: plain ones.
            swap: see `RolloutEngine.set_weights`.
            began: start of its process (`time.time()`), if not now.
        """
        features = WorkerFeatures() if features is None else features
        self._demonstrations, self._interruption = features.demonstrations, features.interruption
        self._wants, self._episodes, self._branching = features.wants, features.episodes, features.branching
        self.name, self._engine, self._tokenizer, self._seed = name, engine, tokenizer, seed
        self._controller, self._weights, self._verifier = services.controller, services.weights, services.verifier
        self._events, self._pull_timeout = services.events, services.pull_timeout
        self._swap: Swap = swap
        self._failed_pulls = 0  # consecutive failed pulls
        self._began = time.time() if began is None else began
        self._joined = False  # some rollouts were accepted
        self._stop: Callable[[], bool] = lambda: False
        self._incarnation = 0  # incarnation of the trainer that made the current weights
        self._revoked = False  # the lease has gone to another worker
        self._unsubmitted: tuple[Lease, list[Rollout]] | None = None  # generated
        if engine.runner.kernel_choice:
            self._events.append(name, "kernel", **engine.runner.kernel_choice)

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Work until the controller says that the run is over, or until `stop()`; then hand back unfinished work."""
        self._stop = lambda: stop() or self._engine.executor.leaving
        self._controller.join(self.name)
        while not self._stop() and not self._controller.status()["stopped"]:
            while self.run_once(timeout=2.0):
                pass
        self._controller.leave(self.name)
        self.close()

    def close(self) -> None:
        """End what the worker has started: episodes, and the loops of its engine's other processes."""
        if self._episodes is not None:
            self._episodes.close()
        self._engine.executor.close()

    def run_once(self, timeout: float = 0.0) -> bool:
        """Carry out one lease; returns False if there was none, or it was handed back."""
        if self._stop() or (lease := self._controller.lease(self.name, timeout)) is None:
            return False
        if lease.incarnation != self._incarnation:  # weights may be of a trainer that died before it saved them
            self._engine.invalidate_weights()
            self._incarnation = lease.incarnation
        if self._episodes is not None:
            lease = dataclasses.replace(lease, partial=self._episodes.continuable(lease.partial))
        if not self._load(lease.version):
            return True
        drawing, counts = "evaluate" if lease.evaluation else "generate", self._counts()
        with self._span(drawing, step=lease.step, lease=lease.id, version=lease.version) as span:
            rollouts = self._generate(lease)
            drawn = sum(len(r.tokens) for r in rollouts if not r.demonstration)
            span["tokens"] = drawn - sum(len(r.tokens) for r in lease.partial)
            span |= {name: count - counts[name] for name, count in self._counts().items()}
            if recorded := sum(r.routing.nbytes for r in rollouts if r.routing is not None):
                span["routing_bytes"] = recorded
        if self._stop():
            self._hand_back(lease, rollouts)
            return False
        if self._revoked:
            return True
        check_whole(rollouts)
        if self._controller.generated(lease.id):
            self._unsubmitted = lease, rollouts
            accepted = self._controller.submit(lease.id, self._score(lease, rollouts))
            self._unsubmitted = None
            if accepted and not self._joined:
                self._joined = True
                loaded = int(self._engine.stats()["loaded_programs"])  # programs compiled elsewhere
                known = {"loaded_programs": loaded} if loaded else {}
                self._events.append(self.name, "joined", join_s=round(time.time() - self._began, 3), **known)
        return True

    def sleep(self) -> None:
        """Give back the engine's memory between two leases, to a trainer on the same devices."""
        self._engine.sleep()

    def abandon(self) -> None:
        """Free the lease and hand back rollouts that are whole: for another thread, when there is no more time."""
        if (unsubmitted := self._unsubmitted) is not None:
            self._hand_back(*unsubmitted)
        self._controller.leave(self.name)

    def _generate(self, lease: Lease) -> list[Rollout]:
        """Return the rollouts of a lease in its order; some are cut if it was revoked, or the worker must leave."""
        numbers, ask = [], Request if self._episodes is None else self._episodes.request
        if self._interruption is not None:
            ask = self._interruption.request
        given: dict[int, list[Rollout]] = {}  # request number -> rollouts
        if (branching := self._branching_of(lease)) is not None:
            ask = branching.request
        for prompt in lease.prompts:
            partial = tuple(r for r in lease.partial if r.prompt_id == prompt.id)
            seed = draw_seed(self._seed, prompt.draw)
            others = self._given(lease, prompt)
            numbers.append(self._engine.submit(ask(prompt, lease.samples - len(others), seed, partial=partial)))
            given[numbers[-1]] = others
        rollouts: dict[int, tuple[Rollout, ...]] = {}
        self._revoked, renewed = False, time.monotonic()
        while len(rollouts) < len(numbers):
            if self._stop() or self._revoked:
                finished = self._engine.abort_all()
            else:
                finished = self._engine.step()
                if lease.follow:
                    self._swap_newer()
            rollouts |= {one.number: one.rollouts for one in finished}
            if time.monotonic() - renewed > lease.seconds / 4:
                self._revoked, renewed = not self._controller.renew(lease.id), time.monotonic()
        found = [rollout for number in numbers for rollout in (*rollouts[number], *given[number])]
        if self._episodes is not None:
            found = self._episodes.recorded(found, lease.partial, again=lease.rerun)
        return found

    def _counts(self) -> dict[str, float]:
        """Return tokens since the start: drafted and accepted ones, and those that were drawn where samples branch."""
        stats = self._engine.stats()
        counts = {name: stats[name] for name in ("drafted_tokens", "accepted_tokens") if name in stats}
        return counts if self._branching is None else {**counts, "drawn_tokens": stats["generation_tokens"]}

    def _given(self, lease: Lease, prompt: Prompt) -> list[Rollout]:
        if self._demonstrations is None or lease.evaluation:
            return []
        return self._demonstrations.rollouts(prompt, lease.samples, lease.version)

    def _branching_of(self, lease: Lease) -> Branching | None:
        return None if lease.evaluation else self._branching

    def _hand_back(self, lease: Lease, rollouts: Sequence[Rollout]) -> None:
        if (branching := self._branching_of(lease)) is not None:
            rollouts = branching.continuable(rollouts, lease.samples)
        if all(rollout.finish_reason != "error" for rollout in rollouts):
            self._controller.hand_back(lease.id, tuple(r for r in rollouts if not r.demonstration))

    def _load(self, version: int) -> bool:
        """Return False if the version is not available now: its trainer died, and makes it again when it is back."""
        if version == self._engine.version:
            return True
        with self._span("pull", version=version) as span:
            try:
                placed, moved = self._weights.take(version, self._pull_timeout)
            except WeightsError as error:
                self._failed_pulls += 1
                if self._failed_pulls >= _PULL_ATTEMPTS:
                    raise
                span["error"] = str(error)
                self._controller.join(self.name)  # frees the lease
                return False
            self._failed_pulls = 0
            span |= _figures(moved)
        with self._span("swap", version=version):
            self._engine.set_weights(placed, version, rewind=True)
        return True

    def _swap_newer(self) -> None:
        """Swap in newer weights, between two dispatches, if they have arrived."""
        if (found := self._weights.newer()) is None:
            return
        newest, placed, moved = found
        self._events.append(self.name, "pull", version=newest, seconds=0.0, **_figures(moved))
        with self._span("swap", version=newest, swap=self._swap):
            self._engine.set_weights(placed, newest, swap=self._swap)

    def _score(self, lease: Lease, rollouts: list[Rollout]) -> tuple[Group, ...]:
        with self._span("score", step=lease.step) as span:
            wanted = bool(self._wants & {"tokens", "finish_reason"})
            details = [_details(rollout) for rollout in rollouts] if wanted else None
            answers, scores = score_rollouts(self._verifier, rollouts, self._tokenizer, details)
            if failed := [score for score in scores if score.status != "ok"]:
                why = f"{failed[-1].status}: {failed[-1].error}"
                span |= {"answers": len(scores), "failed": len(failed), "error": why}
        n = lease.samples
        if lease.evaluation:  # nobody replays it
            rollouts = [dataclasses.replace(rollout, routing=None, candidate_tokens=None) for rollout in rollouts]
        return tuple(
            Group(prompt, tuple(rollouts[i * n : (i + 1) * n]), tuple(scores[i * n : (i + 1) * n]))
            for i, prompt in enumerate(lease.prompts)
        )

    def _span(self, event: str, **fields: Any) -> AbstractContextManager[dict[str, Any]]:
        return span(self._events, self.name, event, **fields)


def _details(rollout: Rollout) -> Details:
    return {"tokens": rollout.tokens.tolist(), "finish_reason": rollout.finish_reason}


def _figures(moved: PullStats) -> dict[str, Any]:
    """Return the event fields of a pull. Its `seconds` are time blocked; most of the transfer overlaps drawing."""
    seconds = round(moved.seconds, 4)
    figures = {"nbytes": moved.needed, "network": moved.network, "source": moved.source, "checksum": moved.checksum}
    return {**figures, "transfer_seconds": seconds}


def check_whole(rollouts: Sequence[Rollout]) -> None:
    """Refuse rollouts that did not end by themselves: the logits of their policy are not all numbers.

    Raises:
        UserError: naming the first prompt that failed, and the version.
    """
    for rollout in rollouts:
        if rollout.finish_reason not in ("stop", "length"):
            raise UserError(
                f"prompt {rollout.prompt_id}, sample {rollout.sample_id}: drawing ended with {rollout.finish_reason!r} "
                f"after {len(rollout.tokens)} tokens; are the policy's weights all numbers? (A learning rate that is "
                "too high, or no clipping, are the usual causes.)"
            )
