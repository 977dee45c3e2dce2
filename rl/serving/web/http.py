"""HTTP: access, bounded bodies, responses that end when the client goes, server-sent events."""

import asyncio
import contextlib
import hmac
import ipaddress
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from rl.serving.errors import ApiError


class ClientGone(Exception):
    """The client closed the connection before the response was complete."""


async def read_body(request: HttpRequest, limit: int) -> bytes:
    """Return the body.

    Raises:
        ApiError: 413 for more than `limit` bytes.
        ClientGone: the client left before its end.
    """
    too_large = ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


async def read_json(request: HttpRequest, limit: int) -> Any:
    """Return the decoded body.

    Raises:
        ApiError: 413 for more than `limit` bytes, 400 for a body that is not JSON.
        ClientGone: the client left before its end.
    """
    body = await read_body(request, limit)
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {why}", code="invalid_json") from None


def check_access(request: HttpRequest, key: str | None, allowed_hosts: Sequence[str] = ()) -> None:
    """Refuse a request without the key or, where there is no key, one that a web page could have sent.

    Without a key, a page in a browser on this machine could use the server: by a form or a fetch to 127.0.0.1 (CSRF),
    or under a name of the page's own that resolves to 127.0.0.1 (DNS rebinding). So the Host, and the Origin if there
    is one, must be a loopback name or one of `allowed_hosts`; and a body must be declared as JSON, which a page of
    another origin cannot do without a preflight request.

    Raises:
        ApiError: 401, 403 or 415.
    """
    if key is not None:
        return _check_key(request, key)
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if not _allowed(f"//{host}", allowed_hosts):
        said = f"host {host[:80]!r} is not a loopback address; allow it with --allow-host, or set an API key"
        raise ApiError(403, said, code="host_not_allowed")
    if origin is not None and not _allowed(origin, allowed_hosts):
        said = f"pages of origin {origin[:80]!r} are refused; allow its host with --allow-host, or set an API key"
        raise ApiError(403, said, code="origin_not_allowed")
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and content_type != "application/json":
        said = f"Content-Type is {content_type[:80]!r}; expected application/json"
        raise ApiError(415, said, code="unsupported_media_type")


def _allowed(url: str, allowed_hosts: Sequence[str]) -> bool:
    """Return True if the host of a URL is a loopback name or address, or one of these."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if host == "localhost" or host in (allowed.lower().strip("[]") for allowed in allowed_hosts):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_key(request: HttpRequest, key: str) -> None:
    """Compare the bearer's key with `key`, in a time that does not depend on how much of it is right."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Headers are bytes, which Starlette reads as Latin-1.
    right = hmac.compare_digest(given.strip().encode("latin-1"), key.strip().encode("utf-8"))
    if scheme.lower() != "bearer" or not right:
        said = "the API key is wrong" if given else "no API key; expected the header 'Authorization: Bearer KEY'"
        raise ApiError(401, said, code="invalid_api_key")


def refusal(error: ApiError) -> JSONResponse:
    """Return the response to an error."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


async def unless_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client goes. The body must have been read.

    Raises:
        ClientGone: it went.
    """
    task, watch = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Server-sent events: each item of `events` as one, then `[DONE]`.

    Args:
        events: JSON-able objects; closed when the client goes.
        on_end: called once, however it ends; the argument is True if the client has everything.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any]], on_end: Callable[[bool], None]):
        self.status_code, self.background = 200, None
        self._events, self._on_end = events, on_end
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes."""
        whole = False
        try:
            with contextlib.suppress(ClientGone):
                await unless_gone(receive, self._pump(send))
                whole = True
        finally:
            await self._events.aclose()
            self._on_end(whole)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            line = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            name = f"event: {event['type']}\n" if "sequence_number" in event else ""  # event of /v1/responses
            await send({"type": "http.response.body", "body": f"{name}data: {line}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _gone(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
