"""Models of a service: what they ask for, as work on their slots and files, and how they come back after a kill.

The state of a model behind a request is written every so many steps (a snapshot). A service that was killed begins each
model at its last but one snapshot, so that answers since then can be given again, and runs what was accepted since.
What a request takes from files that others may change is kept for its second run: a state that it loads by a second
name of the file, and what it refuses by a record.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from rl.controller.fair_share import FairShare, Quota
from rl.serving.service.durable.folders import ServiceFolders, StatePath, link_file
from rl.serving.service.durable.journal import JournalRecord, RequestJournal
from rl.serving.service.durable.records import REQUESTS, make_record, recorded_request, request_record
from rl.serving.service.messages import (
    AdamParams,
    CreateModel,
    Json,
    LoadState,
    LossOutput,
    OpenSampler,
    Refusal,
    Request,
    SaveState,
    ServiceError,
    TrainPass,
    UnknownId,
)
from rl.serving.service.queues import ModelQueue, Work
from rl.serving.service.samplers import OpenSamplers
from rl.serving.service.saved import read_state, write_state
from rl.serving.service.scheduler import TrainScheduler
from rl.serving.service.slots import TrainingSlots


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits of a service."""

    samples: int = 2048  # requests of a tenant for samples without an answer
    training: int = 1024  # requests of a tenant for training without an answer
    rows: int = 32  # rows of a training call, and of a part of a larger pass
    steps: int = 16  # optimizer steps from one snapshot of a model to the next
    journal: int = 256 << 20  # bytes by which the journal grows until what no replay needs is dropped
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)  # weights of tenants, 1 if not given
    # Limits of tenants' tokens, for training and for sampling each; others have none
    quotas: Mapping[str, Quota] = dataclasses.field(default_factory=dict)

    def fair_share(self) -> FairShare:
        """Return the order of tenants, for one resource."""
        return FairShare(self.shares, quotas=self.quotas)


