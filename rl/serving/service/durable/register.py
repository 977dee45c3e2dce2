"""Models of a service and the requests that were accepted for them: each is on disk once, and run once."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rl.serving.service.durable.journal import JournalRecord, RequestJournal
from rl.serving.service.messages import LoraSpec, ServiceError, UnknownId
from rl.serving.service.scheduler import TrainScheduler, Work

_GONE = 256  # models whose answers are kept after their end


@dataclass(slots=True)
class ModelEntry:
    """A model that has a slot, or is about to have one.

    Attributes:
        created: seconds since the epoch.
        spec: description of the adapter.
        answers: futures of requests by number.
        kept_from: the first number whose answer is kept.
        ending: future of its end.
    """

    tenant: str
    created: float
    spec: LoraSpec
    answers: dict[int, Future[Any]] = field(default_factory=dict)
    kept_from: int = 0
    ending: Future[Any] | None = None


class ModelRegister:
    """Models by id. Any thread may call its methods."""

    def __init__(
        self, journal: RequestJournal, scheduler: TrainScheduler, work: Callable[[JournalRecord], Work], slots: int
    ):
        """Begin without models.

        Args:
            journal: the log of accepted requests.
            scheduler: runs them.
            work: returns what a record asks for.
            slots: models at the same time.
        """
        self._journal, self._scheduler, self._work, self._slots = journal, scheduler, work, slots
        self._lock = threading.RLock()
        self._models: dict[str, ModelEntry] = {}
        self._gone: dict[str, ModelEntry] = {}

    def open(self, model: str, entry: ModelEntry) -> None:
        """Take a new model, whose creation is the next request; no effect on one that is there.

        Raises:
            UnknownId: another tenant has it.
            ServiceError: all slots are taken.
        """
        with self._lock:
            if model in self._models:
                self.entry(entry.tenant, model)
                return
            if len(self._models) >= self._slots:
                raise ServiceError(f"all {self._slots} slots are taken; unload a model, or try again later")
            self._gone.pop(model, None)
            self._models[model] = entry
            self._scheduler.open(entry.tenant, model)

    def accept(self, record: JournalRecord) -> Future[Any]:
        """Put a request on disk and have it run; returns its future, for a repeat that of the first one.

        Raises:
            UnknownId: the tenant has no such model.
            ServiceBusy: it has too many requests without an answer.
            ServiceError: the answer of this number is not kept any more, or the disk does not take it.
        """
        model, seq = record.fields["model"], record.fields["seq"]
        with self._lock:
            entry = self.entry(record.fields["tenant"], model)
            if (known := entry.answers.get(seq)) is None:
                if entry.ending is not None:
                    raise UnknownId("model", model)
                if seq < entry.kept_from:
                    raise ServiceError(f"{model}: request {seq} was run long ago, and its answer is not kept any more")
                if seq:
                    self._scheduler.check(model, seq)
                future = entry.answers[seq] = Future()
        if known is not None:
            self._journal.flush()  # the first one may be on its way to the disk
            return known
        try:
            self._journal.append(record)
        except OSError as error:
            failed = ServiceError(str(error), "server")
            with self._lock:
                del entry.answers[seq]
                if not seq:
                    self._models.pop(model, None)
            future.set_exception(failed)
            raise failed from error
        self._scheduler.add(model, seq, self._work(record), future)
        return future

    def end(
        self, tenant: str, model: str, make: Callable[[int], tuple[JournalRecord, Callable[[], Any]]]
    ) -> Future[Any]:
        """Accept the end of a model behind its requests so far; `make` gives record and work by the last number."""
        with self._lock:
            entry = self.entry(tenant, model)
            if entry.ending is not None:
                return entry.ending
            ending = entry.ending = Future()
            after = self._scheduler.contiguous(model)
        record, work = make(after)
        try:
            self._journal.append(record)
        except OSError as error:
            entry.ending = None
            raise ServiceError(str(error), "server") from error
        self._scheduler.finish(model, after, work, ending)
        return ending

    def restore(self, model: str, entry: ModelEntry, records: Iterable[JournalRecord]) -> None:
        """Take a model over from a service that was killed; `records` are its requests from `kept_from` on."""
        self._models[model] = entry
        self._scheduler.open(entry.tenant, model, entry.kept_from)
        for record in records:
            seq = record.fields["seq"]
            entry.answers[seq] = Future()
            self._scheduler.add(model, seq, self._work(record), entry.answers[seq])

    def entry(self, tenant: str, model: str) -> ModelEntry:
        """Return a model of a tenant (UnknownId)."""
        with self._lock:
            entry = self._models.get(model)
            if entry is None or entry.tenant != tenant:
                raise UnknownId("model", model)
            return entry

    def every(self, tenant: str | None = None) -> dict[str, ModelEntry]:
        """Return all models, or those of a tenant."""
        with self._lock:
            return {name: one for name, one in self._models.items() if tenant in (None, one.tenant)}

    def recall(self, tenant: str, model: str, seq: int) -> Future[Any] | None:
        """Return the future of a request; None: it is not there, or not any more."""
        with self._lock:
            entry = self._models.get(model) or self._gone.get(model)
            return entry.answers.get(seq) if entry is not None and entry.tenant == tenant else None

    def forget_before(self, model: str, seq: int) -> None:
        """Drop the answers of smaller numbers, which no replay would give again."""
        with self._lock:
            entry = self._models[model]
            entry.kept_from = max(entry.kept_from, seq)
            for number in [number for number in entry.answers if number < seq]:
                del entry.answers[number]

    def remove(self, model: str) -> None:
        """Drop a model that has no slot any more; its answers stay for a while, and what waits behind it fails."""
        with self._lock:
            entry = self._gone[model] = self._models.pop(model)
            while len(self._gone) > _GONE:
                del self._gone[next(iter(self._gone))]
        if entry.ending is None:  # creation has failed
            self._scheduler.finish(model, 0, lambda: None, Future())

    def needs(self, record: JournalRecord) -> bool:
        """Return True if a replay would need this record of a model."""
        with self._lock:
            entry = self._models.get(record.fields.get("model", ""))
            seq = record.fields.get("seq")
            return entry is not None and (not seq or seq >= entry.kept_from)
