"""A web server in a thread of this process."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import ASGIApp

from rl.serving.web.connections import Connections, ConnectionServer, connections_allowed


class WebThread:
    """A web server from `start` to `stop`."""

    def __init__(self, app: ASGIApp, connections: int, grace: float):
        """Begin without a socket: at most so many open connections, and seconds for requests after a stop."""
        # Signals and the log belong to the caller.
        self._server = ConnectionServer(
            Connections(app, connections_allowed(connections)),
            interface="asgi3",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(grace),
        )
        self._thread: threading.Thread | None = None

    def start(self, listener: socket.socket, beside: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Answer on a bound socket; `beside` runs in the same event loop until the server's end."""

        async def serve() -> None:
            task = None if beside is None else asyncio.create_task(beside())
            await self._server.serve(sockets=[listener])
            if task is not None:
                task.cancel()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), name="http", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True from the start to the end of the server."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, stopped: Callable[[], bool], fine: Callable[[], bool] = lambda: True) -> None:
        """Wait until `stopped()`, until the server has ended by itself, or until not `fine()`."""
        while self.alive and fine() and not stopped():
            time.sleep(0.05)

    def stop(self, seconds: float) -> bool:
        """Accept no more requests, and wait for the end; returns True if it has come within these seconds."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.alive