class TrainingTasks:
    """Requests of models, from their acceptance to their answers.

    Attributes:
        scheduler: holds the models and their answers, and runs the requests in its thread.
    """

    def __init__(
        self,
        base: str,
        slots: TrainingSlots,
        folders: ServiceFolders,
        journal: RequestJournal,
        samplers: OpenSamplers,
        limits: ServiceLimits,
    ):
        """Begin with the slots and files of a service of this base."""
        self._base, self._slots, self._folders, self._journal, self._samplers = base, slots, folders, journal, samplers
        self._limits = limits
        room = {"waiting": limits.training, "rows": limits.rows, "slots": slots.limits.slots}
        self.scheduler = TrainScheduler(self._passes, limits.fair_share(), **room)
        self._outcomes: dict[tuple[str, int], JournalRecord] = {}  # results before a kill of work with files
        self._with_gradient: set[str] = set()
        self._steps: dict[str, int] = {}  # steps since the last snapshot

    # ---- in any thread

    def submit(self, tenant: str, model: str, seq: int, request: Request) -> Future[Any]:
        """Accept a request, see `AdapterService.submit`."""
        if isinstance(request, CreateModel):
            if request.path is not None and (known := self.scheduler.recall(tenant, model, 0)) is not None:
                return known
            if request.path is not None:
                request = dataclasses.replace(request, spec=read_state(self._saved(tenant, request.path))[0].spec)
            assert request.spec is not None
            self.scheduler.open(model, ModelQueue(tenant, request.created, request.spec))
        elif isinstance(request, TrainPass | AdamParams):
            try:
                self._slots.check(request)
            except ServiceError as error:
                request = Refusal(str(error))
        future, new = self.scheduler.reserve(tenant, model, seq)
        if not new:
            self._journal.flush()  # the first one may be on its way to the disk
            return future
        record = request_record(tenant, model, seq, request)
        try:
            self._journal.append(record)
        except OSError as error:
            failed = ServiceError(str(error), "server")
            self.scheduler.release(model, seq, failed)
            raise failed from error
        return self.scheduler.add(model, seq, self._work(record))

    def end(self, tenant: str, model: str, name: str | None) -> Future[Any]:
        """Give the model's slot back after what was accepted; `name`: save the state under this name first."""
        ending, after = self.scheduler.reserve_end(tenant, model)
        if after is not None:
            record = make_record("end", tenant=tenant, model=model, after=after, name=name)
            try:
                self._journal.append(record)
            except OSError as error:
                self.scheduler.find(tenant, model).ending = None
                raise ServiceError(str(error), "server") from error
            self.scheduler.finish(model, after, partial(self._end, record), ending)
        return ending

    def restore(self, records: Sequence[JournalRecord]) -> None:
        """Give models their slots back, and have run again what was accepted since the snapshots."""
        by_model: dict[str, list[JournalRecord]] = {}
        for record in records:
            if "model" in record.fields:
                by_model.setdefault(record.fields["model"], []).append(record)
        self._folders.keep_models(by_model)
        for model, own in by_model.items():
            numbers, first = self._folders.snapshots(model), 0
            if len(numbers) > 1:
                first = numbers[-2] + 1
                self._slots.restore(model, read_state(self._folders.snapshot(model, numbers[-2]))[0])
            end = next((one for one in own if one.fields["kind"] == "end"), None)
            most = float("inf") if end is None else end.fields["after"]
            self._outcomes |= {(model, one.fields["seq"]): one for one in own if one.fields["kind"] == "outcome"}
            created = next(one for one in own if one.fields.get("seq") == 0)
            asked = recorded_request(created)
            assert isinstance(asked, CreateModel) and asked.spec is not None
            queue = ModelQueue(created.fields["tenant"], asked.created, asked.spec, next=first, kept_from=first)
            self.scheduler.open(model, queue)
            for one in own:
                if one.fields["kind"] in REQUESTS and first <= one.fields["seq"] <= most:
                    self.scheduler.add(model, one.fields["seq"], self._work(one))
            if end is not None:
                self.scheduler.finish(model, end.fields["after"], partial(self._end, end), Future())

    def needs(self, record: JournalRecord) -> bool:
        """Return True if a replay would need this record."""
        queue = self.scheduler.every().get(record.fields.get("model", ""))
        seq = record.fields.get("seq")
        return self._samplers.needs(record) or (queue is not None and (not seq or seq >= queue.kept_from))

    def _saved(self, tenant: str, path: str) -> Path:
        file = self._folders.saved(tenant, StatePath.of(path))
        if not file.exists():
            raise UnknownId("path", path)
        return file

    def _work(self, record: JournalRecord) -> Work:
        request = recorded_request(record)
        return request if isinstance(request, TrainPass) else partial(self._run, record, request)

    # ---- in the thread that trains

    def _passes(self, passes: Sequence[TrainPass]) -> Sequence[LossOutput]:
        results = self._slots.forward_backward(passes)
        self._with_gradient |= {one.model for one in passes if not one.forward_only}
        return results

    def _run(self, record: JournalRecord, request: Request) -> Json:
        tenant, model, seq = (record.fields[name] for name in ("tenant", "model", "seq"))
        match request:
            case AdamParams():
                return self._step(model, seq, request)
            case OpenSampler(sampler):
                if self._samplers.wanted(sampler):
                    name = f"{model}@{seq}"
                    self._write(self._folders.adapter(name), model, seq, optimizer=False)
                    self._samplers.opened(tenant, sampler, name)
                return {"sampling_session_id": sampler}
            case Refusal(error, category):
                raise ServiceError(error, category)
            case CreateModel(spec, None) if spec is not None:
                try:
                    self._slots.create(model, spec)
                except ServiceError:
                    self._drop(model)
                    raise
                return {"type": "create_model", "model_id": model}
            case _:
                return self._once(record, request)

    def _step(self, model: str, seq: int, adam: AdamParams) -> Json:
        if model not in self._with_gradient:
            raise ServiceError("no gradient: optim_step comes after a forward_backward that succeeded")
        self._with_gradient.discard(model)
        metrics = self._slots.optim_step(model, adam)
        self._steps[model] = self._steps.get(model, 0) + 1
        if self._steps[model] >= self._limits.steps:
            self._snapshot(model, seq)
        return {"type": "optim_step", "metrics": metrics}

    def _once(self, record: JournalRecord, request: Request) -> Json:
        """Do work with files that others may change in the meantime: its outcome is recorded before anything else."""
        tenant, model, seq = (record.fields[name] for name in ("tenant", "model", "seq"))
        found = self._outcomes.pop((model, seq), None)
        if found is not None and "error" in found.fields:
            raise ServiceError(found.fields["error"], found.fields["category"])
        try:
            if not isinstance(request, SaveState):
                assert isinstance(request, LoadState | CreateModel) and request.path is not None
                self._load(tenant, model, seq, request.path, request.optimizer)
                return {"type": "load_weights", "path": request.path}
            path = StatePath(model, request.kind, request.name)
            if found is None:
                self._save(tenant, seq, path, request.overwrite)
                self._journal.append(make_record("outcome", model=model, seq=seq))
            return {"path": str(path)}
        except ServiceError as error:
            outcome = {"error": str(error), "category": error.category}
            self._journal.append(make_record("outcome", model=model, seq=seq, **outcome))
            if isinstance(request, CreateModel):
                self._drop(model)
            raise

    def _save(self, tenant: str, seq: int, path: StatePath, overwrite: bool) -> None:
        file = self._folders.saved(tenant, path)
        if file.exists() and not overwrite and read_state(file)[1]["seq"] != seq:
            raise ServiceError(f"{path} exists; expected another path, or a request with overwrite=True")
        self._write(file, path.model, seq, optimizer=path.kind == "weights")

    def _load(self, tenant: str, model: str, seq: int, path: str, optimizer: bool) -> None:
        own = self._folders.loaded(model, seq)
        if not own.exists():
            link_file(self._saved(tenant, path), own)
        state, _ = read_state(own, base=self._base)
        self._slots.restore(model, state, optimizer=optimizer)
        self._with_gradient.discard(model)
        if optimizer and state.gradients is not None:
            self._with_gradient.add(model)

    def _end(self, record: JournalRecord) -> Json:
        tenant, model, after, name = (record.fields[key] for key in ("tenant", "model", "after", "name"))
        if name is not None:
            self._write(self._folders.saved(tenant, StatePath(model, "weights", name)), model, after)
        self._slots.unload(model)
        self._drop(model)
        return {"type": "unload_model", "model_id": model}

    def _write(self, file: Path, model: str, seq: int, *, optimizer: bool = True) -> None:
        """Write a model's state behind request `seq`."""
        write_state(file, self._slots.state(model), {"seq": seq}, base=self._base, optimizer=optimizer)

    def _snapshot(self, model: str, seq: int) -> None:
        self._steps[model] = 0
        if not (file := self._folders.snapshot(model, seq)).exists():
            self._write(file, model, seq)
        numbers = self._folders.snapshots(model)
        if len(numbers) > 1:
            self._folders.remove_before(model, numbers[-2])
            self.scheduler.forget_before(model, numbers[-2] + 1)
            if self._journal.grown > self._limits.journal:
                self._journal.compact(self.needs)

    def _drop(self, model: str) -> None:
        self._journal.append(make_record("gone", model=model))
        self._folders.remove_model(model)
        self._steps.pop(model, None)
        self._with_gradient.discard(model)
        self.scheduler.remove(model)
