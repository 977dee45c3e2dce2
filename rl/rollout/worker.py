"""The rollout worker: lease, pull weights, generate, score, submit; and again.

It holds nothing that cannot be made again: kill it at any moment and its lease goes to another worker. Asked to leave,
it hands back what it has, for another worker to continue.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from axlearn_like.run.events import EventLog, span
from axlearn_like.tokenizers.protocol import Tokenizer
from rl.parameter_server.errors import WeightsError
from rl.protocol.messages import Prompt
from rl.rollout.engine import RolloutEngine, Swap
from rl.rollout.leased_work import LeasedWork
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.request import Request, StopConditions
from rl.rollout.worker_policy import PULL_ATTEMPTS, WorkerFeatures, WorkerPolicy, WorkerServices, pull_figures


class RolloutWorker:
    """Worker of this name: carries out the leases of the controller."""

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        seed: int,
        services: WorkerServices[PlacedWeights],
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
            began: start of its process (seconds since 1970), if not now.
        """
        features = WorkerFeatures() if features is None else features
        self._policy = WorkerPolicy(tokenizer, seed, services, features)
        self.name, self._engine = name, engine
        self._controller, self._events = services.controller, services.events
        self._swap: Swap = swap
        self._failed_pulls = 0  # consecutive failed pulls
        self._began = services.events.clock.wall() if began is None else began
        self._joined = False  # some rollouts were accepted
        self._stop: Callable[[], bool] = lambda: False
        self._incarnation = 0  # incarnation of the trainer that made the current weights
        self._work: LeasedWork | None = None  # work in hand
        if engine.runner.kernel_choice:
            self._events.append(name, "kernel", **engine.runner.kernel_choice)

    def run(self, stop: Callable[[], bool] = lambda: False, patience: float = 2.0) -> None:
        """Work until the controller says that the run is over, or until `stop()`; then hand back unfinished work.

        `patience`: seconds of one request for a lease, in which `stop` is not looked at.
        """
        self._stop = lambda: stop() or self._engine.executor.leaving
        self._controller.join(self.name)
        while not self._stop() and not self._controller.status()["stopped"]:
            while self.run_once(timeout=patience):
                pass
        self._controller.leave(self.name)
        self.close()

    def close(self) -> None:
        """End what the worker has started: episodes, and the loops of its engine's other processes."""
        if (episodes := self._policy.features.episodes) is not None:
            episodes.close()
        self._engine.executor.close()

    def run_once(self, timeout: float = 0.0) -> bool:
        """Carry out one lease; returns False if there was none, or it was handed back."""
        if self._stop() or (lease := self._controller.lease(self.name, timeout)) is None:
            return False
        if lease.incarnation != self._incarnation:  # weights may be of a trainer that died before it saved them
            self._engine.invalidate_weights()
            self._incarnation = lease.incarnation
        self._work = work = LeasedWork(lease, self._policy, self.name)
        if not self._load(lease.version):
            return True
        counts = self._counts()
        with self._span(work.event, step=lease.step, lease=lease.id, version=lease.version) as span:
            self._draw(work)
            span |= work.collect()
            span |= {name: count - counts.get(name, 0) for name, count in self._counts().items()}
        if self._stop():
            work.hand_back()
            return False
        if not work.revoked and work.generated() and work.deliver() and not self._joined:
            self._joined = True
            log_joined(self._events, self.name, self._began)
        self._work = None
        return True

    def warm_up(self, latest: Callable[[], int]) -> None:
        """Take the `latest` version and draw two tokens by it, which compiles what leases run; nobody gets them."""
        services, tokens = self._policy.services, np.zeros(self._engine.cfg.max_prompt_tokens, np.int32)
        for _ in range(PULL_ATTEMPTS):
            try:
                placed, _ = services.weights.take(version := latest(), services.pull_timeout)
            except WeightsError:
                continue  # newer ones have taken its place
            self._engine.set_weights(placed, version, rewind=True)
            prompts = [Prompt(index, "warm-up", tokens) for index in range(2)]
            stop = StopConditions(max_new_tokens=min(2, self._engine.cfg.max_new_tokens))
            self._engine.generate([Request(prompt, samples=2, stop=stop) for prompt in prompts])
            return

    def sleep(self) -> None:
        """Give back the engine's memory between two leases, to a trainer on the same devices."""
        self._engine.sleep()

    def abandon(self) -> None:
        """Free the lease and hand back rollouts that are whole: for another thread, when there is no more time."""
        if self._work is not None:
            self._work.abandon()
        self._controller.leave(self.name)

    def _draw(self, work: LeasedWork) -> None:
        """Draw the rollouts of a lease; some are cut if it was revoked, or the worker must leave."""
        work.begin(self._engine)
        while not work.drawn:
            if self._stop() or work.revoked:
                finished = self._engine.abort_all()
            else:
                finished = self._engine.step()
                if work.lease.follow:
                    self._swap_newer()
            work.take(finished)
            work.renew()

    def _counts(self) -> dict[str, float]:
        """Return tokens since the start: drafted and accepted ones, and those that were drawn where samples branch."""
        stats = self._engine.stats()
        known = "drafted_tokens", "accepted_tokens", "coupled_drafted_tokens", "coupled_accepted_tokens"
        counts = {name: stats[name] for name in known if name in stats}
        branches = self._policy.features.branching is not None
        return {**counts, "drawn_tokens": stats["generation_tokens"]} if branches else counts

    def _load(self, version: int) -> bool:
        """Return False if the version is not available now: its trainer died, and makes it again when it is back."""
        if version == self._engine.version:
            return True
        services = self._policy.services
        with self._span("pull", version=version) as span:
            try:
                placed, moved = services.weights.take(version, services.pull_timeout)
            except WeightsError as error:
                self._failed_pulls += 1
                if self._failed_pulls >= PULL_ATTEMPTS:
                    raise
                span["error"] = str(error)
                self._controller.join(self.name)  # frees the lease
                return False
            self._failed_pulls = 0
            span |= pull_figures(moved)
        with self._span("swap", version=version):
            self._engine.set_weights(placed, version, rewind=True)
        return True

    def _swap_newer(self) -> None:
        """Swap in newer weights, between two dispatches, if they have arrived."""
        if (found := self._policy.services.weights.newer()) is None:
            return
        newest, placed, moved = found
        self._events.append(self.name, "pull", version=newest, seconds=0.0, **pull_figures(moved))
        with self._span("swap", version=newest, swap=self._swap):
            self._engine.set_weights(placed, newest, swap=self._swap)

    def _span(self, event: str, **fields: Any) -> AbstractContextManager[dict[str, Any]]:
        return span(self._events, self.name, event, **fields)


def log_joined(events: EventLog, worker: str, began: float) -> None:
    """Log that the first rollouts of a worker were accepted; `began`: when its process did."""
    events.append(worker, "joined", join_s=round(events.clock.wall() - began, 3))
