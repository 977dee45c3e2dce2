"""Raw weights over TCP: bulk bytes travel here and never through actor calls.

One request a connection: a JSON line with the run's token, the operation and its arguments; the answer is a JSON line
followed by raw bytes. Nothing is unpickled. Binds to loopback unless told otherwise.
"""

import contextlib
import dataclasses
import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from io import BufferedIOBase
from typing import Any

from mesh import UserError
from rl.parameter_server import ParameterServer
from rl.weights.encoding import EncodedWeights, Manifest, WeightsError


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a parameter server listens, and the secret that it asks for."""

    host: str
    port: int
    token: str


class WeightServer:
    """Serves a `ParameterServer` on a background thread pool of one thread a connection."""

    def __init__(self, store: ParameterServer, token: str | None = None):
        host, port = store.cfg.host, store.cfg.port
        handler = _handler(store, token := token or secrets.token_hex(16))
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise UserError(
                f"parameter server cannot listen on {host}:{port}: {error.strerror}; "
                "set parameter_server.port=0 for any free port"
            ) from error
        self.endpoint = Endpoint(host, self._server.server_address[1], token)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class WeightClient:
    """The parameter server's interface (`push`, `pull`, `latest`) over TCP.

    A server that was restarted listens elsewhere. Given a function instead of an endpoint, a client asks it where to
    find the server, and asks again and repeats what failed for up to `patience` seconds: each operation is repeatable.
    """

    def __init__(
        self, endpoint: Endpoint | Callable[[], Endpoint], connect_timeout: float = 10.0, patience: float = 90.0
    ):
        self._locate = None if isinstance(endpoint, Endpoint) else endpoint
        self._endpoint = endpoint if isinstance(endpoint, Endpoint) else None
        self._connect_timeout = connect_timeout
        self._patience = patience

    def push(self, weights: EncodedWeights) -> None:
        self._call("push", weights.buffer, manifest=weights.manifest.to_json())

    def pull(self, version: int, timeout: float = 0.0) -> EncodedWeights:
        reply, buffer = self._call("pull", version=version, timeout=timeout)
        return EncodedWeights(Manifest.from_json(reply["manifest"]), buffer)

    def rewind(self, version: int) -> None:
        self._call("rewind", version=version)

    def latest(self) -> int:
        return self._call("latest")[0]["version"]

    def oldest(self) -> int:
        return self._call("oldest")[0]["version"]

    def _call(
        self, operation: str, body: bytes | bytearray | memoryview = b"", **arguments: Any
    ) -> tuple[dict[str, Any], bytearray]:
        give_up: float | None = None
        while True:
            if self._endpoint is None:
                assert self._locate is not None
                self._endpoint = self._locate()
            endpoint = self._endpoint
            try:
                return self._exchange(endpoint, operation, body, arguments)
            except OSError as error:
                give_up = give_up or time.monotonic() + self._patience
                if self._locate is None or time.monotonic() > give_up:
                    where = f"parameter server at {endpoint.host}:{endpoint.port}"
                    raise WeightsError(f"{where}: {operation} failed: {error}") from error
            self._endpoint = None
            time.sleep(0.2)

    def _exchange(
        self, endpoint: Endpoint, operation: str, body: bytes | bytearray | memoryview, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], bytearray]:
        wait = self._connect_timeout + arguments.get("timeout", 0.0)
        with socket.create_connection((endpoint.host, endpoint.port), timeout=wait) as connection:
            request = {"token": endpoint.token, "operation": operation, **arguments}
            connection.sendall(json.dumps({**request, "nbytes": len(body)}).encode() + b"\n")
            connection.sendall(body)
            with connection.makefile("rb") as stream:
                line = stream.readline()
                if not line.endswith(b"\n"):
                    raise ConnectionError("connection closed")
                reply = json.loads(line)
                data = _read(stream, reply.get("nbytes", 0))
        if "error" in reply:
            raise WeightsError(reply["error"])
        return reply, data


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128


def _handler(store: ParameterServer, token: str) -> type[socketserver.StreamRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):  # the other side is gone, killed in the middle: nobody to tell
                self._serve()

        def _serve(self) -> None:
            try:
                request = json.loads(self.rfile.readline(1 << 24))
                known = isinstance(request, dict) and str(request.get("token")).encode()
                if not known or not hmac.compare_digest(known, token.encode()):
                    raise WeightsError("parameter server: wrong token")
                reply, data = self._answer(request)
            except (UserError, ValueError, KeyError, TypeError) as error:
                reply, data = {"error": str(error)}, b""
            self.wfile.write(json.dumps({**reply, "nbytes": len(data)}).encode() + b"\n")
            self.wfile.write(data)

        def _answer(
            self, request: dict[str, Any]
        ) -> tuple[dict[str, Any], bytes | bytearray | memoryview]:
            operation = request["operation"]
            if operation == "push":
                buffer = _read(self.rfile, request["nbytes"])
                store.push(EncodedWeights(Manifest.from_json(request["manifest"]), buffer))
                return {}, b""
            if operation == "pull":
                weights = store.pull(request["version"], request["timeout"])
                return {"manifest": weights.manifest.to_json()}, weights.buffer
            if operation == "rewind":
                store.rewind(request["version"])
                return {}, b""
            if operation == "latest":
                return {"version": store.latest()}, b""
            if operation == "oldest":
                return {"version": store.oldest()}, b""
            raise WeightsError(f"parameter server: unknown operation {operation!r}")

    return Handler


def _read(stream: BufferedIOBase, nbytes: int) -> bytearray:
    buffer = bytearray(nbytes)
    view, filled = memoryview(buffer), 0
    while filled < nbytes:
        count = stream.readinto(view[filled:])
        if not count:
            raise OSError(f"connection closed after {filled} of {nbytes} bytes")
        filled += count
    return buffer
