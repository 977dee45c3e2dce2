"""Requests over sockets: an operation, its fields, and bytes both ways from memory to memory.

    server = Server(handle)                                   # handle(operation, fields, body) -> (fields, buffers)
    client = Client(server.endpoint, name="parameter server")
    fields, data = client.call("read", {"tensor": "w"})

Connections stay open for many requests. `link.py` has the bytes on the wire; docs/concepts/weight-transport.md
what is protected against whom.
"""

from rl.parameter_server.transport.client import Client, Unreachable
from rl.parameter_server.transport.endpoint import Endpoint, own_address
from rl.parameter_server.transport.server import Body, Server

__all__ = ["Body", "Client", "Endpoint", "Server", "Unreachable", "own_address"]
