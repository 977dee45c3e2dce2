"""How the two ends of a connection prove to each other that they know the token, which itself does not travel.

    server: greeting, nonce    client: nonce, HMAC(token, "client", both nonces)    server: HMAC(token, "server", both)

Of a stranger nothing is read but these 64 bytes.
"""

import hmac
import secrets

from rl.parameter_server.transport.connection import Link, LinkError

_GREETING = b"axlwire1"
_NONCE = _MAC = 32  # bytes


def let_in(link: Link, token: str) -> None:
    """The server's half. Raises LinkError: the other side does not know the token, or has gone."""
    nonce = secrets.token_bytes(_NONCE)
    link.send(_GREETING + nonce)
    answer = link.read(_NONCE + _MAC)
    nonces = nonce + answer[:_NONCE]
    if not hmac.compare_digest(answer[_NONCE:], _proof(token, b"client", nonces)):
        link.send(bytes(1 + _MAC))
        raise LinkError("wrong token")
    link.send(b"\1" + _proof(token, b"server", nonces))


def enter(link: Link, token: str) -> None:
    """The client's half. Raises LinkError: one of the two does not know the token, or this is no server of weights."""
    greeting = link.read(len(_GREETING) + _NONCE)
    if not greeting.startswith(_GREETING):
        raise LinkError("what listens there is no server of weights, or one of another version")
    mine = secrets.token_bytes(_NONCE)
    nonces = greeting[len(_GREETING) :] + mine
    link.send(mine + _proof(token, b"client", nonces))
    answer = link.read(1 + _MAC)
    if not answer[0]:
        raise LinkError("wrong token")
    if not hmac.compare_digest(answer[1:], _proof(token, b"server", nonces)):
        raise LinkError("the server does not know the token")


def _proof(token: str, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), b"axl weights " + role + nonces, "sha256")
