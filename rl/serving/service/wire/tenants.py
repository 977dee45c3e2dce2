"""Tenants, their API keys, and their sessions.

An id says whose it is: a session's has a digest of its tenant's name, a model's, sampler's or path's begins with its
session. So an id of another tenant is refused before anything is looked up, exactly as one that never was, and
ids stay good when the service is started again.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from mesh import UserError
from rl.serving.service.durable.folders import StatePath
from rl.serving.service.messages import ServiceBusy, ServiceError, UnknownId
from rl.serving.service.service import AdapterService

KEY_START = "tml-"  # the client refuses other keys
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_SESSION = re.compile(r"([0-9a-f]{12})-([0-9a-f]{16})")
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
_MOST_SESSIONS = 1000  # live ones of one tenant
_REMEMBERED = 100_000  # ended sessions
_LOG = logging.getLogger(__name__)


def read_keys(given: Iterable[str], file: Path | None = None) -> dict[str, str]:
    """Return {tenant: key} of `NAME=KEY` texts and lines of a file (UserError: no name, no key, or one twice)."""
    lines = [(text, f"--key number {number}") for number, text in enumerate(given, 1)]  # a key is never shown
    if file is not None:
        try:
            written = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--keys {file}: {error}") from error
        lines += [(text.strip(), f"{file}:{number}") for number, text in enumerate(written, 1)]
    found: dict[str, str] = {}
    for text, where in lines:
        if not text or text.startswith("#"):
            continue
        name, equals, key = text.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise UserError(f"{where}: expected NAME={KEY_START}KEY with a name of letters a to z, digits and . _ -")
        if not re.fullmatch(rf"{KEY_START}[!-~]+", key):
            raise UserError(f"{where}: expected a key that begins with {KEY_START!r} and has no spaces")
        if name in found or key in found.values():
            raise UserError(f"{where}: another tenant has this {'name' if name in found else 'key'}")
        found[name] = key
    return found


def new_key() -> str:
    """Return a random key."""
    return KEY_START + secrets.token_urlsafe(24)


class Tenants:
    """Owners of keys and ids, and the sessions that live. For use in one event loop."""

    def __init__(self, keys: Mapping[str, str], service: AdapterService, session_timeout: float = 600.0):
        """`keys`: {tenant: key}; `session_timeout`: seconds without a sign of a client until its models are saved."""
        self._digests = {hashlib.sha256(key.encode()).digest(): tenant for tenant, key in keys.items()}
        self._service, self._timeout = service, session_timeout
        now = time.monotonic()
        # Clients of a service that was started again have the usual time to come back.
        self._seen = dict.fromkeys(service.sessions(), now)
        self._ended: dict[str, None] = {}

    def of_key(self, key: str) -> str | None:
        """Return the tenant of a key, None if it is nobody's, in a time that does not say how much of it is right."""
        return self._digests.get(hashlib.sha256(key.encode("utf-8", "replace")).digest())

    def open_session(self, tenant: str) -> str:
        """Return the id of a new session (ServiceBusy: the tenant has too many)."""
        if sum(owner == tenant for owner, _ in self._seen) >= _MOST_SESSIONS:
            raise ServiceBusy(f"{_MOST_SESSIONS} sessions of yours are open", retry_after=60)
        nonce = secrets.token_hex(6)
        session = f"{nonce}-{_digest(tenant, nonce)}"
        self._seen[tenant, session] = time.monotonic()
        return session

    def touch(self, tenant: str, session: str) -> None:
        """Note a sign of life of a session (UnknownId: none of this tenant; SessionEnded: it has ended)."""
        if not _owns(tenant, session):
            raise UnknownId("session", session)
        if session in self._ended:
            raise SessionEnded(f"session {session!r} has ended; its models are saved, see list_checkpoints")
        self._seen[tenant, session] = time.monotonic()

    def is_over(self, session: str) -> bool:
        """Return True for a session that ended."""
        return session in self._ended

    def end_session(self, tenant: str, session: str) -> None:
        """Save the models of a session, unload them, and refuse further requests of it."""
        self._seen.pop((tenant, session), None)
        while len(self._ended) >= _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self._ended[session] = None

        def log(future: Future[Any]) -> None:
            if (error := future.exception()) is not None:
                _LOG.error("session %s of %s ended, but a model could not be saved: %s", session, tenant, error)

        for future in self._service.end_session(tenant, session):
            future.add_done_callback(log)

    async def end_vanished(self) -> None:
        """End each session without a sign of life for too long, until cancelled."""
        while True:
            await asyncio.sleep(min(5.0, self._timeout / 4))
            oldest = time.monotonic() - self._timeout
            for tenant, session in [key for key, seen in self._seen.items() if seen < oldest]:
                _LOG.warning("session %s of %s has vanished: its models are saved and unloaded", session, tenant)
                self.end_session(tenant, session)

    def check_model(self, tenant: str, model: str) -> str:
        """Return the id of a model of this tenant's; UnknownId for any other."""
        return self._check(tenant, model, "train", "model")

    def check_sampler(self, tenant: str, sampler: str) -> str:
        """Return the id of a sampler of this tenant's; UnknownId for any other."""
        return self._check(tenant, sampler, "sample", "sampler")

    def check_promise(self, tenant: str, promise: str) -> str:
        """Return the id of a promise of this tenant's; UnknownId for any other."""
        try:
            self.touch(tenant, promise.partition(":")[0])
        except SessionEnded:
            pass  # requests that were accepted are still answered
        except UnknownId:
            raise UnknownId("promise", promise) from None
        return promise

    def check_path(self, tenant: str, path: str) -> str:
        """Return a path of saved weights of this tenant's; UnknownId for any other. Its session may be over."""
        session, _, number = StatePath.of(path).model.partition(":train:")
        if not _NUMBER.fullmatch(number) or not _owns(tenant, session):
            raise UnknownId("path", path)
        return path

    def _check(self, tenant: str, id: str, part: Literal["train", "sample"], kind: str) -> str:
        session, found, number = id.partition(f":{part}:")
        try:
            if not found or not _NUMBER.fullmatch(number):
                raise UnknownId(kind, id)
            self.touch(tenant, session)
        except UnknownId:
            raise UnknownId(kind, id) from None
        return id


class SessionEnded(ServiceError):
    """A request of a session that is over."""


def _owns(tenant: str, session: str) -> bool:
    """Return True if this is the id of a session of the tenant's."""
    form = _SESSION.fullmatch(session)
    return form is not None and hmac.compare_digest(form[2], _digest(tenant, form[1]))


def _digest(tenant: str, nonce: str) -> str:
    return hashlib.sha256(f"{tenant}/{nonce}".encode()).hexdigest()[:16]
