"""Mutual authentication of the two ends of a connection by a shared token, which itself is never sent.

    server: greeting, nonce    client: nonce, HMAC(token, "client", both nonces)    server: HMAC(token, "server", both)

Before a client is authenticated, only these 64 bytes are read from it.
"""

import hmac
import secrets

from rl.parameter_server.transport.connection import Connection, TransportError

_GREETING = b"axlwire1"
_NONCE = _MAC = 32  # bytes


def server_handshake(connection: Connection, token: str) -> None:
    """Run the server's half. Raises TransportError: the client does not know the token, or has disconnected."""
    nonce = secrets.token_bytes(_NONCE)
    connection.send(_GREETING + nonce)
    answer = connection.read(_NONCE + _MAC)
    nonces = nonce + answer[:_NONCE]
    if not hmac.compare_digest(answer[_NONCE:], _proof(token, b"client", nonces)):
        connection.send(bytes(1 + _MAC))
        raise TransportError("wrong token")
    connection.send(b"\1" + _proof(token, b"server", nonces))


def client_handshake(connection: Connection, token: str) -> None:
    """Run the client's half. Raises TransportError: one side does not know the token, or this is no RPC server."""
    greeting = connection.read(len(_GREETING) + _NONCE)
    if not greeting.startswith(_GREETING):
        raise TransportError("the peer is not a parameter server, or one of another version")
    mine = secrets.token_bytes(_NONCE)
    nonces = greeting[len(_GREETING) :] + mine
    connection.send(mine + _proof(token, b"client", nonces))
    answer = connection.read(1 + _MAC)
    if not answer[0]:
        raise TransportError("wrong token")
    if not hmac.compare_digest(answer[1:], _proof(token, b"server", nonces)):
        raise TransportError("the server does not know the token")


def _proof(token: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), b"axl weights " + role + nonces, "sha256")
