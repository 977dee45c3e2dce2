"""The inside of a service: training and sampling of adapters of one base, behind `ServiceVerbs`."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from axlearn_like.layers.wrappers.adapters import Adapter, Factors
from rl.controller.fair_share import FairShare
from rl.rollout.engine import RolloutEngine
from rl.serving.engine_thread import EngineThread
from rl.serving.service.durable.folders import ServiceFolders, StatePath
from rl.serving.service.durable.journal import JournalRecord, RequestJournal
from rl.serving.service.durable.records import OF_MODELS, make_record, pass_record
from rl.serving.service.durable.register import ModelEntry, ModelRegister
from rl.serving.service.messages import (
    AdamParams,
    Datum,
    LoraSpec,
    LossName,
    LossOutput,
    SampleOutput,
    SampleRequest,
    ServiceError,
)
from rl.serving.service.samplers import OpenSamplers, opened, session_of
from rl.serving.service.sampling import SamplingLimits, SamplingQueue
from rl.serving.service.saved import read_state
from rl.serving.service.scheduler import TrainLimits, TrainPass, TrainScheduler
from rl.serving.service.slots import TrainingSlots
from rl.serving.service.training_tasks import SnapshotLimits, TaskHooks, TrainingTasks
from rl.serving.service.verbs import (
    BaseFacts,
    ModelCreated,
    ModelFacts,
    ModelUnloaded,
    Outcome,
    SamplerOpened,
    SavedFacts,
    SavedKind,
    StateLoaded,
    StateSaved,
    StepDone,
    UnknownId,
)

_END = "session-end"  # name of what a session leaves behind


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits of a service."""

    sampling: SamplingLimits = SamplingLimits()
    training: TrainLimits = TrainLimits()
    snapshots: SnapshotLimits = SnapshotLimits()


