"""The rollout worker of several policies: leases of all of them in hand at once, drawn in one batch of one engine.

A policy's version is an adapter of the engine, and a request names the one that draws it: rows of a batch differ in
their adapters, and none depends on its neighbours. So each policy gets the rollouts that it would get alone. Whole
models whose episodes have roles are drawn likewise, by `WholeModels`.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from axlearn_like.layers.base import Params
from axlearn_like.run.events import EventLog
from mesh import UserError
from rl.parameter_server.errors import WeightsError
from rl.protocol.messages import Seat
from rl.protocol.protocols import PolicyLeaseSource
from rl.rollout.engine import RolloutEngine
from rl.rollout.leased_work import LeasedWork
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.worker import log_joined
from rl.rollout.worker_policy import PULL_ATTEMPTS, WorkerPolicy, pull_figures
from rl.runtime.policies.adapters import VERSIONS_HELD, adapter_name
from rl.runtime.policies.role_work import works_of
from rl.runtime.policies.whole_models import WholeModels

_WAIT = 0.2  # seconds that a turn waits at most where nothing can be drawn


class PoliciesWorker:
    """Worker of this name: carries out the leases of all policies. A policy that fails leaves the others as they are.

    While the engine draws, finished leases are scored by a thread for each policy.
    """

    def __init__(
        self,
        name: str,
        engine: RolloutEngine | WholeModels,
        policies: Mapping[str, WorkerPolicy[Any]],
        controllers: PolicyLeaseSource,
        base: Callable[[], Params | PlacedWeights],
        events: EventLog,
        *,
        began: float | None = None,
        frozen: Mapping[str, int] | None = None,
    ):
        """Build a worker.

        Args:
            name: name of the worker.
            engine: engine of the base, with room for adapters as `adapter_limits` says; or one for each whole model
                and for each frozen player.
            policies: parts of each policy, by its name, those of one that joins when they are asked for (`ByPolicy`);
                `services.controller` of each is `controllers`.
            controllers: lease to it.
            base: returns the base's weights; called before the first lease is drawn, and again after each `sleep`.
            events: events of the fleet; those of a policy's leases go to its own.
            began: start of its process (`time.time()`), if not now.
            frozen: frozen players that a policy is in episodes (`frozen_players`); None: there are none.
        """
        self.name, self._engine, self._policies = name, engine, policies
        self._controllers, self._base, self._events = controllers, base, events
        self._began = time.time() if began is None else began
        self._joined = False  # some rollouts were accepted
        self._stop: Callable[[], bool] = lambda: False
        self._works: dict[LeasedWork, float] = {}  # works in hand, and when each was leased or, later, begun
        self._scoring: dict[LeasedWork, Future[bool]] = {}  # works in hand that are drawn
        self._scorers: dict[str, ThreadPoolExecutor] = {}
        self._frozen = frozen or {}
        self._held = 1 if isinstance(engine, WholeModels) else VERSIONS_HELD
        self._failed_pulls: Counter[str] = Counter()  # consecutive ones by policy
        if engine.runner.kernel_choice:
            events.append(name, "kernel", **engine.runner.kernel_choice)

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Work until the controllers say that the run is over, or until `stop()`; then hand back unfinished work."""
        self._stop = lambda: stop() or self._engine.executor.leaving
        self._controllers.join(self.name)
        while not self._stop() and not self._controllers.status()["stopped"]:
            while self.run_once(timeout=2.0):
                pass
        self._controllers.leave(self.name)
        self.close()

    def close(self) -> None:
        """End what the worker has started: threads, episodes, and the engine's own."""
        for scorer in self._scorers.values():
            scorer.shutdown(wait=False, cancel_futures=True)
        for policy in self._policies.values():
            if policy.features.episodes is not None:
                policy.features.episodes.close()
        self._engine.executor.close()

    def run_once(self, timeout: float = 0.0) -> bool:
        """Take leases that there is room for, and make a dispatch; returns False with no lease in hand."""
        if self._stop():
            self._hand_back()
            return False
        self._take_leases(timeout)
        for work in list(self._works):
            if work in self._works and not work.begun:  # policies that fail lose all of theirs
                self._begin(work)
        self._draw()
        self._settle(0.0 if self._engine.busy else _WAIT)
        return bool(self._works)

    def sleep(self) -> None:
        """Give back the engine's memory, to a trainer on the same devices; leases in hand are handed back."""
        self._hand_back()
        self._engine.sleep()

    def abandon(self) -> None:
        """Free all leases and hand back rollouts that are whole: for another thread, when there is no more time."""
        for work in list(self._works):
            work.abandon()
        self._controllers.leave(self.name)

    def _take_leases(self, timeout: float) -> None:
        """Take leases while the engine has rows for more, waiting for the first one alone."""
        while True:
            waiting = [work.lease for work in self._works if not work.begun]
            sequences = self._engine.unfinished + sum(len(lease.prompts) * lease.samples for lease in waiting)
            if sequences >= self._engine.cfg.max_num_seqs:
                return
            lease = self._controllers.lease(self.name, timeout=-1.0 if self._works else timeout)
            if lease is None:
                return
            works: list[LeasedWork] = []
            with self._failing(lease.policy):  # fault in the parts of a policy that has joined, made now
                works = works_of(lease, self._policies, self.name)
            self._works |= dict.fromkeys(works, time.monotonic())
            for work in works:
                if work in self._works and not work.begun:  # else by the first: roles of one episode
                    self._begin(work)

    # ---- beginning

    def _begin(self, work: LeasedWork) -> None:
        """Submit the requests of a lease, unless it has to wait: for weights, a slot, or another lease's episodes."""
        if self._engine.version < 0:
            self._engine.set_weights(self._base(), 0, rewind=True)
        drawing = [one for one in self._works if one.begun and not one.drawn]
        if any(work.shares_episodes(one) for one in drawing):
            return
        seats = [seat for seat in work.seats if seat.policy]
        held = {adapter_name(seat) for one in (*drawing, work) for seat in one.seats}
        with self._failing(work.lease.policy):
            if all(adapter_name(seat) in self._engine.adapters or self._load(work, seat, held) for seat in seats):
                self._works[work] = time.monotonic()
                consulted = {seat.role: adapter_name(seat) if seat.policy else None for seat in work.seats if seat.role}
                work.begin(self._engine, adapter_name(seats[0]), consulted)

    def _load(self, work: LeasedWork, seat: Seat, held: set[str]) -> bool:
        """Load an adapter for a work; returns False if it cannot be now. `held`: those that rows are drawn with."""
        every, bank = list(self._engine.adapters), self._engine.runner.bank
        loaded = [one for one in every if one.rpartition("@")[0] == seat.policy]
        room = self._held * (1 + self._frozen.get(seat.policy, 0))  # versions loaded at a time
        full = bank is not None and len(every) >= bank.limits.slots  # slots of policies that have stopped count, too
        if full or len(loaded) >= room:
            if not (free := [one for one in (loaded if len(loaded) >= room else every) if one not in held]):
                return False
            self._engine.unload_adapter(free[0])
        if (adapter := self._pull(work, seat)) is not None:
            self._engine.load_adapter(adapter_name(seat), adapter, seat.version)
        return adapter is not None

    def _pull(self, work: LeasedWork, seat: Seat) -> Any:
        """Return the adapter or weights of a seat. None: they are not there now; after a while the lease is freed."""
        services, began = self._policies[seat.policy].services, time.monotonic()
        left = self._works[work] + services.pull_timeout - began
        fields: dict[str, Any] = {"version": seat.version}
        try:
            patience = 0.0 if self._engine.busy else max(0.0, min(left, _WAIT))
            adapter, moved = services.weights.take(seat.version, patience)
        except WeightsError as error:
            if time.monotonic() - began < left:
                return None
            self._failed_pulls[seat.policy] += 1
            if self._failed_pulls[seat.policy] >= PULL_ATTEMPTS:
                raise
            adapter, fields = None, {**fields, "error": str(error)}
            self._drop(work)
            work.hand_back()
        else:
            self._failed_pulls[seat.policy] = 0
            fields |= pull_figures(moved)
        services.events.append(self.name, "pull", seconds=round(time.monotonic() - began, 4), **fields)
        return adapter

    # ---- drawing and scoring

    def _draw(self) -> None:
        """Make a dispatch; what is drawn to its end is given to the scorers."""
        finished = self._engine.step() if self._engine.busy else []
        for work in list(self._works):
            work.renew()
            if work in self._scoring or work not in self._works:
                continue
            work.take(finished)
            if work.revoked:
                self._drop(work)
            elif work.drawn:
                with self._failing(work.lease.policy):
                    self._score(work)

    def _score(self, work: LeasedWork) -> None:
        self._collect(work)
        if work.generated():
            scorer = self._scorers.setdefault(work.lease.policy, ThreadPoolExecutor(1, "score"))
            self._scoring[work] = scorer.submit(work.deliver)
        else:
            self._drop(work)

    def _collect(self, work: LeasedWork) -> None:
        lease, seconds = work.lease, time.monotonic() - self._works[work]
        fields = {"step": lease.step, "lease": lease.id, "version": lease.version, **work.collect()}
        work.policy.services.events.append(self.name, work.event, seconds=round(seconds, 4), **fields)

    def _settle(self, timeout: float | None) -> None:
        """Let go of leases that are scored and submitted, waiting up to `timeout` seconds for one."""
        wait(self._scoring.values(), timeout, FIRST_COMPLETED)
        for work, future in list(self._scoring.items()):
            if not future.done() or work not in self._works:
                continue
            self._drop(work)
            with self._failing(work.lease.policy, Exception):  # errors of scorers, too
                if future.result() and not self._joined:
                    self._joined = True
                    log_joined(self._events, self.name, self._began)

    # ---- ends

    @contextlib.contextmanager
    def _failing(self, policy: str, fault: type[Exception] = UserError) -> Iterator[None]:
        """Stop a policy by whose fault a block raises such an error, and drop its leases."""
        try:
            yield
        except fault as error:
            self._controllers.fail(policy, str(error) or repr(error))
            for work in [one for one in self._works if one.lease.policy == policy]:
                self._drop(work)

    def _drop(self, work: LeasedWork) -> None:
        """Let go of a lease."""
        work.abort(self._engine)
        self._works.pop(work, None)
        if (future := self._scoring.pop(work, None)) is not None:
            future.cancel()

    def _hand_back(self) -> None:
        """Hand back all leases, but for those being scored, which are submitted."""
        finished = self._engine.abort_all()
        for work in list(self._works):
            if work in self._scoring or work not in self._works:
                continue
            with self._failing(work.lease.policy):
                work.take(finished)
                if work.begun:
                    self._collect(work)
                work.hand_back()
            self._drop(work)
        while self._scoring:
            self._settle(None)
