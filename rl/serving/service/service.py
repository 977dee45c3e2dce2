"""A service without its wire: training and sampling of adapters of one base."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from axlearn_like.layers.wrappers.adapters import Adapter
from rl.rollout.engine import RolloutEngine
from rl.serving.engine_thread import EngineThread
from rl.serving.service.durable.folders import ServiceFolders, StatePath
from rl.serving.service.durable.journal import RequestJournal
from rl.serving.service.messages import BaseFacts, Outcome, Request, SavedFacts, UnknownId
from rl.serving.service.queues import ModelQueue
from rl.serving.service.samplers import OpenSamplers, session_of
from rl.serving.service.sampling import SamplingQueue
from rl.serving.service.saved import read_state
from rl.serving.service.slots import TrainingSlots
from rl.serving.service.training_tasks import ServiceLimits, TrainingTasks

_END = "session-end"  # name of what a session leaves behind


class AdapterService:
    """Training and sampling of adapters, on an engine and training slots that hold the same base.

    All methods return at once and may be called from any thread. A future's exception is a ServiceError if the client
    can read it; any other is a fault of the service. Ids carry their tenants: one of another is unknown (`UnknownId`).

    Attributes:
        slots: training slots, which only the service's own thread touches while it runs.
        samplers: open samplers, and what is drawn from them.
    """

    def __init__(
        self,
        base: BaseFacts,
        engine: RolloutEngine,
        slots: TrainingSlots,
        folder: Path,
        limits: ServiceLimits | None = None,
    ):
        """Take over what a service before this one has left in the folder, and start both threads.

        Args:
            engine: has the base's weights, and room for adapters.
            slots: empty.
            folder: folder of the service's state; no other process may use it.
            limits: limits of tenants, and of what is kept for a restart.

        Raises:
            JournalDamaged: what was accepted cannot be read.
        """
        limits = limits or ServiceLimits()
        self.base, self.slots = base, slots
        self._folders = ServiceFolders(folder)
        self._journal = RequestJournal(self._folders.journal)
        self._engine = EngineThread(engine)
        assert engine.runner.bank is not None
        places = engine.runner.bank.limits.slots
        self._sampling = SamplingQueue(
            self._engine, engine.cfg, limits.fair_share(), self._read_adapter, places, limits.samples
        )
        self.samplers = OpenSamplers(self._sampling, self._folders, self._journal)
        self._tasks = TrainingTasks(base.name, slots, self._folders, self._journal, self.samplers, limits)
        self._restore()
        self._engine.start()
        self._tasks.scheduler.start()

    def submit(self, tenant: str, model: str, seq: int, request: Request) -> Future[Any]:
        """Accept a request of a model; one that changes it is on disk when this returns.

        Requests of a model are numbered by `seq` without gaps, its creation is 0. They may arrive in any order, and run
        in the order of their numbers, each once: a repeat gets the future of the first one, also after the service was
        killed and started again. What is wrong with an accepted request stands in its future.

        Raises:
            UnknownId: the tenant has no such model, or no saved state to create it of.
            ServiceBusy: too many requests are without an answer; nothing was accepted.
            ServiceError: all slots are taken, the answer is not kept any more, or the disk takes nothing.
        """
        return self._tasks.submit(tenant, model, seq, request)

    def unload(self, tenant: str, model: str) -> Future[Any]:
        """Give a model's slot back after the requests that were accepted; saved states stay."""
        return self._tasks.end(tenant, model, None)

    def end_session(self, tenant: str, session: str) -> list[Future[Any]]:
        """Save each model of a session under the name `session-end`, unload it, and close the samplers."""
        self.samplers.close(tenant, session)
        own = [model for model in self.models(tenant) if session_of(model) == session]
        return [self._tasks.end(tenant, model, _END) for model in own]

    def recall(self, tenant: str, owner: str, seq: int) -> Future[Outcome] | None:
        """Return the future of an accepted request, a sample's not after a kill; None: there is none."""
        found: Any = self._tasks.scheduler.recall(tenant, owner, seq) or self.samplers.recall(tenant, owner, seq)
        return found

    def models(self, tenant: str) -> dict[str, ModelQueue]:
        """Return the models of a tenant that have a slot."""
        return self._tasks.scheduler.every(tenant)

    def saved(self, tenant: str) -> Sequence[SavedFacts]:
        """Return the saved states of a tenant, the newest first."""
        facts: list[SavedFacts] = []
        for path, file in self._folders.every_saved(tenant):
            try:
                stat, spec = file.stat(), read_state(file)[0].spec
            except FileNotFoundError:
                continue  # deleted by another request
            facts.append(SavedFacts(str(path), path.model, path.kind, spec, stat.st_size, stat.st_mtime))
        return sorted(facts, key=lambda one: -one.created)

    def delete_saved(self, tenant: str, path: str) -> None:
        """Delete a saved state; samplers and models that use it keep it."""
        file = self._folders.saved(tenant, StatePath.of(path))
        self._journal.flush()  # the save that wrote it is not done again
        try:
            file.unlink()
        except FileNotFoundError:
            raise UnknownId("path", path) from None

    def sessions(self) -> Sequence[tuple[str, str]]:
        """Return (tenant, session) of every session that has models or samplers, as they are after a restart, too."""
        models = {(entry.tenant, session_of(model)) for model, entry in self._tasks.scheduler.every().items()}
        return sorted(models | self.samplers.sessions())

    def warm(self) -> None:
        """Compile what passes and steps need, as long as nobody asks for anything."""
        self._tasks.scheduler.when_idle(self.slots.compilations())

    def failure(self) -> str | None:
        """Return which thread of the service has ended, None while both run."""
        threads = {"generation": self._engine.alive, "training": self._tasks.scheduler.alive}
        return next((f"the thread of {name} has ended" for name, alive in threads.items() if not alive), None)

    def close(self) -> None:
        """Stop taking requests, and end what runs; what waits is done after the next start."""
        for part in (self._sampling, self._tasks.scheduler, self._engine, self._journal, self._folders):
            part.close()

    def _read_adapter(self, name: str) -> Adapter:
        return read_state(self._folders.adapter(name), base=self.base.name)[0].adapter(self.slots.limits.alpha)

    def _restore(self) -> None:
        records = self._journal.take_found()
        gone = {one.fields["model"]: place for place, one in enumerate(records) if one.fields["kind"] == "gone"}
        left = [one for place, one in enumerate(records) if place > gone.get(one.fields.get("model", ""), -1)]
        self.samplers.restore(left)
        self._tasks.restore(left)
        # Records of a model that is gone are dropped before another has its id.
        places = iter(range(len(records)))
        self._journal.compact(
            lambda one: next(places) > gone.get(one.fields.get("model", ""), -1) and self._tasks.needs(one)
        )
