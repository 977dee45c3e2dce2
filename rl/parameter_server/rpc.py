"""RPC of shard servers and directory: the request handler, and remote proxies with the same interface."""

import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from rl.parameter_server.directory import Directory
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.fingerprint import as_bytes
from rl.parameter_server.index_ranges import shape_of
from rl.parameter_server.manifest import Commit, Manifest, as_index_range, commit_from_text, manifest_from_text, to_text
from rl.parameter_server.store.buffer_pool import BUFFERS
from rl.parameter_server.store.pending_deltas import DeltaShard
from rl.parameter_server.store.shard_server import (
    LocalShardServer,
    ReadOptions,
    ReadReply,
    ShardData,
    ShardId,
    SharedShard,
)
from rl.parameter_server.transport.client import RpcClient
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.server import Body

type Reply = dict[str, Any] | tuple[dict[str, Any], Sequence[Any]]
type Handle = Callable[[str, dict[str, Any], Body], Reply]

_ENCODE_SECONDS = 60.0  # limit for a shard server to encode or decode one request
_OFFLOAD_SECONDS = 3600.0  # limit to write a version to a bucket, or to read it
_PLAIN = (
    *("open", "outcome", "pin", "rewind", "latest", "oldest", "versions", "newer"),
    *("grant", "done", "failed", "forget"),
)


def serve(shard_server: LocalShardServer, directory: Directory | None = None) -> Handle:
    """Return the handler of requests to a shard server, and to the directory if it lives here."""

    def handle(operation: str, fields: dict[str, Any], body: Body) -> Reply:
        if (answer := _OPERATIONS.get(operation)) is not None:
            return answer(shard_server, fields, body)
        if operation in _PLAIN_OF_HOLDER:
            return {"result": getattr(shard_server, operation)(**fields)}
        if directory is not None and operation in _PLAIN:
            return {"result": getattr(directory, operation)(**fields)}
        if directory is not None and operation == "commit":
            return {"result": directory.commit(commit_from_text(fields["commit"]))}
        if directory is not None and operation == "manifest":
            return {"result": to_text(directory.manifest(**fields))}
        raise WeightsError(f"unknown operation {operation!r}")

    return handle


class RemoteDirectory:
    """Proxy of a `Directory` in another process."""

    def __init__(self, client: RpcClient):
        self._client = client

    def commit(self, commit: Commit) -> bool:
        # The last one waits while shard servers drop what is no longer needed.
        reply, _ = self._client.call("commit", {"commit": to_text(commit)}, timeout=_ENCODE_SECONDS)
        return reply["result"]

    def manifest(self, version: int, timeout: float = 0.0) -> Manifest:
        return manifest_from_text(self._call("manifest", version=version, timeout=timeout))

    def open(self, version: int, pusher: str, processes: int) -> int:
        return self._call("open", version=version, pusher=pusher, processes=processes)

    def outcome(self, key: int, timeout: float = 0.0) -> bool | list[int]:
        return self._call("outcome", key=key, timeout=timeout)

    def rewind(self, version: int) -> None:
        self._call("rewind", version=version)

    def pin(self, version: int) -> None:
        self._call("pin", version=version)

    def latest(self) -> int:
        return self._call("latest")

    def oldest(self) -> int:
        return self._call("oldest")

    def versions(self) -> list[int]:
        return self._call("versions")

    def newer(self, version: int, timeout: float = 0.0) -> int:
        return self._call("newer", version=version, timeout=timeout)

    def grant(
        self, worker: str, endpoint: str, shard_set: str, version: int, timeout: float = 0.0
    ) -> tuple[int, str | None] | None:
        what = {"worker": worker, "endpoint": endpoint, "shard_set": shard_set, "version": version}
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


