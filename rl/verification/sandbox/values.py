"""Plain Python values as JSON with their types, and frames of it: all that crosses the walls of a box, both ways.

A frame is a length and JSON; nothing is unpickled or evaluated. Tuples, sets, bytes, complex numbers and dicts with
keys of any kind keep their types, since tests compare them. An object of another class is refused: its `__eq__` could
say that it equals everything.
"""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

MAX_FRAME = 8 << 20  # bytes
_LENGTH = struct.Struct("<I")
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any) -> Any:
    """Return a value as JSON holds it; subclasses and numpy's become their plain kind (TypeError: it is not data)."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if callable(plain := getattr(value, "tolist", None)):
        return encode(plain())
    raise TypeError(f"{type(value).__name__} is not data: expected numbers, text, bytes, lists, tuples, sets, dicts")


def decode(value: Any) -> Any:
    """Return the value that was encoded, of built-in types alone (ValueError, TypeError: not by `encode`)."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a bare list")
        return value
    ((name, held),) = value.items()
    if name in _SEQUENCES:
        return _SEQUENCES[name](map(decode, held))
    if name == "dict":
        return {decode(key): decode(item) for key, item in held}
    if name == "bytes":
        return bytes.fromhex(held)
    if name == "complex":
        return complex(*held)
    raise ValueError(f"no kind {name!r}")


def send(connection: socket.socket, message: Any) -> None:
    """Send a frame (ValueError: it is too long, or a number has too many digits)."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > MAX_FRAME:
        raise ValueError(f"{len(payload)} bytes; expected {MAX_FRAME} at most")
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> Any:
    """Receive a frame; None: the end (ValueError: too long, or not JSON; TimeoutError: that of the socket)."""
    header = _exactly(connection, _LENGTH.size)
    if header is None:
        return None
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes")
    payload = _exactly(connection, length)
    try:
        return None if payload is None else json.loads(payload)
    except RecursionError as error:
        raise ValueError("a frame nested too deeply") from error


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            piece = connection.recv(min(count - len(data), 1 << 16))
        except ConnectionResetError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)
