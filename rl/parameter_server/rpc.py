"""Holders and the directory over the wire: what a request says, and the proxies that look like the real ones."""

import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from rl.parameter_server.digest import as_bytes
from rl.parameter_server.directory import Directory
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.index_ranges import Box, shape_of
from rl.parameter_server.manifest import Manifest, Seal, as_box, manifest_from_text, seal_from_text, to_text
from rl.parameter_server.store.memory import MEMORY
from rl.parameter_server.store.shard_server import Answer, Holder, Pushed, ReadOptions, Wanted
from rl.parameter_server.transport.wire import Body, Client, Endpoint

type Reply = dict[str, Any] | tuple[dict[str, Any], Sequence[Any]]
type Handle = Callable[[str, dict[str, Any], Body], Reply]

_ENCODE_SECONDS = 60.0  # that a holder may take over what one request asks for
_SPILL_SECONDS = 3600.0  # that writing a version to a bucket, or reading it, may take
_PLAIN = (
    *("open", "outcome", "rewind", "latest", "oldest", "versions", "newer"),
    *("grant", "done", "failed", "forget"),
)


def serve(holder: Holder, directory: Directory | None = None) -> Handle:
    """The requests that a holder answers, and the directory if it lives here."""

    def handle(operation: str, fields: dict[str, Any], body: Body) -> Reply:
        if (answer := _OPERATIONS.get(operation)) is not None:
            return answer(holder, fields, body)
        if operation in _PLAIN_OF_HOLDER:
            return {"result": getattr(holder, operation)(**fields)}
        if directory is not None and operation in _PLAIN:
            return {"result": getattr(directory, operation)(**fields)}
        if directory is not None and operation == "seal":
            return {"result": directory.seal(seal_from_text(fields["seal"]))}
        if directory is not None and operation == "manifest":
            return {"result": to_text(directory.manifest(**fields))}
        raise WeightsError(f"unknown operation {operation!r}")

    return handle


class RemoteDirectory:
    """A `Directory` elsewhere; its methods, but for those of other types than JSON's, are taken as they are."""

    def __init__(self, client: Client):
        self._client = client

    def seal(self, seal: Seal) -> bool:
        return self._call("seal", seal=to_text(seal))

    def manifest(self, version: int, timeout: float = 0.0) -> Manifest:
        return manifest_from_text(self._call("manifest", version=version, timeout=timeout))

    def open(self, version: int, pusher: str, processes: int) -> int:
        return self._call("open", version=version, pusher=pusher, processes=processes)

    def outcome(self, key: int, timeout: float = 0.0) -> bool | list[int]:
        return self._call("outcome", key=key, timeout=timeout)

    def rewind(self, version: int) -> None:
        self._call("rewind", version=version)

    def latest(self) -> int:
        return self._call("latest")

    def oldest(self) -> int:
        return self._call("oldest")

    def versions(self) -> list[int]:
        return self._call("versions")

    def newer(self, version: int, timeout: float = 0.0) -> int:
        return self._call("newer", version=version, timeout=timeout)

    def grant(
        self, worker: str, endpoint: str, share: str, version: int, timeout: float = 0.0
    ) -> tuple[int, str | None] | None:
        what = {"worker": worker, "endpoint": endpoint, "share": share, "version": version}
        granted = self._call("grant", timeout=timeout, **what)
        return None if granted is None else (granted[0], granted[1])

    def done(self, grant: int, serves: bool) -> None:
        self._call("done", grant=grant, serves=serves)

    def failed(self, grant: int, source_is_dead: bool) -> None:
        self._call("failed", grant=grant, source_is_dead=source_is_dead)

    def forget(self, worker: str) -> None:
        self._call("forget", worker=worker)

    def _call(self, operation: str, **fields: Any) -> Any:
        reply, _ = self._client.call(operation, fields, timeout=fields.get("timeout", 0.0))
        return reply["result"]