class AdapterService:
    """`ServiceVerbs` on an engine and training slots that hold the same base. See the protocol for each verb.

    Attributes:
        slots: training slots, which only the service's own thread touches while it runs.
    """

    def __init__(
        self,
        base: BaseFacts,
        engine: RolloutEngine,
        slots: TrainingSlots,
        folder: Path,
        limits: ServiceLimits | None = None,
        weights: Mapping[str, float] | None = None,
    ):
        """Take over what a service before this one has left in the folder, and start both threads.

        Args:
            base: the base.
            engine: has the base's weights, and room for adapters.
            slots: empty.
            folder: folder of the service's state; no other process may use it.
            limits: limits of tenants, and of what is kept for a restart.
            weights: shares of tenants, 1 if not given.

        Raises:
            JournalDamaged: what was accepted cannot be read.
        """
        limits = limits or ServiceLimits()
        self._base, self.slots = base, slots
        self._folders = ServiceFolders(folder)
        self._journal = RequestJournal(self._folders.journal)
        self._engine = EngineThread(engine)
        assert engine.runner.bank is not None
        places = engine.runner.bank.limits.slots
        self._sampling = SamplingQueue(
            self._engine, engine.cfg, FairShare(weights), self._read_adapter, places, limits.sampling
        )
        self._samplers = OpenSamplers(self._sampling, self._folders, self._journal)
        self._tasks = TrainingTasks(base.name, slots, self._folders, self._journal, limits.snapshots)
        self._scheduler = TrainScheduler(self._tasks.passes, FairShare(weights), limits.training)
        self._models = ModelRegister(self._journal, self._scheduler, self._tasks.work, slots.limits.slots)
        self._tasks.hooks = TaskHooks(
            self._models.forget_before, self._removed, self._samplers.wanted, self._samplers.opened, self._needs
        )
        self._restore()
        self._engine.start()
        self._scheduler.start()

    @property
    def base(self) -> BaseFacts:
        """The base of all adapters."""
        return self._base

    @property
    def engine(self) -> EngineThread:
        """The engine's thread, for other endpoints beside this one."""
        return self._engine

    # ---- training

    def create_model(self, tenant: str, model: str, spec: LoraSpec) -> Future[ModelCreated]:
        """Give a model a slot."""
        return self._create("create", ModelEntry(tenant, time.time(), spec), model)

    def create_from_saved(self, tenant: str, model: str, path: str, optimizer: bool) -> Future[StateLoaded]:
        """Give a model a slot with a saved state."""
        if (known := self._models.recall(tenant, model, 0)) is not None:
            return known
        file = self._folders.saved(tenant, StatePath.of(path))
        if not file.exists():
            raise UnknownId("path", path)
        entry = ModelEntry(tenant, time.time(), read_state(file)[0].spec)
        return self._create("create_from", entry, model, path=path, optimizer=optimizer)

    def forward_backward(
        self,
        tenant: str,
        model: str,
        seq: int,
        rows: Sequence[Datum],
        loss: LossName,
        config: Mapping[str, float],
        forward_only: bool,
    ) -> Future[LossOutput]:
        """Add the gradient of a loss over rows to the model's."""
        work = TrainPass(model, tuple(rows), loss, dict(config), forward_only)
        return self._models.accept(tenant, model, seq, pass_record(tenant, seq, work))

    def optim_step(self, tenant: str, model: str, seq: int, adam: AdamParams) -> Future[StepDone]:
        """Step by the gradients since the last step."""
        return self._accept("step", tenant, model, seq, adam=asdict(adam))

    def save_weights(self, tenant: str, model: str, seq: int, name: str, overwrite: bool = False) -> Future[StateSaved]:
        """Save weights and optimizer state."""
        return self._save("weights", tenant, model, seq, name, overwrite)

    def save_weights_for_sampler(
        self, tenant: str, model: str, seq: int, name: str, overwrite: bool = False
    ) -> Future[StateSaved]:
        """Save weights for sampling."""
        return self._save("sampler_weights", tenant, model, seq, name, overwrite)

    def load_weights(self, tenant: str, model: str, seq: int, path: str, optimizer: bool) -> Future[StateLoaded]:
        """Continue from a saved state."""
        return self._accept("load", tenant, model, seq, path=path, optimizer=optimizer)

    def sampler_of_model(self, tenant: str, model: str, seq: int, sampler: str) -> Future[SamplerOpened]:
        """Open a sampler of the weights that the model has at this number."""
        return self._accept("sampler_of", tenant, model, seq, sampler=sampler)

    def refuse(self, tenant: str, model: str, seq: int, error: ServiceError) -> Future[Outcome]:
        """Note that this number was spent."""
        return self._accept("refuse", tenant, model, seq, error=str(error), category=error.category)

    def unload_model(self, tenant: str, model: str) -> Future[ModelUnloaded]:
        """Give the model's slot back."""
        return self._end(tenant, model, None)

    def end_session(self, tenant: str, session: str) -> Future[None]:
        """Save and unload the models of a session, and close its samplers."""
        self._samplers.close(tenant, session)
        ends: list[Future[ModelUnloaded]] = []
        for model, entry in self._models.every().items():
            if entry.tenant == tenant and session_of(model) == session:
                ends.append(self._end(tenant, model, _END))
        return _joined(ends)

    def recall(self, tenant: str, owner: str, seq: int) -> Future[Outcome] | None:
        """Return the future of an accepted request."""
        found: Any = self._models.recall(tenant, owner, seq) or self._samplers.recall(tenant, owner, seq)
        return found

    # ---- sampling

    def open_sampler(self, tenant: str, sampler: str, path: str | None) -> Future[SamplerOpened]:
        """Open a sampler of saved weights, or of the base."""
        self._samplers.open(tenant, sampler, path)
        return opened(sampler)

    def sampler_path(self, tenant: str, sampler: str) -> str | None:
        """Return the path of an open sampler's weights."""
        return self._samplers.path(tenant, sampler)

    def sample(self, tenant: str, sampler: str, seq: int, request: SampleRequest) -> Future[SampleOutput]:
        """Draw samples."""
        return self._samplers.sample(tenant, sampler, seq, request)

    # ---- lists

    def models(self, tenant: str) -> Sequence[ModelFacts]:
        """Return the models of a tenant that have a slot."""
        found = [(model, one) for model, one in self._models.every().items() if one.tenant == tenant]
        return [ModelFacts(model, one.spec, one.created) for model, one in found]

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
        """Return (tenant, session) of every session that has models or samplers."""
        models = {(entry.tenant, session_of(model)) for model, entry in self._models.every().items()}
        return sorted(models | self._samplers.sessions())

    def stats(self) -> dict[str, float]:
        """Return counts of models, calls of training, and of the sampling queue."""
        return {"models": len(self._models.every()), "train_calls": self._scheduler.calls, **self._sampling.stats()}

    def close(self) -> None:
        """Stop taking requests, and end what runs; what waits is done after the next start."""
        self._sampling.close()
        self._scheduler.close()
        self._engine.close()
        self._journal.close()
        self._folders.close()

    # ---- inside

    def _accept(self, kind: Any, tenant: str, model: str, seq: int, **fields: Any) -> Future[Any]:
        return self._models.accept(tenant, model, seq, make_record(kind, tenant=tenant, model=model, seq=seq, **fields))

    def _save(
        self, saved_kind: SavedKind, tenant: str, model: str, seq: int, name: str, overwrite: bool
    ) -> Future[StateSaved]:
        return self._accept("save", tenant, model, seq, saved_kind=saved_kind, name=name, overwrite=overwrite)

    def _create(self, kind: Any, entry: ModelEntry, model: str, **fields: Any) -> Future[Any]:
        known = {"tenant": entry.tenant, "created": entry.created, "spec": asdict(entry.spec)}
        record = make_record(kind, model=model, seq=0, **known, **fields)
        return self._models.create(model, entry, record)

    def _end(self, tenant: str, model: str, name: str | None) -> Future[ModelUnloaded]:
        def make(after: int) -> tuple[JournalRecord, Any]:
            record = make_record("end", tenant=tenant, model=model, after=after, name=name)
            return record, lambda: self._tasks.end(tenant, model, after, name)

        return self._models.end(tenant, model, make)

    def _read_adapter(self, name: str) -> Adapter:
        state, _ = read_state(self._folders.adapter(name), base=self._base.name)
        scale = np.float32(self.slots.scale(state.spec))
        return Adapter({path: Factors(a, b * scale) for path, (a, b) in state.factors.items()})

    def _removed(self, model: str) -> None:
        """Take a model that has no slot from the lists, in the thread that trains."""
        if self._models.remove(model):  # creation failed: what waits behind it fails, too
            self._scheduler.finish(model, 0, lambda: None, Future())

    def _needs(self, record: JournalRecord) -> bool:
        of_sampler = record.fields["kind"] in ("sampler", "closed")
        return self._samplers.needs(record) if of_sampler else self._models.needs(record)

    def _restore(self) -> None:
        """Give models and samplers back, and run again what was accepted since the snapshots."""
        records = self._journal.take_found()
        gone = {one.fields["model"]: place for place, one in enumerate(records) if one.fields["kind"] == "gone"}
        left = [one for place, one in enumerate(records) if place > gone.get(one.fields.get("model", ""), -1)]
        self._samplers.restore(left)
        by_model: dict[str, list[JournalRecord]] = {}
        for record in left:
            if "model" in record.fields:
                by_model.setdefault(record.fields["model"], []).append(record)
        self._folders.keep_models(by_model)
        for model, own in by_model.items():
            self._restore_model(model, own)
        # Records of a model that is gone are dropped before another has its id.
        places = iter(range(len(records)))
        self._journal.compact(lambda one: next(places) > gone.get(one.fields.get("model", ""), -1) and self._needs(one))

    def _restore_model(self, model: str, records: Sequence[JournalRecord]) -> None:
        created = next(one.fields for one in records if one.fields.get("seq") == 0)
        entry = ModelEntry(created["tenant"], created["created"], LoraSpec(**created["spec"]))
        first = self._tasks.begin(model)
        end = next((one.fields for one in records if one.fields["kind"] == "end"), None)
        most = float("inf") if end is None else end["after"]
        self._tasks.recorded([one for one in records if one.fields["kind"] == "outcome"])
        requests = [one for one in records if one.fields["kind"] in OF_MODELS and first <= one.fields["seq"] <= most]
        self._models.restore(model, entry, requests, first)
        if end is not None:
            entry.ending = Future()
            work = partial(self._tasks.end, entry.tenant, model, end["after"], end["name"])
            self._scheduler.finish(model, end["after"], work, entry.ending)


def _joined(futures: Sequence[Future[Any]]) -> Future[None]:
    """Return a future that has its result, or the first error, when all others have theirs."""
    joined: Future[None] = Future()
    left = [len(futures)]
    lock = threading.Lock()

    def count(_: Any) -> None:
        with lock:
            left[0] -= 1
            if left[0] > 0:
                return
        errors = [error for one in futures if (error := one.exception()) is not None]
        if errors:
            joined.set_exception(errors[0])
        else:
            joined.set_result(None)

    for future in futures:
        future.add_done_callback(count)
    if not futures:
        joined.set_result(None)
    return joined
