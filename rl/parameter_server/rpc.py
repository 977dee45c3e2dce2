"""RPC of shard servers and directory: the request handler, and proxies whose method calls are requests."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from rl.parameter_server.directory import Directory
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.fingerprint import as_bytes
from rl.parameter_server.index_ranges import shape_of
from rl.parameter_server.manifest import Commit, Manifest, as_index_range, commit_from_text, manifest_from_text, to_text
from rl.parameter_server.store.buffer_pool import BUFFERS
from rl.parameter_server.store.page_depot import OPERATIONS as OF_DEPOT
from rl.parameter_server.store.page_depot import LocalPageDepot
from rl.parameter_server.store.pending_deltas import DeltaShard
from rl.parameter_server.store.shard_server import (
    LocalShardServer,
    ReadOptions,
    ReadReply,
    ShardData,
    ShardId,
    ShardServer,
)
from rl.parameter_server.transport.client import RpcClient
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.server import Body

type Reply = dict[str, Any] | tuple[dict[str, Any], Sequence[Any]]
type Handle = Callable[[str, dict[str, Any], Body], Reply]

_ENCODE_SECONDS = 60.0  # limit for a shard server to encode or decode one request
_OFFLOAD_SECONDS = 3600.0  # limit to write a version to a bucket, or to read it
# Limits of calls that may take long; others have their argument `timeout`, or none. The last commit of a version waits
# while shard servers drop what is no longer needed.
_SECONDS = {
    **dict.fromkeys(("commit", "drop", "link"), _ENCODE_SECONDS),
    **dict.fromkeys(("offload", "restore", "drop_offloaded"), _OFFLOAD_SECONDS),
}


def _methods(kind: type) -> dict[str, inspect.Signature]:
    """Return the signatures of the public methods of a class, by name."""
    functions = {name: value for name, value in vars(kind).items() if inspect.isfunction(value)}
    return {name: inspect.signature(function) for name, function in functions.items() if not name.startswith("_")}


_OF_DIRECTORY, _OF_SHARD_SERVER = _methods(Directory), _methods(ShardServer)


def serve(
    shard_server: LocalShardServer, directory: Directory | None = None, depot: LocalPageDepot | None = None
) -> Handle:
    """Return the handler of requests to a shard server, and to the directory and a depot if they live here."""

    def handle(operation: str, fields: dict[str, Any], body: Body) -> Reply:
        if (answer := _WITH_BYTES.get(operation)) is not None:
            return answer(shard_server, fields, body)
        if depot is not None and operation in OF_DEPOT:
            return depot.answer(operation, fields, body)
        if operation in _OF_SHARD_SERVER:
            if "shards" in fields:
                fields["shards"] = _with_tuples(fields["shards"])
            return {"result": getattr(shard_server, operation)(**fields)}
        if directory is not None and operation in _OF_DIRECTORY:
            if operation == "commit":
                fields["commit"] = commit_from_text(fields["commit"])
            result = getattr(directory, operation)(**fields)
            return {"result": to_text(result) if isinstance(result, Manifest) else result}
        raise WeightsError(f"unknown operation {operation!r}")

    return handle


def remote_directory(client: RpcClient) -> Directory:
    """Return the proxy of a directory in another process."""
    return cast(Directory, _Remote(client, _OF_DIRECTORY))


def remote_shard_server(client: RpcClient) -> ShardServer:
    """Return the proxy of a shard server in another process."""
    return cast(ShardServer, _RemoteShardServer(client, _OF_SHARD_SERVER))


class _Remote:
    """Proxy of an object in another process: each of its methods sends a request with the arguments by name."""

    def __init__(self, client: RpcClient, methods: Mapping[str, inspect.Signature]):
        self._client, self._methods = client, methods

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"no operation {name!r} of a remote object; there are {', '.join(self._methods)}")

        def call(*arguments: Any, **named: Any) -> Any:
            given = self._methods[name].bind(self, *arguments, **named).arguments
            del given["self"]
            fields: dict[str, Any] = {key: to_text(x) if isinstance(x, Commit) else x for key, x in given.items()}
            seconds: float = _SECONDS[name] if name in _SECONDS else given.get("timeout", 0.0)
            reply, _ = self._client.call(name, fields, timeout=seconds)
            return manifest_from_text(reply["result"]) if name == "manifest" else reply["result"]

        return call


class _RemoteShardServer(_Remote):
    """Proxy of a shard server; what has bytes goes from and to the memory of the caller."""

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

    def read(
        self, key: int, wanted: Sequence[ShardId], options: ReadOptions, targets: Sequence[np.ndarray | None] = ()
    ) -> list[ReadReply]:
        memory: list[np.ndarray] = []

        def into(fields: dict[str, Any], nbytes: int) -> list[memoryview]:
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
    for tensor, index_range, dtype, digest in _with_tuples(fields["shards"]):
        array = BUFFERS.empty(shape_of(index_range), dtype)
        body.read_into(memoryview(as_bytes(array)))
        shards.append((tensor, index_range, array, digest))
    shard_server.write(fields["key"], shards)
    return {}


def _write_deltas(shard_server: LocalShardServer, fields: dict[str, Any], body: Body) -> Reply:
    shards = []
    for tensor, index_range, dtype, digest, nbytes in _with_tuples(fields["shards"]):
        blob = bytearray(min(nbytes, body.nbytes))  # larger claims fail: too few bytes are left
        body.read_into(blob)
        shards.append(DeltaShard(tensor, index_range, dtype, digest, bytes(blob)))
    shard_server.write_deltas(fields["key"], fields["base"], shards)
    return {}


def _with_tuples(shards: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return shards that have been through JSON with their index ranges, which come second, as tuples."""
    return [(tensor, as_index_range(bounds), *rest) for tensor, bounds, *rest in shards]


def _read(shard_server: LocalShardServer, fields: dict[str, Any], body: Body) -> Reply:
    wanted = cast(list[ShardId], _with_tuples(fields["wanted"]))
    answers = shard_server.read(fields["key"], wanted, ReadOptions(**fields["options"]))
    parts = [as_bytes(a.data) if isinstance(a.data, np.ndarray) else np.frombuffer(a.data, np.uint8) for a in answers]
    listed = [
        {"codec": a.codec, "digest": a.digest, "nbytes": part.nbytes, "location": a.location}
        for a, part in zip(answers, parts, strict=True)
    ]
    return {"answers": listed}, [memoryview(part) for part in parts]


_WITH_BYTES: dict[str, Callable[[LocalShardServer, dict[str, Any], Body], Reply]] = {
    "write": _write,
    "write_deltas": _write_deltas,
    "read": _read,
}


def endpoint_text(endpoint: Endpoint) -> str:
    """Encode an endpoint for the directory."""
    return json.dumps(dataclasses.asdict(endpoint))


def endpoint_from_text(text: str) -> Endpoint:
    """The inverse of `endpoint_text`."""
    return Endpoint(**json.loads(text))
