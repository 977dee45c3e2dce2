"""A client of endpoints that speak OpenAI's protocol: JSON posted to a route, asked again where that may help."""

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, override

from mesh.errors import UserError

_URL = re.compile(r"(?P<host>https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?)(/[^\s?#]*)?", re.ASCII)
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses after which a request is repeated
URL_FORM = "http://HOST[:PORT][/PATH], or https://"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another host gets neither the key nor the question; a redirect is an answer with that status."""

    @override
    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def is_endpoint(url: str) -> bool:
    """Return whether this is the address of an endpoint, of the form `URL_FORM`."""
    return _URL.fullmatch(url) is not None


def reached(url: str, key_variable: str | None) -> str:
    """Return what a config with such an endpoint reaches, in the words of `Config.reaches`."""
    found = _URL.fullmatch(url)
    host = found["host"].lower() if found else url
    return f"{key_variable}@{host}" if key_variable else host


class EndpointClient:
    """One endpoint, with its key and its patience."""

    def __init__(
        self, owner: str, url: str, key_variable: str | None, *, timeout_s: float, attempts: int, pause_s: float
    ):
        """Read the key.

        Args:
            owner: who asks, for messages.
            url: address, such as http://localhost:8000/v1.
            key_variable: environment variable that holds the key.
            timeout_s: seconds of an attempt.
            attempts: requests until it is given up.
            pause_s: seconds before the second attempt; doubled before each later one, or as long as the endpoint says.

        Raises:
            UserError: the variable is not set.
        """
        self.url, self._timeout, self._attempts, self._pause = url.rstrip("/"), timeout_s, attempts, pause_s
        self._key = os.environ.get(key_variable, "") if key_variable else ""
        if key_variable and not self._key:
            raise UserError(f"{owner}: the environment variable {key_variable} is not set")

    def post[T](
        self, route: str, body: Mapping[str, Any], read: Callable[[Any], T], before: Callable[[], None] | None = None
    ) -> T:
        """Return what `read` makes of the reply; a reply that it cannot read is asked for again.

        Args:
            route: path below the address.
            body: what is sent, as JSON.
            read: may raise LookupError, TypeError or ValueError.
            before: called before each attempt.

        Raises:
            RuntimeError: there was no reply that can be read.
        """
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data, why = json.dumps(body).encode(), ""
        for attempt in range(self._attempts):
            if before is not None:
                before()
            request = urllib.request.Request(f"{self.url}/{route}", data, headers)
            pause = self._pause * 2**attempt
            try:
                with _OPENER.open(request, timeout=self._timeout) as response:
                    return read(json.load(response))
            except urllib.error.HTTPError as error:
                why = f"status {error.code}: {error.read(300).decode('utf-8', 'replace')}"
                if error.code not in _AGAIN:
                    raise RuntimeError(f"{self.url}: {why}") from error
                after = error.headers.get("Retry-After", "")
                pause = min(float(after), 60.0) if after.replace(".", "", 1).isdigit() else pause
            except (OSError, ValueError, LookupError, TypeError) as error:
                why = f"{type(error).__name__}: {error}"
            if attempt + 1 < self._attempts:
                time.sleep(pause)
        raise RuntimeError(f"{self.url}: no reply after {self._attempts} attempts; the last one: {why}")
