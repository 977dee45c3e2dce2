"""How the two ends of a connection prove to each other that they know the token, which itself does not travel.

    server: greeting, nonce    client: nonce, HMAC(token, "client", both nonces)    server: HMAC(token, "server", both)

Of a stranger nothing is read but these 64 bytes.
"""

import hmac
import secrets

from rl.parameter_server.transport.connection import Connection, TransportError

_GREETING = b"axlwire1"
_NONCE = _MAC = 32  # bytes


def server_handshake(connection: Connection, token: str) -> None:
    """The server's half. Raises TransportError: the other side does not know the token, or has gone."""
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
        raise TransportError("what listens there is no server of weights, or one of another version")
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