class RemoteHolder:
    """A `Holder` elsewhere."""

    def __init__(self, client: Client):
        self._client = client

    def incarnation(self) -> str:
        return self._client.call("incarnation", {})[0]["result"]

    def host(self) -> str:
        return self._client.call("host", {})[0]["result"]

    def keep(self, keys: Collection[int]) -> None:
        self._client.call("keep", {"keys": list(keys)})

    def spill(self, key: int, version: int, manifest: str) -> None:
        fields = {"key": key, "version": version, "manifest": manifest}
        self._client.call("spill", fields, timeout=_SPILL_SECONDS)

    def recall(self, version: int, key: int) -> str | None:
        return self._client.call("recall", {"version": version, "key": key}, timeout=_SPILL_SECONDS)[0]["result"]

    def forget_spilled(self, after: int) -> None:
        self._client.call("forget_spilled", {"after": after}, timeout=_SPILL_SECONDS)

    def write(self, key: int, pieces: Sequence[Pushed]) -> None:
        entries = [(tensor, box, array.dtype.name, digest) for tensor, box, array, digest in pieces]
        buffers = [memoryview(as_bytes(array)) for _, _, array, _ in pieces]
        nbytes = sum(array.nbytes for _, _, array, _ in pieces)
        self._client.call("write", {"key": key, "pieces": entries}, buffers, timeout=_seconds(nbytes))

    def adopt(self, key: int, segment: str, pieces: Sequence[tuple[str, Box, str, int, str]]) -> None:
        fields = {"key": key, "segment": segment, "pieces": list(pieces)}
        end = max((offset for _, _, _, offset, _ in pieces), default=0)  # of the last piece: near enough
        self._client.call("adopt", fields, timeout=_seconds(end))

    def read(
        self, key: int, wanted: Sequence[Wanted], options: ReadOptions, targets: Sequence[np.ndarray | None] = ()
    ) -> list[Answer]:
        memory: list[np.ndarray] = []

        def into(fields: dict[str, Any], nbytes: int) -> list[memoryview]:
            del nbytes
            memory.clear()
            for index, answer in enumerate(fields["answers"]):
                target = targets[index] if targets and answer["codec"] == "raw" and answer["nbytes"] else None
                make = MEMORY.empty if answer["codec"] == "raw" else np.empty  # others are of a new size each time
                memory.append(make((answer["nbytes"],), np.uint8) if target is None else target)
            return [memoryview(part) for part in memory]

        fields = {"key": key, "wanted": list(wanted), "options": dataclasses.asdict(options)}
        reply, _ = self._client.call("read", fields, into=into, timeout=_ENCODE_SECONDS)
        return [
            Answer(a["codec"], a["digest"], data, None if a["location"] is None else tuple(a["location"]))
            for a, data in zip(reply["answers"], memory, strict=True)
        ]


def _seconds(nbytes: int) -> float:
    """That a busy machine may take to look at so many bytes."""
    return nbytes / 50e6


def _write(holder: Holder, fields: dict[str, Any], body: Body) -> Reply:
    pieces = []
    for tensor, bounds, dtype, digest in fields["pieces"]:
        array = MEMORY.empty(shape_of(box := as_box(bounds)), dtype)
        body.read_into(memoryview(as_bytes(array)))
        pieces.append((tensor, box, array, digest))
    holder.write(fields["key"], pieces)
    return {}


def _adopt(holder: Holder, fields: dict[str, Any], body: Body) -> Reply:
    del body
    pieces = [(tensor, as_box(box), dtype, offset, digest) for tensor, box, dtype, offset, digest in fields["pieces"]]
    holder.adopt(fields["key"], fields["segment"], pieces)
    return {}


def _read(holder: Holder, fields: dict[str, Any], body: Body) -> Reply:
    del body
    wanted = [(tensor, as_box(box)) for tensor, box in fields["wanted"]]
    answers = holder.read(fields["key"], wanted, ReadOptions(**fields["options"]))
    parts = [as_bytes(a.data) if isinstance(a.data, np.ndarray) else np.frombuffer(a.data, np.uint8) for a in answers]
    listed = [
        {"codec": a.codec, "digest": a.digest, "nbytes": part.nbytes, "location": a.location}
        for a, part in zip(answers, parts, strict=True)
    ]
    return {"answers": listed}, [memoryview(part) for part in parts]


_OPERATIONS: dict[str, Callable[[Holder, dict[str, Any], Body], Reply]] = {
    "write": _write,
    "adopt": _adopt,
    "read": _read,
}
_PLAIN_OF_HOLDER = ("incarnation", "host", "keep", "spill", "recall", "forget_spilled")


def endpoint_text(endpoint: Endpoint) -> str:
    """As the directory keeps it."""
    return json.dumps(dataclasses.asdict(endpoint))


def endpoint_from_text(text: str) -> Endpoint:
    """The inverse of `endpoint_text`."""
    return Endpoint(**json.loads(text))
