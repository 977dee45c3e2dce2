"""The rollout worker: lease, pull weights, generate, score, submit; and again.

It holds nothing that cannot be made again: kill it at any moment and its lease goes to another worker. Asked to leave,
it hands back what it has, for another worker to continue.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from axlearn_like.run.events import EventLog, span
from mesh import UserError
from rl.parameter_server.errors import WeightsError
from rl.protocol.messages import Lease, Prompt
from rl.rollout.engine import RolloutEngine, Swap
from rl.rollout.leased_work import LeasedWork
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.request import Request, StopConditions
from rl.rollout.scheduling.page_handover import PageHandover
from rl.rollout.worker_policy import PULL_ATTEMPTS, WorkerPolicy, pull_figures


class _Held(NamedTuple):
    """Weights of a policy, and who made them."""

    incarnation: int
    version: int
    placed: PlacedWeights


_DRAFTS = ("drafted_tokens", "accepted_tokens", "coupled_drafted_tokens", "coupled_accepted_tokens")
_PREFIXES = ("prefill_tokens", "prefix_cache_hit_tokens")  # tokens of prompts that were computed, and that were not
_COUNTS = (*_DRAFTS, *_PREFIXES, "tier_seconds_saved")
_BALANCE = ("busiest_to_mean", "busiest_to_mean_without")  # devices with experts, under this version so far


class RolloutWorker:
    """Worker of this name: carries out the leases of the controller, one after the other.

    Several policies are whole models of one shape: the engine takes the weights of the lease's policy, and those of the
    others stay on its devices. One that fails leaves the others as they are.
    """

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        policies: Mapping[str, WorkerPolicy[PlacedWeights]],
        *,
        swap: Swap = "keep_cache",
        began: float | None = None,
    ):
        """Build a worker; `policies` by name ("": the only one) share a controller; `began`: start of its process."""
        self.name, self._engine, self._policies = name, engine, dict(policies)
        self._policy = next(iter(self._policies.values()))  # policy of the lease in hand
        self._controller: Any = self._policy.services.controller  # source of leases of all policies
        self._swap: Swap = swap
        self._failed_pulls: Counter[str] = Counter()  # consecutive ones by policy
        self._began = self._events.clock.wall() if began is None else began
        self._joined = False  # some rollouts were accepted
        self._stop: Callable[[], bool] = lambda: False
        self._origin = ("", 0)  # policy and incarnation of the trainer that made the current weights
        self._held: dict[str, _Held] = {}  # weights of each of several policies
        self._work: LeasedWork | None = None  # work in hand
        if engine.runner.kernel_choice:
            self._events.append(name, "kernel", **engine.runner.kernel_choice)

    def run(self, stop: Callable[[], bool] = lambda: False, patience: float = 2.0) -> None:
        """Work until the run is over or `stop()`, then hand back; `patience`: seconds of one request for a lease."""
        self._stop = lambda: stop() or self._engine.executor.leaving
        self._controller.join(self.name)
        while not self._stop() and not self._controller.status()["stopped"]:
            while self.run_once(timeout=patience):
                pass
        self._controller.leave(self.name)
        self.close()

    def close(self) -> None:
        """End what the worker has started: episodes, and the loops of its engine's other processes."""
        for policy in self._policies.values():
            if (episodes := policy.features.episodes) is not None:
                episodes.close()
        self._engine.executor.close()

    def run_once(self, timeout: float = 0.0) -> bool:
        """Carry out one lease; returns False if there was none, or it was handed back."""
        if self._stop() or (lease := self._controller.lease(self.name, timeout)) is None:
            return False
        self._policy = self._policies[lease.policy]
        with self._failing(lease.policy):
            return self._carry_out(lease)
        return True

    def _carry_out(self, lease: Lease) -> bool:
        """Draw, score and submit; returns False if the lease was handed back, as the worker must leave."""
        if (origin := (lease.policy, lease.incarnation)) != self._origin:
            self._engine.invalidate_weights()  # another model's, or of a trainer that died before it saved them
            self._origin = origin
        self._work = work = LeasedWork(lease, self._policy, self.name)
        if not self._load(lease):
            return True
        if (pages := self._handover) is not None and lease.partial:
            pages.take(self.name, lease)
        counts = self._counts()
        with self._span(work.event, step=lease.step, lease=lease.id, version=lease.version) as span:
            self._draw(work)
            span |= work.collect()
            span |= {name: count - counts.get(name, 0) for name, count in self._counts().items()}
            stats = self._engine.stats()
            span |= {name: stats[name] for name in _BALANCE if name in stats}
        if self._stop():
            if pages is not None:
                pages.leave(self.name, lease, work.rollouts)
            work.hand_back()
            return False
        if not work.revoked and work.generated():
            with self._failing(lease.policy, Exception):  # errors of scorers, too
                if work.deliver() and not self._joined:
                    self._joined = True
                    log_joined(self._events, self.name, self._began)
        self._work = None
        return True

    @contextlib.contextmanager
    def _failing(self, policy: str, fault: type[Exception] = UserError) -> Iterator[None]:
        """Stop one of several policies by whose fault a block raises such an error; with an only one, raise it."""
        try:
            yield
        except fault as error:
            if not policy:
                raise
            self._engine.abort_all()
            self._work = None
            self._controller.fail(policy, str(error) or repr(error))

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
        self._held.clear()
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
        """Return tokens since the start: drafted, accepted, and drawn where samples branch; seconds saved by tiers."""
        stats = self._engine.stats()
        counts = {name: stats[name] for name in _COUNTS if name in stats}
        branches = self._policy.features.branching is not None
        return {**counts, "drawn_tokens": stats["generation_tokens"]} if branches else counts

    def _load(self, lease: Lease) -> bool:
        """Return False if the version is not available now: its trainer died, and makes it again when it is back."""
        version, held = lease.version, self._held.get(lease.policy)
        if version == self._engine.version:
            return True
        if held is not None and held[:2] == (lease.incarnation, version):
            placed = held.placed
        elif (placed := self._pull(lease)) is None:
            return False
        with self._span("swap", version=version):
            self._set_weights(placed, version, rewind=True)
        return True

    def _pull(self, lease: Lease) -> PlacedWeights | None:
        services = self._policy.services
        with self._span("pull", version=lease.version) as span:
            try:
                placed, moved = services.weights.take(lease.version, services.pull_timeout)
            except WeightsError as error:
                self._failed_pulls[lease.policy] += 1
                if self._failed_pulls[lease.policy] >= PULL_ATTEMPTS:
                    raise
                span["error"] = str(error)
                self._controller.join(self.name)  # frees the lease
                return None
            self._failed_pulls[lease.policy] = 0
            span |= pull_figures(moved)
        return placed

    def _set_weights(self, placed: PlacedWeights, version: int, **how: Any) -> None:
        self._engine.set_weights(placed, version, **how)
        policy, incarnation = self._origin
        if len(self._policies) > 1:
            self._held[policy] = _Held(incarnation, version, placed)

    def _swap_newer(self) -> None:
        """Swap in newer weights, between two dispatches, if they have arrived."""
        if (found := self._policy.services.weights.newer()) is None:
            return
        newest, placed, moved = found
        self._events.append(self.name, "pull", version=newest, seconds=0.0, **pull_figures(moved))
        with self._span("swap", version=newest, swap=self._swap):
            self._set_weights(placed, newest, swap=self._swap)

    @property
    def _handover(self) -> PageHandover | None:
        depot = self._policy.services.depot
        return None if depot is None else PageHandover(self._engine, depot, self._events)

    @property
    def _events(self) -> EventLog:
        return self._policy.services.events

    def _span(self, event: str, **fields: Any) -> AbstractContextManager[dict[str, Any]]:
        return span(self._events, self.name, event, **fields)


def log_joined(events: EventLog, worker: str, began: float) -> None:
    """Log that the first rollouts of a worker were accepted; `began`: when its process did."""
    events.append(worker, "joined", join_s=round(events.clock.wall() - began, 3))