class RemoteShardServer:
    """Proxy of a `LocalShardServer` in another process."""

    def __init__(self, client: RpcClient):
        self._client = client

    def incarnation(self) -> str:
        return self._client.call("incarnation", {})[0]["result"]

    def host(self) -> str:
        return self._client.call("host", {})[0]["result"]

    def keys(self) -> list[int]:
        return self._client.call("keys", {})[0]["result"]

    def drop(self, keys: Collection[int]) -> None:
        self._client.call("drop", {"keys": list(keys)}, timeout=_ENCODE_SECONDS)

    def offload(self, key: int, version: int, manifest: str) -> None:
        fields = {"key": key, "version": version, "manifest": manifest}
        self._client.call("offload", fields, timeout=_OFFLOAD_SECONDS)

    def restore(self, version: int, key: int) -> str | None:
        return self._client.call("restore", {"version": version, "key": key}, timeout=_OFFLOAD_SECONDS)[0]["result"]

    def drop_offloaded(self, after: int) -> None:
        self._client.call("drop_offloaded", {"after": after}, timeout=_OFFLOAD_SECONDS)

    def write(self, key: int, shards: Sequence[ShardData]) -> None:
        entries = [(tensor, index_range, array.dtype.name, digest) for tensor, index_range, array, digest in shards]
        buffers = [memoryview(as_bytes(array)) for _, _, array, _ in shards]
        nbytes = sum(array.nbytes for _, _, array, _ in shards)
        self._client.call("write", {"key": key, "shards": entries}, buffers, timeout=_seconds(nbytes))

    def write_deltas(self, key: int, base: int, shards: Sequence[DeltaShard]) -> None:
        entries = [(*shard[:4], len(shard.blob)) for shard in shards]
        buffers = [memoryview(shard.blob) for shard in shards]
        seconds = max(_ENCODE_SECONDS, _seconds(sum(len(shard.blob) for shard in shards)))
        self._client.call("write_deltas", {"key": key, "base": base, "shards": entries}, buffers, timeout=seconds)

    def adopt(self, key: int, segment: str, shards: Sequence[SharedShard]) -> None:
        self._client.call("adopt", {"key": key, "segment": segment, "shards": list(shards)})

    def link(self, key: int, source: int, shards: Sequence[ShardId]) -> None:
        fields = {"key": key, "source": source, "shards": list(shards)}
        self._client.call("link", fields, timeout=_ENCODE_SECONDS)

    def read(
        self, key: int, wanted: Sequence[ShardId], options: ReadOptions, targets: Sequence[np.ndarray | None] = ()
    ) -> list[ReadReply]:
        memory: list[np.ndarray] = []

        def into(fields: dict[str, Any], nbytes: int) -> list[memoryview]:
            del nbytes
            memory.clear()
            for index, answer in enumerate(fields["answers"]):
                target = targets[index] if targets and answer["codec"] == "raw" and answer["nbytes"] else None
                make = BUFFERS.empty if answer["codec"] == "raw" else np.empty  # encoded sizes differ every time
                memory.append(make((answer["nbytes"],), np.uint8) if target is None else target)
            return [memoryview(part) for part in memory]

        fields = {"key": key, "wanted": list(wanted), "options": dataclasses.asdict(options)}
        reply, _ = self._client.call("read", fields, into=into, timeout=_ENCODE_SECONDS)
        return [
            ReadReply(a["codec"], a["digest"], data, None if a["location"] is None else tuple(a["location"]))
            for a, data in zip(reply["answers"], memory, strict=True)
        ]


def _seconds(nbytes: int) -> float:
    """Return the seconds that a busy machine may take to read so many bytes."""
    return nbytes / 50e6


def _write(shard_server: LocalShardServer, fields: dict[str, Any], body: Body) -> Reply:
    shards = []
    for tensor, bounds, dtype, digest in fields["shards"]:
        array = BUFFERS.empty(shape_of(index_range := as_index_range(bounds)), dtype)
        body.read_into(memoryview(as_bytes(array)))
        shards.append((tensor, index_range, array, digest))
    shard_server.write(fields["key"], shards)
    return {}


def _write_deltas(shard_server: LocalShardServer, fields: dict[str, Any], body: Body) -> Reply:
    shards = []
    for tensor, bounds, dtype, digest, nbytes in fields["shards"]:
        blob = bytearray(min(nbytes, body.nbytes))  # larger claims fail: too few bytes are left
        body.read_into(blob)
        shards.append(DeltaShard(tensor, as_index_range(bounds), dtype, digest, bytes(blob)))
    shard_server.write_deltas(fields["key"], fields["base"], shards)
    return {}


def _adopt(shard_server: LocalShardServer, fields: dict[str, Any], body: Body) -> Reply:
    del body
    shards = [
        (tensor, as_index_range(index_range), dtype, offset) for tensor, index_range, dtype, offset in fields["shards"]
    ]
    shard_server.adopt(fields["key"], fields["segment"], shards)
    return {}


def _link(shard_server: LocalShardServer, fields: dict[str, Any], body: Body) -> Reply:
    del body
    shards = [(tensor, as_index_range(index_range)) for tensor, index_range in fields["shards"]]
    shard_server.link(fields["key"], fields["source"], shards)
    return {}


def _read(shard_server: LocalShardServer, fields: dict[str, Any], body: Body) -> Reply:
    del body
    wanted = [(tensor, as_index_range(index_range)) for tensor, index_range in fields["wanted"]]
    answers = shard_server.read(fields["key"], wanted, ReadOptions(**fields["options"]))
    parts = [as_bytes(a.data) if isinstance(a.data, np.ndarray) else np.frombuffer(a.data, np.uint8) for a in answers]
    listed = [
        {"codec": a.codec, "digest": a.digest, "nbytes": part.nbytes, "location": a.location}
        for a, part in zip(answers, parts, strict=True)
    ]
    return {"answers": listed}, [memoryview(part) for part in parts]


_OPERATIONS: dict[str, Callable[[LocalShardServer, dict[str, Any], Body], Reply]] = {
    "write": _write,
    "write_deltas": _write_deltas,
    "adopt": _adopt,
    "link": _link,
    "read": _read,
}
_PLAIN_OF_HOLDER = ("incarnation", "host", "keys", "drop", "offload", "restore", "drop_offloaded")


def endpoint_text(endpoint: Endpoint) -> str:
    """Encode an endpoint for the directory."""
    return json.dumps(dataclasses.asdict(endpoint))


def endpoint_from_text(text: str) -> Endpoint:
    """The inverse of `endpoint_text`."""
    return Endpoint(**json.loads(text))
