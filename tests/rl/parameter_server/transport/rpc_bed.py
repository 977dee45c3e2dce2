"""Test bed of the RPC: a server's operations, and inspection of its threads."""

import contextlib
import dataclasses
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mesh import UserError
from rl.parameter_server.errors import VersionGone, WeightsError, WrongBase
from rl.parameter_server.transport.client import Unreachable
from rl.parameter_server.transport.connection import Connection
from rl.parameter_server.transport.endpoint import Endpoint
from rl.parameter_server.transport.handshake import client_handshake
from rl.parameter_server.transport.server import Body, RpcServer


class Store:
    """Operations of the tests' servers."""

    def __init__(self) -> None:
        self.put: dict[str, bytes] = {}
        self.release = threading.Event()

    def __call__(self, operation: str, fields: dict[str, Any], body: Body) -> Any:
        return getattr(self, operation)(fields, body)

    def echo(self, fields: dict[str, Any], body: Body) -> Any:
        return fields, [body.read()]

    def parts(self, fields: dict[str, Any], body: Body) -> Any:
        """Answer with as many buffers of these sizes."""
        parts = [np.empty(size, np.uint8) for size in fields["sizes"]]
        body.read_into(*parts[:3])
        body.read_into(*parts[3:])
        return {}, parts

    def beyond(self, fields: dict[str, Any], body: Body) -> Any:
        body.read_into(np.empty(3, np.uint8))
        body.read_into(np.empty(body.nbytes, np.uint8))
        return {}

    def store(self, fields: dict[str, Any], body: Body) -> Any:
        self.put[fields["name"]] = bytes(body.read())
        return {}

    def ignore(self, fields: dict[str, Any], body: Body) -> Any:
        return {"nbytes": body.nbytes}

    def fail(self, fields: dict[str, Any], body: Body) -> Any:
        kinds = (VersionGone, WrongBase, WeightsError, Unreachable, UserError, ValueError, KeyError, TypeError)
        raise {kind.__name__: kind for kind in (*kinds, FileNotFoundError)}[fields["kind"]]("version 3 is no more")

    def wait(self, fields: dict[str, Any], body: Body) -> Any:
        assert self.release.wait(60)
        return {}

    def grow(self, fields: dict[str, Any], body: Body) -> Any:
        return {}, [np.zeros(fields["nbytes"], np.uint8)]

    def strided(self, fields: dict[str, Any], body: Body) -> Any:
        return {}, [np.zeros((4, 4), np.uint8)[:, ::2]]

    def much(self, fields: dict[str, Any], body: Body) -> Any:
        return {"text": "x" * (17 << 20)}


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that another thread or process makes true."""
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up, f"waited 60 s: {what}"
        time.sleep(0.01)


def connections() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weights connection"]


def say(endpoint: Endpoint, *sent: bytes, known: bool = False) -> bytes:
    """All that the server answers to these bytes, after a handshake if `known`, until it closes."""
    with socket.create_connection((endpoint.host, endpoint.port), timeout=20) as sock:
        if known:
            client_handshake(Connection(sock, 20.0), endpoint.token)
        answer = bytearray()
        with contextlib.suppress(ConnectionError):
            for part in sent:
                sock.sendall(part)
            with contextlib.suppress(OSError):  # not connected any more: reset
                sock.shutdown(socket.SHUT_WR)
            while more := sock.recv(1 << 16):
                answer += more
        return bytes(answer)


def elsewhere() -> None:
    """A server in a process of its own: says where it is, then serves until it is killed."""
    server = RpcServer(Store())
    print(json.dumps(dataclasses.asdict(server.endpoint)), flush=True)
    sys.stdin.read()
