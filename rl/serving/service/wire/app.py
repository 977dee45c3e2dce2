"""The routes of the Tinker API, `/api/v1/...`, and of OpenAI's, `/v1/...`, in front of what trains and samples."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh import did_you_mean
from rl.serving.errors import ApiError
from rl.serving.input.fields import Fields
from rl.serving.service.messages import Json, ServiceBusy, ServiceError, UnknownId
from rl.serving.service.service import AdapterService
from rl.serving.service.wire.listing import checkpoints, page, training_runs
from rl.serving.service.wire.openai import OpenAIRoutes
from rl.serving.service.wire.promises import PromiseGone, Promises
from rl.serving.service.wire.requests import required_text
from rl.serving.service.wire.routes import Verb, VerbRoutes
from rl.serving.service.wire.tenants import SessionEnded, Tenants
from rl.serving.web.http import ClientGone, read_body, read_json, refusal, unless_gone

_LOG = logging.getLogger(__name__)
Handler = Callable[[HttpRequest], Awaitable[Response]]
OfTenant = Callable[[str, HttpRequest], Awaitable[Response]]


class ServiceApp:
    """The HTTP application; `asgi` is what a web server runs."""

    def __init__(
        self,
        service: AdapterService,
        tenants: Tenants,
        promises: Promises,
        *,
        max_body: int,
        connections: int,
        openai: OpenAIRoutes | None = None,
    ):
        """`max_body`: bytes of a request; `connections`: open ones that the server allows."""
        self._service, self._tenants, self._promises, self._max_body = service, tenants, promises, max_body
        self._verbs = VerbRoutes(service, tenants, promises)
        base = service.base
        known = {"model_name": base.name, "max_context_length": base.context_length, "trainable": True}
        # A client holds a connection for each sample that it waits for.
        config = {"sample_max_concurrent_requests": max(1, connections // 4)}
        posts: dict[str, Verb] = {
            "client/config": partial(_constant, config),
            "client/dynamic_config": partial(_constant, {"sample_cancel_enabled": True}),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "cancel_future": self._cancel,
            **self._verbs.posts,
        }
        gets: dict[str, Callable[[str, HttpRequest], Json]] = {
            "get_server_capabilities": lambda tenant, _: {"supported_models": [{**known, "sampleable": True}]},
            "samplers/{id}": self._verbs.sampler,
            "checkpoints": lambda tenant, request: page(checkpoints(service, tenant), "checkpoints", request),
            "training_runs": lambda tenant, request: page(training_runs(service, tenant), "training_runs", request),
            "training_runs/{id}": self._training_run,
            "training_runs/{id}/checkpoints": self._checkpoints,
        }
        others: dict[str, tuple[str, OfTenant]] = {
            "forward_backward": ("POST", partial(self._verbs.forward_backward, max_body=max_body)),
            "retrieve_future": ("POST", self._retrieve),
            "telemetry": ("POST", self._telemetry),
            "sessions/{id}/finish": ("POST", self._finish_session),
            "training_runs/{id}/checkpoints/{kind}/{name}": ("DELETE", self._delete_saved),
        }
        paths: dict[str, tuple[str, Handler]] = {"/api/v1/healthz": ("GET", self._health)}
        paths |= {f"/api/v1/{name}": ("POST", self._post(verb)) for name, verb in posts.items()}
        paths |= {f"/api/v1/{name}": ("GET", self._get(read)) for name, read in gets.items()}
        paths |= {f"/api/v1/{name}": (how, self._checked(one)) for name, (how, one) in others.items()}
        if openai is not None:
            paths["/v1/chat/completions"] = "POST", self._checked(partial(self._complete, openai, True))
            paths["/v1/completions"] = "POST", self._checked(partial(self._complete, openai, False))
            paths["/v1/models"] = "GET", self._get(lambda tenant, _: openai.models(tenant))
        self._paths = list(paths)
        routes = [Route(path, handler, methods=[how]) for path, (how, handler) in paths.items()]
        kinds = (ApiError, ClientGone, HTTPException, ServiceError, Exception)
        self.asgi = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, self._failed))

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

    async def _health(self, request: HttpRequest) -> Response:
        if (failure := self._service.failure()) is not None:
            raise ApiError(503, f"{failure}; start the service again", code="failed")
        return JSONResponse({"status": "ok"})

    async def _telemetry(self, tenant: str, request: HttpRequest) -> Response:
        await read_body(request, self._max_body)
        return JSONResponse({"status": "accepted"})

    async def _create_session(self, tenant: str, fields: Fields) -> Json:
        return {"type": "create_session", "session_id": self._tenants.open_session(tenant)}

    async def _heartbeat(self, tenant: str, fields: Fields) -> Json:
        self._tenants.touch(tenant, required_text(fields, "session_id", "the id of a session"))
        return {"type": "session_heartbeat"}

    async def _finish_session(self, tenant: str, request: HttpRequest) -> Response:
        session = request.path_params["id"]
        self._tenants.touch(tenant, session)
        self._tenants.end_session(tenant, session)
        return Response(status_code=204)

    async def _retrieve(self, tenant: str, request: HttpRequest) -> Response:
        fields = Fields(await read_json(request, self._max_body))
        id = self._promise(tenant, fields)
        outcome = await unless_gone(request.receive, self._promises.wait(tenant, id))
        if outcome is None:
            return JSONResponse({"type": "try_again", "request_id": id, "queue_state": "active"})
        return self._verbs.answer(outcome, size_first=fields.take_bool("allow_metadata_only"))

    async def _cancel(self, tenant: str, fields: Fields) -> Json:
        self._promises.cancel(tenant, self._promise(tenant, fields))
        return {}

    def _promise(self, tenant: str, fields: Fields) -> str:
        return self._tenants.check_promise(tenant, required_text(fields, "request_id", "the id of a promise"))

    def _training_run(self, tenant: str, request: HttpRequest) -> Json:
        model = request.path_params["id"]
        for run in training_runs(self._service, tenant):
            if run["training_run_id"] == model:
                return run
        raise UnknownId("model", model)

    def _checkpoints(self, tenant: str, request: HttpRequest) -> Json:
        model = self._training_run(tenant, request)["training_run_id"]
        return {"checkpoints": checkpoints(self._service, tenant, model)}

    async def _delete_saved(self, tenant: str, request: HttpRequest) -> Response:
        at = request.path_params
        path = self._tenants.check_path(tenant, f"tinker://{at['id']}/{at['kind']}/{at['name']}")
        await asyncio.to_thread(self._service.delete_saved, tenant, path)
        return Response(status_code=204)

    async def _complete(self, openai: OpenAIRoutes, chat: bool, tenant: str, request: HttpRequest) -> Response:
        body = await read_json(request, self._max_body)
        return JSONResponse(await unless_gone(request.receive, openai.answer(tenant, body, chat=chat)))


async def _constant(value: Json, tenant: str, fields: Fields) -> Json:
    return value
