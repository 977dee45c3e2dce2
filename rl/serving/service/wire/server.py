"""The server of a service: the web server in a thread, from `start` to a graceful stop."""

import socket
from collections.abc import Callable, Mapping
from typing import override

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.tokenizers.protocol import Tokenizer
from rl.serving.service.service import AdapterService
from rl.serving.service.wire.app import ServiceApp
from rl.serving.service.wire.openai import OpenAIRoutes
from rl.serving.service.wire.promises import Promises
from rl.serving.service.wire.tenants import Tenants
from rl.serving.web.thread import WebThread


class ServiceServer(Configurable):
    """A service over HTTP, in a thread of this process."""

    class Config(ConfigBase["ServiceServer"]):
        max_body: int = 16 << 20  # limit of a request's bytes
        max_connections: int = 1024  # limit of open connections; a further one closes the longest idle one
        hold: float = 40.0  # seconds that a question for a result waits for it
        session_timeout: float = 600.0  # seconds without a sign of a client until its models are saved and unloaded
        grace: float = 2.0  # seconds for unfinished requests after a stop; clients ask again

        @override
        def check_fields(self) -> None:
            self.require_least(1, "max_body", "max_connections")
            self.require(
                "hold", 0 < self.hold < 45, "seconds, more than 0 and less than 45, after which clients ask again"
            )
            self.require("session_timeout", self.session_timeout > 0, "seconds, more than 0")
            self.require_least(0, "grace")

    def __init__(
        self,
        cfg: Config,
        *,
        service: AdapterService,
        keys: Mapping[str, str],
        tokenizer: Tokenizer | None = None,
        limits: tuple[int, int] = (1024, 1024),
    ):
        """Begin without requests.

        Args:
            cfg: limits.
            service: trains and samples; closed at the end.
            keys: {tenant: API key}.
            tokenizer: tokenizer of the base, for OpenAI's completions; None: there are none.
            limits: tokens of a prompt and of an answer there.
        """
        self.cfg, self.service = cfg, service
        self._tenants = Tenants(keys, service, cfg.session_timeout)
        promises = Promises(service, cfg.hold)
        openai = None if tokenizer is None else OpenAIRoutes(service, self._tenants, tokenizer, limits)
        sizes = {"max_body": cfg.max_body, "connections": cfg.max_connections}
        self.app = ServiceApp(service, self._tenants, promises, openai=openai, **sizes)
        self._web = WebThread(self.app.asgi, cfg.max_connections, cfg.grace)

    def start(self, listener: socket.socket) -> None:
        """Answer on a bound socket, until `stop`."""
        self._web.start(listener, beside=self._tenants.end_vanished)

    def wait(self, stopped: Callable[[], bool]) -> None:
        """Wait until `stopped()`, or until the web server or a thread of the service has ended by itself."""
        self._web.wait(stopped, lambda: self.service.failure() is None)

    def stop(self) -> None:
        """Take no more requests, and end what runs; clients that wait ask the next service of this directory."""
        self._web.stop(self.cfg.grace + 5.0)
        self.service.close()
