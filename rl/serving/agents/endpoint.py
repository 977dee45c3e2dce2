"""The endpoint of a process's agents: `http://127.0.0.1:PORT/SESSION/v1`, one session an episode.

The routes are those of `axl serve`; the name of a session is a secret of its agent. `POST /SESSION/reward` takes the
reward of the episode, `{"reward": 1.0, "metrics": {"name": 0.5}}`.
"""

import secrets
from typing import Any, override

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from axlearn_like.tokenizers.protocol import Tokenizer
from mesh.errors import UserError
from rl.rollout.decoding.grammar import Grammars
from rl.rollout.sampling import Sampler
from rl.serving.adapters import ServedAdapters
from rl.serving.agents.session import NO_LIMIT, AgentSession
from rl.serving.app import App
from rl.serving.context import ServingContext
from rl.serving.errors import ApiError, bad_field
from rl.serving.input.fields import Fields
from rl.serving.server import listen, url_of
from rl.serving.web.http import check_access, read_json, refusal
from rl.serving.web.thread import WebThread
from rl.verification.rewards import check_terms, number

_MAX_BODY = 1 << 24  # bytes of a request
_CONNECTIONS = 4096


class AgentEndpoint:
    """A web server in a thread, until `close`."""

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.chat_template is None:
            raise UserError("agents speak in messages; expected a tokenizer with a chat template")
        self._tokenizer = tokenizer
        self._apps: dict[str, ASGIApp] = {}
        self._listener = listen("127.0.0.1", 0)
        self._web = WebThread(self._route, _CONNECTIONS, grace=1.0)
        self._web.start(self._listener)

    def open(self) -> tuple[str, AgentSession]:
        """Return the address of a new session, and its requests."""
        name, session = secrets.token_hex(16), AgentSession(self._tokenizer)
        self._apps[name] = _application(self._tokenizer, session)
        return f"{url_of(self._listener)}/{name}", session

    def forget(self, url: str) -> None:
        """Close a session: further requests are refused."""
        self._apps.pop(url.rpartition("/")[2], None)

    def close(self) -> None:
        """End the server."""
        self._web.stop(5.0)
        self._listener.close()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, name, path = (*scope["path"].split("/", 2), "", "")[:3]
        app = self._apps.get(name)
        if app is None:
            gone = ApiError(404, "no episode has this address, or it is over", code="unknown_session")
            return await refusal(gone)(scope, receive, send)
        await app({**scope, "path": f"/{path}", "raw_path": f"/{path}".encode()}, receive, send)


class _AnyModel(ServedAdapters):
    """The policy, by whatever name an agent calls it."""

    @override
    def find(self, name: str) -> None:
        return None


def _application(tokenizer: Tokenizer, session: AgentSession) -> ASGIApp:
    context = ServingContext(
        models=_AnyModel("policy"),
        tokenizer=tokenizer,
        template=session.history,
        max_prompt_tokens=NO_LIMIT,
        max_new_tokens=NO_LIMIT,
        stop_tokens=tuple(tokenizer.stop_ids),
        sampler=Sampler.Config(),
        max_samples=1,
        deadline=float(NO_LIMIT),
        grammars=Grammars(tokenizer),
    )
    app = App(session, context, max_queue=64, max_body=_MAX_BODY)

    async def reward(request: HttpRequest) -> Response:
        try:
            check_access(request, None)
            fields = Fields(await read_json(request, _MAX_BODY))
            given: Any = fields.take("reward")
            metrics: Any = fields.take("metrics") or {}
            fields.finish()
            session.reward, session.metrics = number(given, "the agent"), dict(check_terms(metrics))
        except (TypeError, AttributeError) as error:
            return refusal(bad_field("reward", str(error)))
        except ApiError as error:
            return refusal(error)
        return JSONResponse({"reward": session.reward})

    return Starlette(routes=[Route("/reward", reward, methods=["POST"]), Mount("/", app.asgi)])
