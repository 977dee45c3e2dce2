"""Messages between the verifier and its processes: JSON on a line. What a process sends is data and never code.

A process may be in the hands of the answer that it scores, so a message from one is bounded, and what is in it is
checked by its reader.
"""

import json
from typing import Any

MAX_REPLY = 1 << 20  # bytes of a message from a process


class MalformedMessage(Exception):
    """Bytes that are no message, one that is too long, or one that nobody has asked for."""


def pack(message: Any) -> bytes:
    """Encode a message of plain values."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class MessageReader:
    """Messages out of bytes that arrive in pieces."""

    def __init__(self):
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that are complete now (MalformedMessage: too long, not JSON, or not an object)."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if (longest := max(map(len, (*lines, self._rest)))) > MAX_REPLY:
            raise MalformedMessage(f"a message of {longest} bytes")
        try:
            messages = list(map(json.loads, lines))
        except (ValueError, RecursionError) as error:
            raise MalformedMessage(str(error)) from error
        if not all(isinstance(message, dict) for message in messages):
            raise MalformedMessage("what is no object")
        return messages
