"""Requests to the API of a cluster, as JSON over one connection; what it refuses becomes a UserError."""

import http.client
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode, urlsplit

from mesh.errors import UserError
from tools.launch.kubernetes.kubeconfig import Access

_TIMEOUT = 30.0  # seconds
_TRIES = 6
_LONGEST = 20.0  # seconds that a server may ask to wait
_LATER = (429, 500, 502, 503, 504)
_PAGE = "500"


class Refused(UserError):
    """An answer that is no success.

    Attributes:
        status: status of HTTP.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Client:
    """A connection to a cluster, made again when the server has closed it."""

    def __init__(self, access: Access, *, sleep: Callable[[float], None] = time.sleep):
        """`sleep`: waits before a request is repeated."""
        self.access, self._sleep = access, sleep
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str, **query: str) -> Any:
        """Return an object."""
        return self.request("GET", path, query=query)

    def find(self, path: str) -> Any:
        """Return an object; None: it is not there."""
        try:
            return self.get(path)
        except Refused as error:
            if error.status != 404:
                raise
            return None

    def list(self, path: str, **query: str) -> list[Any]:
        """Return all items of a list, page by page."""
        for _ in range(_TRIES):
            found, more = list[Any](), {"limit": _PAGE}
            try:
                while True:
                    page = self.request("GET", path, query={**query, **more})
                    found += page.get("items", [])
                    if not (token := page.get("metadata", {}).get("continue")):
                        return found
                    more = {"limit": _PAGE, "continue": token}
            except Refused as error:
                if error.status != 410:  # the list has changed so much that its next page is gone
                    raise
        raise UserError(f"{path}: the list changes faster than it can be read")

    def text(self, path: str, **query: str) -> str:
        """Return a text, such as a log."""
        return self.request("GET", path, query=query, as_text=True)

    def post(self, path: str, body: Any) -> Any:
        """Create an object."""
        return self.request("POST", path, body=body)

    def delete(self, path: str, body: Any = None) -> bool:
        """Delete an object; False: it was not there."""
        try:
            self.request("DELETE", path, body=body)
        except Refused as error:
            if error.status != 404:
                raise
            return False
        return True

    def request(
        self, method: str, path: str, *, body: Any = None, query: dict[str, str] | None = None, as_text: bool = False
    ) -> Any:
        """Send a request; repeat it while the server is busy, and once with a new token where it refuses the old one.

        Raises:
            Refused: with the message of the server. UserError: there is no answer.
        """
        target = path + (f"?{urlencode(query)}" if query else "")
        renewed = False
        for attempt in range(_TRIES):
            status, headers, content = self._send(method, target, body, renewed)
            if status < 300:
                return content.decode(errors="replace") if as_text else json.loads(content or b"{}")
            if status == 401 and not renewed and attempt < _TRIES - 1:
                renewed = True
                continue
            if status not in _LATER or attempt == _TRIES - 1:
                break
            asked = headers.get("Retry-After", "")
            self._sleep(min(float(asked) if asked.isdecimal() else 0.5 * 2**attempt, _LONGEST))
        raise Refused(self._message(method, path, status, content), status)

    def _send(self, method: str, target: str, body: Any, renewed: bool) -> tuple[int, Any, bytes]:
        headers = {"Accept": "application/json", "User-Agent": "axl"}
        if token := self.access.token(renewed=renewed):
            headers["Authorization"] = f"Bearer {token}"
        data = None
        if body is not None:
            headers["Content-Type"], data = "application/json", json.dumps(body)
        for attempt in (0, 1):
            fresh = self._connection is None
            try:
                connection = self._connected()
                connection.request(method, target, data, headers)
                answer = connection.getresponse()
                return answer.status, answer.headers, answer.read()
            except (OSError, http.client.HTTPException) as error:
                self._connection = None
                # An idle connection may have been closed. A request that changes something is sent once, unless so.
                if fresh and method != "GET" or attempt:
                    reason = getattr(error, "strerror", None) or error or type(error).__name__
                    raise UserError(f"{self.access.name} does not answer at {self.access.server}: {reason}") from error
        raise AssertionError

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            parts = urlsplit(self.access.server)
            host, port = parts.hostname or "", parts.port
            if self.access.context is None:
                self._connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
            else:
                context = self.access.context
                self._connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT, context=context)
        return self._connection

    def _message(self, method: str, path: str, status: int, content: bytes) -> str:
        try:
            answer = json.loads(content)
            said = answer.get("message", "")
            causes = answer.get("details", {}).get("causes", ())
            said = "; ".join(f"{one.get('field')}: {one.get('message')}" for one in causes) or said
        except (ValueError, AttributeError):
            said = content[:200].decode(errors="replace")
        name = self.access.name
        if status == 401:
            return f"{name} does not accept the credentials (expired?): {said or 'Unauthorized'}; log in again"
        if status == 403:
            return f"{name} does not permit {method} {path}: {said}"
        return f"{name}: {method} {path}: {status}: {said}"
