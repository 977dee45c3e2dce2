"""The report of a run as a page that renews itself, for a browser on this machine.

The standard library's server is enough for one page and its few readers: no package of the extra `serve` is needed. It
listens on loopback alone. Other users of the machine and pages of other sites that a browser shows reach that, too, so
each request must have the token of the address that was printed, and the host that was asked for.
"""

import hmac
import secrets
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, override
from urllib.parse import parse_qs, urlsplit

from mesh.errors import UserError
from tools.report.html import POLICY, render
from tools.report.load import load_run
from tools.watch.standing import standing

_EVERY = 5  # seconds between renewals of the page
_HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "Cache-Control": "no-store",
}


class ReportServer(ThreadingHTTPServer):
    """Server of the page at `url`; `serve_forever` serves, `shutdown` ends it."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0, refresh: Callable[[], object] = lambda: None):
        """Listen; `port` 0: any free one; `refresh` brings a copy up to date. UserError: the port is taken."""
        self._folder, self._refresh, self._token = folder, refresh, secrets.token_urlsafe(16)
        self._lock, self._page, self._until = Lock(), b"", 0.0
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UserError(
                f"--port {port}: cannot listen there: {error.strerror or error}; 0 takes any free"
            ) from None
        self.url = f"http://127.0.0.1:{self.server_port}/?token={self._token}"

    def answer(self, target: str, host: str) -> tuple[HTTPStatus, bytes]:
        """Return status and body for a request: the page, or a word of refusal."""
        parts = urlsplit(target)
        given = parse_qs(parts.query).get("token", [""])[-1]
        known = hmac.compare_digest(given.encode(), self._token.encode())
        if not known or host not in (f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"):
            return HTTPStatus.FORBIDDEN, b"forbidden: open the address that axl watch --serve has printed\n"
        if parts.path != "/":
            return HTTPStatus.NOT_FOUND, b"not found\n"
        return HTTPStatus.OK, self._render()

    def _render(self) -> bytes:
        """Return the page, made again unless that was just done; a long run's takes a while."""
        with self._lock:
            began = time.monotonic()
            if began >= self._until:
                self._refresh()
                run = load_run(self._folder)
                stands = standing(run)
                said = " ".join(filter(None, (stands.words, stands.why)))
                self._page = render(run, f"{said}, as of {time.strftime('%H:%M:%S')}").encode(errors="replace")
                self._until = time.monotonic() + max(1.0, 4 * (time.monotonic() - began))
            return self._page


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 10  # seconds; a browser opens connections in advance

    def do_GET(self) -> None:
        try:
            status, body = self.server.answer(self.path, self.headers.get("Host", ""))
        except (UserError, OSError, ValueError) as error:  # the directory is gone, or the address is none
            status, body = HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode(errors="replace")
        self.send_response(status)
        own = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))}
        if status is HTTPStatus.OK:
            own |= {"Content-Type": "text/html; charset=utf-8", "Refresh": str(_EVERY)}
        for name, value in (_HEADERS | own).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a request's line has the token."""

    @override
    def version_string(self) -> str:
        return "axl"
