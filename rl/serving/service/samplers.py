"""Open samplers: names for weights to draw from, each with a file of its own that nobody replaces."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from rl.rollout.request import Request, RequestOutput
from rl.serving.service.durable.folders import ServiceFolders, StatePath, link_file
from rl.serving.service.durable.journal import JournalRecord, RequestJournal
from rl.serving.service.durable.records import make_record
from rl.serving.service.messages import ServiceError, UnknownId
from rl.serving.service.sampling import SamplingQueue, whole
from rl.serving.service.saved import read_state

_KEPT = 1024  # answers of a sampler that are kept


@dataclass(slots=True)
class SamplerEntry:
    """A sampler of a tenant."""

    tenant: str
    path: str | None  # place where its weights are saved; None: nowhere
    adapter: str | None  # name of its weights; None: the base
    answers: dict[int, Future[Any]] = field(default_factory=dict)  # futures of requests by number, the oldest first


class OpenSamplers:
    """Samplers by id. Any thread may call its methods."""

    def __init__(self, queue: SamplingQueue, folders: ServiceFolders, journal: RequestJournal):
        self._queue, self._folders, self._journal = queue, folders, journal
        self._lock = threading.RLock()
        self._open: dict[str, SamplerEntry] = {}
        self._closed: set[str] = set()

    def restore(self, records: Iterable[JournalRecord]) -> None:
        """Take over the samplers of a service that was killed, and remove the files of others."""
        for record in records:
            fields = record.fields
            if fields["kind"] == "sampler":
                self._open[fields["sampler"]] = SamplerEntry(fields["tenant"], fields["path"], fields["adapter"])
            elif fields["kind"] == "closed":
                self._open.pop(fields["sampler"], None)
                self._closed.add(fields["sampler"])
        kept = {self._folders.adapter(one.adapter) for one in self._open.values() if one.adapter}
        for file in self._folders.adapters.iterdir():
            if file not in kept:
                file.unlink()

    def open(self, tenant: str, sampler: str, path: str | None) -> None:
        """Open a sampler of saved weights, None: of the base; once, if asked again (UnknownId: nothing is there)."""
        with self._lock:
            if sampler in self._open:
                self._find(tenant, sampler)
                return
            adapter = None
            if path is not None:
                saved = StatePath.of(path)
                source = self._folders.saved(tenant, saved)
                if not source.exists():
                    raise UnknownId("path", path)
                adapter = f"{saved.model}@{read_state(source)[1]['seq']}"
                if not (own := self._folders.adapter(adapter)).exists():
                    link_file(source, own)
            self._add(sampler, SamplerEntry(tenant, path, adapter))
        try:
            self._journal.flush()
        except OSError as error:
            raise ServiceError(str(error), "server") from error

    def opened(self, tenant: str, sampler: str, adapter: str) -> None:
        """Open a sampler of weights that lie in a file now."""
        with self._lock:
            if sampler not in self._open:
                self._add(sampler, SamplerEntry(tenant, None, adapter))

    def wanted(self, sampler: str) -> bool:
        """Return False if a sampler was closed before its weights came."""
        with self._lock:
            return sampler not in self._closed

    def close(self, tenant: str, session: str) -> None:
        """Close the samplers of a session."""
        with self._lock:
            gone = [name for name, one in self._open.items() if one.tenant == tenant and session_of(name) == session]
            adapters = [self._open.pop(name).adapter for name in gone]
            used = Counter(one.adapter for one in self._open.values())
            for name in gone:
                self._closed.add(name)
                self._journal.append(make_record("closed", sampler=name), wait=False)
            for adapter in {adapter for adapter in adapters if adapter is not None and not used[adapter]}:
                self._queue.forget(adapter)
                self._folders.adapter(adapter).unlink(missing_ok=True)

    def sample(
        self, tenant: str, sampler: str, seq: int, request: Request, finish: Callable[[RequestOutput], Any] = whole
    ) -> Future[Any]:
        """Draw samples, see `SamplingQueue.sample`; a repeat of the number gets the future of the first request."""
        with self._lock:
            found = self._find(tenant, sampler)
            known = found.answers.get(seq)
            if known is not None and not known.cancelled():
                return known
            future = self._queue.sample(tenant, replace(request, adapter=found.adapter), finish)
            found.answers[seq] = future
            while len(found.answers) > _KEPT and (oldest := next(iter(found.answers.values()))).done():
                del oldest, found.answers[next(iter(found.answers))]
            return future

    def recall(self, tenant: str, sampler: str, seq: int) -> Future[Any] | None:
        """Return the future of a request; None: it is not there, or not any more."""
        with self._lock:
            found = self._open.get(sampler)
            return found.answers.get(seq) if found is not None and found.tenant == tenant else None

    def path(self, tenant: str, sampler: str) -> str | None:
        """Return where a sampler's weights are saved."""
        with self._lock:
            return self._find(tenant, sampler).path

    def sessions(self) -> set[tuple[str, str]]:
        """Return (tenant, session) of all samplers."""
        with self._lock:
            return {(one.tenant, session_of(name)) for name, one in self._open.items()}

    def needs(self, record: JournalRecord) -> bool:
        """Return True if the next start needs this record of a sampler."""
        with self._lock:
            return record.fields["kind"] == "sampler" and record.fields["sampler"] in self._open

    def _add(self, sampler: str, one: SamplerEntry) -> None:
        self._open[sampler] = one
        record = make_record("sampler", sampler=sampler, tenant=one.tenant, path=one.path, adapter=one.adapter)
        self._journal.append(record, wait=False)
        if one.adapter is not None:
            self._queue.prepare(one.adapter)

    def _find(self, tenant: str, sampler: str) -> SamplerEntry:
        found = self._open.get(sampler)
        if found is None or found.tenant != tenant:
            raise UnknownId("sampler", sampler)
        return found


def session_of(name: str) -> str:
    """Return the session of a model or sampler, `{session}:train:{n}` or `{session}:sample:{n}`."""
    return name.rsplit(":", 2)[0]
