"""The server: engine thread, application and web server together, from `start` to a graceful stop."""

import socket
from collections.abc import Callable
from typing import override

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.tokenizers.chat import end_of_turn
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh import UserError
from rl.rollout.decoding.grammar import Grammars
from rl.rollout.engine import RolloutEngine
from rl.serving.adapters import ServedAdapters
from rl.serving.app import App
from rl.serving.chat_template import ChatTemplate
from rl.serving.context import ServingContext
from rl.serving.engine_thread import EngineThread
from rl.serving.errors import ApiError
from rl.serving.web.thread import WebThread

_REFUSING = 2.0  # seconds to send the last errors


class Server(Configurable):
    """One engine served over HTTP, in threads of this process."""

    class Config(ConfigBase["Server"]):
        template: ChatTemplate.Config = ChatTemplate.Config()
        max_queue: int = 64  # limit of requests without a first token; further ones are refused with 429
        max_samples: int = 64  # limit of completions of one request
        max_body: int = 1 << 20  # limit of a request's bytes
        deadline: float = 600.0  # limit of a request's seconds
        grace: float = 30.0  # seconds for unfinished requests after a stop
        max_connections: int = 1024  # limit of open connections; a further one closes the longest idle one
        max_adapters: int = 8  # limit of loaded adapters; raised if more are named at the start
        max_adapter_rank: int = 16  # limit of an adapter's rank; raised if one named at the start has more
        allowed_hosts: tuple[str, ...] = ()  # Host and Origin besides loopback ones, where there is no API key

        @override
        def check_fields(self) -> None:
            self.require_least(1, "max_queue", "max_samples", "max_body", "max_connections")
            self.require_least(1, "max_adapters", "max_adapter_rank")
            self.require("deadline", self.deadline > 0, "seconds, more than 0")
            self.require_least(0, "grace")

    def __init__(
        self,
        cfg: Config,
        *,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        model: str,
        api_key: str | None = None,
        adapters: ServedAdapters | None = None,
    ):
        """`engine` has its weights; `model` is the name that requests give, `adapters` have others."""
        self.cfg = cfg
        self.engine = EngineThread(engine)
        template = cfg.template.build(tokenizer=tokenizer)
        # A template of the server's own may end turns with another token than the tokenizer's does.
        turn = end_of_turn(tokenizer, template.template) if template.template and engine.cfg.stop_tokens else None
        context = ServingContext(
            models=adapters or ServedAdapters(model),
            tokenizer=tokenizer,
            template=template,
            max_prompt_tokens=engine.cfg.max_prompt_tokens,
            max_new_tokens=engine.cfg.max_new_tokens,
            stop_tokens=tuple(dict.fromkeys([*engine.cfg.stop_tokens, *([] if turn is None else [turn])])),
            sampler=engine.cfg.sampler,
            max_samples=cfg.max_samples,
            deadline=cfg.deadline,
            grammars=Grammars(tokenizer),
        )
        context.grammars.prepare()
        self.app = App(
            self.engine,
            context,
            max_queue=cfg.max_queue,
            max_body=cfg.max_body,
            api_key=api_key,
            allowed_hosts=cfg.allowed_hosts,
        )
        self._web = WebThread(self.app.asgi, cfg.max_connections, cfg.grace + 2 * _REFUSING)

    def start(self, listener: socket.socket) -> None:
        """Answer on a bound socket, until `stop`."""
        self.engine.start()
        self._web.start(listener)

    @property
    def alive(self) -> bool:
        """False when the engine has failed, or the web server has ended."""
        return self.engine.alive and self._web.alive

    def wait(self, stopped: Callable[[], bool]) -> None:
        """Wait until `stopped()`, or until the server has ended by itself."""
        self._web.wait(stopped, lambda: self.engine.alive)

    def stop(self) -> None:
        """Accept no more requests; unfinished ones have `grace` seconds, then they fail."""
        if not self._web.stop(self.cfg.grace):
            self.engine.abort_all(ApiError(503, "the server is shutting down", code="shutting_down"))
            self._web.stop(2 * _REFUSING)
        self.engine.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket (port 0: any) before anything expensive: clients wait (UserError: not available)."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        said = f"cannot listen on {host}:{port} (--host, --port): {why}; --port 0 takes any free one"
        raise UserError(said) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return `http://HOST:PORT` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
