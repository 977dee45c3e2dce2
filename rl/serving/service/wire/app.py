"""The routes of the Tinker API, `/api/v1/...`, and of OpenAI's, `/v1/...`, in front of what trains and samples."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh import did_you_mean
from rl.serving.errors import ApiError
from rl.serving.input.fields import Fields
from rl.serving.service.messages import ServiceError
from rl.serving.service.verbs import ServiceBusy, ServiceVerbs, UnknownId
from rl.serving.service.wire.answers import answer
from rl.serving.service.wire.listing import Json, checkpoints, page, training_runs
from rl.serving.service.wire.models import ModelRoutes, Verb
from rl.serving.service.wire.openai import OpenAIRoutes
from rl.serving.service.wire.promises import PromiseGone, Promises
from rl.serving.service.wire.protobuf import ProtobufCodec
from rl.serving.service.wire.requests import required_text
from rl.serving.service.wire.samplers import SamplerRoutes
from rl.serving.service.wire.tenants import SessionEnded, Tenants
from rl.serving.web.http import ClientGone, read_body, read_json, refusal, unless_gone

_API = "/api/v1"
_LOG = logging.getLogger(__name__)
Handler = Callable[[HttpRequest], Awaitable[Response]]
OfTenant = Callable[[str, HttpRequest], Awaitable[Response]]


class ServiceApp:
    """The HTTP application; `asgi` is what a web server runs."""

    def __init__(
        self,
        verbs: ServiceVerbs,
        tenants: Tenants,
        promises: Promises,
        *,
        max_body: int,
        connections: int,
        openai: OpenAIRoutes | None = None,
    ):
        """`max_body`: bytes of a request; `connections`: open ones that the server allows."""
        self._verbs, self._tenants, self._promises, self._max_body = verbs, tenants, promises, max_body
        self._codec = ProtobufCodec(verbs.base)
        self._models = ModelRoutes(verbs, tenants, promises, self._codec)
        samplers = SamplerRoutes(verbs, tenants, promises)
        # A client holds a connection for each sample that it waits for.
        self._client_config = {"sample_max_concurrent_requests": max(1, connections // 4)}
        posts: dict[str, Verb] = {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "cancel_future": self._cancel,
            **self._models.posts,
            **samplers.posts,
        }
        gets: dict[str, Callable[[str, HttpRequest], Json]] = {
            "get_server_capabilities": self._capabilities,
            "samplers/{id}": samplers.facts,
            "checkpoints": lambda tenant, request: page(checkpoints(verbs, tenant), "checkpoints", request),
            "training_runs": lambda tenant, request: page(training_runs(verbs, tenant), "training_runs", request),
            "training_runs/{id}": self._training_run,
            "training_runs/{id}/checkpoints": self._checkpoints,
        }
        others: dict[str, tuple[str, OfTenant]] = {
            "forward_backward": ("POST", self._forward_backward),
            "retrieve_future": ("POST", self._retrieve),
            "telemetry": ("POST", self._telemetry),
            "sessions/{id}/finish": ("POST", self._finish_session),
            "training_runs/{id}/checkpoints/{kind}/{name}": ("DELETE", self._delete_saved),
        }
        routes = [
            *([] if openai is None else self._openai_routes(openai)),
            Route(f"{_API}/healthz", self._health),
            *(Route(f"{_API}/{name}", self._post(verb), methods=["POST"]) for name, verb in posts.items()),
            *(Route(f"{_API}/{name}", self._get(read)) for name, read in gets.items()),
            *(Route(f"{_API}/{name}", self._checked(one), methods=[how]) for name, (how, one) in others.items()),
        ]
        self._paths = [route.path for route in routes]
        kinds = (ApiError, ClientGone, HTTPException, ServiceError, Exception)
        self.asgi = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, self._failed))

    def _openai_routes(self, openai: OpenAIRoutes) -> list[Route]:
        def answering(chat: bool) -> Handler:
            async def handler(tenant: str, request: HttpRequest) -> Response:
                body = await read_json(request, self._max_body)
                return JSONResponse(await unless_gone(request.receive, openai.answer(tenant, body, chat=chat)))

            return self._checked(handler)

        return [
            Route("/v1/chat/completions", answering(True), methods=["POST"]),
            Route("/v1/completions", answering(False), methods=["POST"]),
            Route("/v1/models", self._get(lambda tenant, _: openai.models(tenant))),
        ]

    # ---- access and errors

    def _checked(self, handler: OfTenant) -> Handler:
        """Return a handler that refuses requests without a tenant's key."""

        async def checked(request: HttpRequest) -> Response:
            scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
            key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
            tenant = self._tenants.of_key(key)
            if tenant is None:
                said = "the API key is wrong" if key else "no API key; expected the header 'X-API-Key: KEY'"
                raise ApiError(401, said, code="invalid_api_key")
            return await handler(tenant, request)

        return checked

    def _post(self, verb: Verb) -> Handler:
        async def handler(tenant: str, request: HttpRequest) -> Response:
            return JSONResponse(await verb(tenant, Fields(await read_json(request, self._max_body))))

        return self._checked(handler)

    def _get(self, read: Callable[[str, HttpRequest], Json]) -> Handler:
        async def handler(tenant: str, request: HttpRequest) -> Response:
            return JSONResponse(await asyncio.to_thread(read, tenant, request))

        return self._checked(handler)

    async def _failed(self, request: HttpRequest, error: Exception) -> Response:
        """Answer what was raised; the traceback of a bug goes to the log."""
        path = request.url.path[:200]
        match error:
            case ClientGone():
                return Response(status_code=499)
            case ApiError():
                return refusal(error)
            case HTTPException(status_code=404):
                return refusal(ApiError(404, f"no path {path!r} here{did_you_mean(path, self._paths)}"))
            case HTTPException():
                return refusal(ApiError(error.status_code, f"{request.method} {path}: {error.detail}"))
            case UnknownId():
                return refusal(ApiError(404, str(error), code="unknown_id"))
            case PromiseGone() | SessionEnded():
                return refusal(ApiError(410, str(error), code="gone"))
            case ServiceBusy():
                again = max(1, math.ceil(error.retry_after))
                return refusal(ApiError(429, str(error), code="busy", retry_after=again))
            case ServiceError():
                return refusal(ApiError(400 if error.category == "user" else 500, str(error), code="refused"))
            case _:
                _LOG.error("%s %s failed", request.method, path, exc_info=error)
                return refusal(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))

    # ---- the service

    async def _health(self, request: HttpRequest) -> Response:
        del request
        return JSONResponse({"status": "ok"})

    async def _config(self, tenant: str, fields: Fields) -> Json:
        del tenant, fields
        return self._client_config

    async def _dynamic_config(self, tenant: str, fields: Fields) -> Json:
        del tenant, fields
        return {"sample_cancel_enabled": True}

    def _capabilities(self, tenant: str, request: HttpRequest) -> Json:
        del tenant, request
        base = self._verbs.base
        facts = {"model_name": base.name, "max_context_length": base.context_length}
        return {"supported_models": [{**facts, "trainable": True, "sampleable": True}]}

    async def _telemetry(self, tenant: str, request: HttpRequest) -> Response:
        del tenant
        await read_body(request, self._max_body)
        return JSONResponse({"status": "accepted"})

    # ---- sessions

    async def _create_session(self, tenant: str, fields: Fields) -> Json:
        del fields
        return {"type": "create_session", "session_id": self._tenants.open_session(tenant)}

    async def _heartbeat(self, tenant: str, fields: Fields) -> Json:
        self._tenants.touch(tenant, required_text(fields, "session_id", "the id of a session"))
        return {"type": "session_heartbeat"}

    async def _finish_session(self, tenant: str, request: HttpRequest) -> Response:
        session = request.path_params["id"]
        self._tenants.touch(tenant, session)
        self._tenants.end_session(tenant, session)
        return Response(status_code=204)

    # ---- passes and promises

    async def _forward_backward(self, tenant: str, request: HttpRequest) -> Response:
        return JSONResponse(await self._models.forward_backward(tenant, request, self._max_body))

    async def _retrieve(self, tenant: str, request: HttpRequest) -> Response:
        fields = Fields(await read_json(request, self._max_body))
        id = self._tenants.check_promise(tenant, required_text(fields, "request_id", "the id of a promise"))
        promise = await unless_gone(request.receive, self._promises.wait(tenant, id))
        if promise is None:
            return JSONResponse({"type": "try_again", "request_id": id, "queue_state": "active"})
        size_first = fields.take_bool("allow_metadata_only")
        response, whole = answer(self._codec, promise.outcome(), size_first=size_first)
        if whole:
            promise.sent()
        return response

    async def _cancel(self, tenant: str, fields: Fields) -> Json:
        id = self._tenants.check_promise(tenant, required_text(fields, "request_id", "the id of a promise"))
        self._promises.cancel(tenant, id)
        return {}

    # ---- what there is

    def _training_run(self, tenant: str, request: HttpRequest) -> Json:
        model = request.path_params["id"]
        for run in training_runs(self._verbs, tenant):
            if run["training_run_id"] == model:
                return run
        raise UnknownId("model", model)

    def _checkpoints(self, tenant: str, request: HttpRequest) -> Json:
        return {"checkpoints": checkpoints(self._verbs, tenant, self._training_run(tenant, request)["training_run_id"])}

    async def _delete_saved(self, tenant: str, request: HttpRequest) -> Response:
        at = request.path_params
        path = self._tenants.check_path(tenant, f"tinker://{at['id']}/{at['kind']}/{at['name']}")
        await asyncio.to_thread(self._verbs.delete_saved, tenant, str(path))
        return Response(status_code=204)
