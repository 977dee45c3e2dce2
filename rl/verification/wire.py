"""Messages between the pool and its processes: a length, then JSON. What a process sends is data and never code.

A process may be in the hands of the answer that it scores, so a message from one is bounded, and what is in it is
checked by its reader.
"""

import json
import struct
from typing import Any

__all__ = ["MAX_REPLY", "MalformedMessage", "MessageReader", "pack", "read"]

MAX_REPLY = 1 << 20  # bytes of a message from a process
_LENGTH = struct.Struct("<Q")


class MalformedMessage(Exception):
    """Bytes that are no message, or one that is too long."""


def pack(message: Any) -> bytes:
    """Encode a message of plain values."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(payload)) + payload


def read(stream: Any) -> Any:
    """Read a message from a blocking stream of someone trusted; None at its end."""
    header = stream.read(_LENGTH.size)
    return json.loads(stream.read(_LENGTH.unpack(header)[0])) if len(header) == _LENGTH.size else None


class MessageReader:
    """Messages out of bytes that arrive in pieces."""

    def __init__(self, limit: int = MAX_REPLY):
        self._limit = limit
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that are complete now.

        Raises:
            MalformedMessage: too long, not JSON, or not an object.
        """
        self._bytes += data
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self._limit:
                raise MalformedMessage(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            messages.append(_parse(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]
        return messages


def _parse(payload: bytes) -> dict[str, Any]:
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
    if not isinstance(message, dict):
        raise MalformedMessage(f"expected an object, got {type(message).__name__}")
    return message
