"""The routes: completions, chat, models, health, metrics; access to them, and the limit of waiting requests."""

import asyncio
import dataclasses
import functools
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh import did_you_mean
from rl.rollout.request import RequestOutput
from rl.serving.context import ServingContext
from rl.serving.engine_thread import Done, EngineThread, Event, Failed, NewTokens, Stream
from rl.serving.errors import ApiError
from rl.serving.generate import GenerateWriter, as_completion
from rl.serving.input.grammars import takes_time
from rl.serving.input.prompts import detokenized, tokenized
from rl.serving.input.request import GenerationJob, parse
from rl.serving.input.responses import as_chat, renamed
from rl.serving.output.answers import Answer, problem
from rl.serving.output.responses import ResponseWriter
from rl.serving.web.http import ClientGone, EventStream, check_access, read_json, refusal, unless_gone
from rl.serving.web.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from rl.serving.agents.session import AgentSession

CLIENT_GONE = 499  # the status counted for a client that did not wait; it is sent to nobody
LONGEST_RETRY = 60  # seconds

# Endpoints that answer, by their names in the metrics.
_ANSWERS = (
    ("completions", "/v1/completions"),
    ("chat", "/v1/chat/completions"),
    ("responses", "/v1/responses"),
    ("generate", "/inference/v1/generate"),
)
Handler = Callable[[HttpRequest], Awaitable[Response]]
_Writer = ResponseWriter | GenerateWriter  # endpoints whose answers are made of a completion's or a chat's


class App:
    """The HTTP application in front of an engine; `asgi` is what a web server runs."""

    def __init__(
        self,
        engine: "EngineThread | AgentSession",
        context: ServingContext,
        *,
        max_queue: int,
        max_body: int,
        api_key: str | None = None,
        allowed_hosts: tuple[str, ...] = (),
    ):
        """`max_queue`: requests without a first token; `max_body`: bytes; the rest: see `check_access`, for /v1."""
        self._engine, self._context = engine, context
        self._max_queue, self._max_body = max_queue, max_body
        self._check_access = functools.partial(check_access, key=api_key, allowed_hosts=allowed_hosts)
        self._jobs: set[_Job] = set()
        self._first_token_seconds = 1.0  # recent ones, averaged
        self._created = int(time.time())
        self.metrics = Metrics(lambda: engine.stats)
        self.metrics.waiting.set_function(lambda: self._waiting())
        self.metrics.running.set_function(lambda: len(self._jobs) - self._waiting())
        routes = [
            *(Route(path, functools.partial(self._answer, endpoint=name), methods=["POST"]) for name, path in _ANSWERS),
            Route("/v1/embeddings", self._embeddings, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/load_lora_adapter", self._administer(context.models.load), methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._administer(context.models.unload), methods=["POST"]),
            Route("/v1/models/{name:path}", self._model),
            Route("/tokenize", self._converts(tokenized), methods=["POST"]),
            Route("/detokenize", self._converts(detokenized), methods=["POST"]),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
        ]
        self._paths = [route.path for route in routes]
        kinds = (ApiError, ClientGone, HTTPException, Exception)
        self.asgi = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, self._failed))

    def _waiting(self) -> int:
        return sum(not job.stream.begun for job in self._jobs)

    # ---- generation

    async def _embeddings(self, request: HttpRequest) -> Response:
        self._check_access(request)
        said = "this server draws words: its policy has no head for embeddings (see `axl models`)"
        raise ApiError(400, said, param="model", code="not_supported")

    async def _answer(self, request: HttpRequest, *, endpoint: str) -> Response:
        writer, chat = None, endpoint in ("chat", "responses")
        try:
            self._check_access(request)
            body = await read_json(request, self._max_body)
            if endpoint == "responses":
                body, writer = as_chat(body), ResponseWriter(body)
            elif endpoint == "generate":
                body, writer = as_completion(body), GenerateWriter(body)
            read = functools.partial(parse, body, self._context, chat=chat)
            generation = await asyncio.to_thread(read) if takes_time(body) else read()
            if isinstance(writer, ResponseWriter):
                generation = dataclasses.replace(generation, usage_in_stream=True)
            job = self._begin(endpoint, generation, writer)
        except ApiError as error:
            self._count(endpoint, error.status)
            raise error if writer is None else renamed(error, writer.names) from None
        except ClientGone:
            self._count(endpoint, CLIENT_GONE)
            raise
        if generation.stream:
            return await self._streamed(request, job)
        return await self._whole(request, job)

    def _check_alive(self) -> None:
        if not self._engine.alive:
            raise ApiError(503, "the engine has failed; the server is going down", code="engine_failed")

    def _begin(self, endpoint: str, generation: GenerationJob, writer: _Writer | None) -> "_Job":
        self._check_alive()
        waiting = self._waiting()
        if waiting >= self._max_queue:
            again = min(max(1, math.ceil(self._first_token_seconds)), LONGEST_RETRY)
            said = f"{waiting} requests are waiting and {self._max_queue} are the most; try again in {again} s"
            raise ApiError(429, said, code="queue_full", retry_after=again)
        answer = Answer(generation, self._context.tokenizer, generation.model, self._engine.version)
        job = _Job(endpoint, generation, self._engine.submit(generation.requests), answer, writer)
        self._jobs.add(job)
        return job

    async def _whole(self, request: HttpRequest, job: "_Job") -> Response:
        status = CLIENT_GONE
        try:
            outputs = await unless_gone(request.receive, self._collect(job))
            body = job.answer.whole(outputs)
            error = problem([rollout for output in outputs for rollout in output.rollouts])
            if error is not None:
                error.partial = body["choices"]
                raise error
            status = 200
            return JSONResponse(body if job.writer is None else job.writer.whole(body))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        except ApiError as error:
            status = error.status
            raise
        finally:
            self._end(job, status)

    async def _collect(self, job: "_Job") -> list[RequestOutput]:
        found: dict[int, RequestOutput] = {}
        while len(found) < len(job.stream.requests):
            event = await self._next(job)
            if isinstance(event, Done):
                found[event.index] = event.output
        return [found[index] for index in sorted(found)]

    async def _streamed(self, request: HttpRequest, job: "_Job") -> Response:
        status = CLIENT_GONE
        try:
            # A refusal can have a status only before anything has been sent.
            first = await unless_gone(request.receive, self._next(job))
        except ClientGone:
            self._end(job, status)
            return Response(status_code=status)
        except BaseException as error:
            self._end(job, error.status if isinstance(error, ApiError) else status)
            raise

        def on_end(whole: bool) -> None:
            self._end(job, job.status if whole else CLIENT_GONE)

        chunks = self._chunks(job, first)
        return EventStream(job.writer.events(chunks) if isinstance(job.writer, ResponseWriter) else chunks, on_end)

    async def _chunks(self, job: "_Job", event: Event) -> AsyncGenerator[dict[str, Any]]:
        """Yield the objects of a stream; an error after the first chunk is the last of them."""
        answer, left = job.answer, len(job.stream.requests)
        for chunk in answer.opening():
            yield chunk
        try:
            while True:
                if isinstance(event, NewTokens):
                    for chunk in answer.more(event.index, event.sample, event.tokens, event.logprobs, event.scores):
                        yield chunk
                elif isinstance(event, Done):
                    error = problem(event.rollouts)
                    if error is not None:
                        raise error
                    for chunk in answer.end(event.index, event.output):
                        yield chunk
                    left -= 1
                if not left:
                    break
                event = await self._next(job)
        except ApiError as error:
            job.status = error.status
            yield error.body()
            return
        if job.generation.usage_in_stream:
            yield answer.usage_chunk()

    async def _next(self, job: "_Job") -> Event:
        """Return the next event, counted; raises the error of a failure."""
        event = await job.stream.next()
        now = time.monotonic()
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, NewTokens):
            self.metrics.generated_tokens.inc(len(event.tokens))
            if not job.paces:
                waited = now - job.began
                self.metrics.first_token.observe(waited)
                self._first_token_seconds += 0.1 * (waited - self._first_token_seconds)
            pace = job.paces.setdefault((event.index, event.sample), _Pace(now, now, -len(event.tokens)))
            pace.last, pace.tokens = now, pace.tokens + len(event.tokens)
        return event

    def _end(self, job: "_Job", status: int) -> None:
        """Count a job as ended, and abort what still runs of it."""
        self._jobs.discard(job)
        if status != 200:
            self._engine.abort(job.stream)
        self._count(job.endpoint, status)
        self.metrics.prompt_tokens.inc(job.generation.prompt_tokens)
        for pace in job.paces.values():
            if pace.tokens:
                self.metrics.each_token.observe((pace.last - pace.first) / pace.tokens)

    def _count(self, endpoint: str, status: int) -> None:
        self.metrics.requests.labels(endpoint, str(status)).inc()

    # ---- other routes

    async def _models(self, request: HttpRequest) -> Response:
        self._check_access(request)
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._context.models.names]})

    async def _model(self, request: HttpRequest) -> Response:
        self._check_access(request)
        name = request.path_params["name"]
        self._context.models.find(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "axlearn-like"}
        return card | self._context.models.card(name)

    def _administer(self, change: Callable[[Any, EngineThread], Awaitable[str]]) -> Handler:
        async def answer(request: HttpRequest) -> Response:
            self._check_access(request)
            self._check_alive()
            if not isinstance(self._engine, EngineThread):
                raise ApiError(403, "this server has no adapters", code="not_allowed")
            said = await change(await read_json(request, self._max_body), self._engine)
            return Response(said, media_type="text/plain")

        return answer

    def _converts(self, convert: Callable[[Any, ServingContext], Any]) -> Handler:
        async def answer(request: HttpRequest) -> Response:
            self._check_access(request)
            return JSONResponse(convert(await read_json(request, self._max_body), self._context))

        return answer

    async def _health(self, request: HttpRequest) -> Response:
        alive = self._engine.alive
        body = {
            "status": "ok" if alive else "failed",
            "model": self._context.models.names[0],
            "version": self._engine.version,
        }
        return JSONResponse(body, 200 if alive else 503)

    async def _version(self, request: HttpRequest) -> Response:
        return JSONResponse({"version": version("axlearn-like")})

    async def _metrics(self, request: HttpRequest) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _failed(self, request: HttpRequest, error: Exception) -> Response:
        """Answer what was raised; the traceback of a bug goes to the log."""
        if isinstance(error, ClientGone):
            return Response(status_code=CLIENT_GONE)
        path = request.url.path[:200]
        if isinstance(error, HTTPException) and error.status_code == 404:
            said = f"no path {path!r} here{did_you_mean(path, self._paths)}"
            return refusal(ApiError(404, said, code="unknown_path"))
        if isinstance(error, HTTPException):
            return refusal(ApiError(error.status_code, f"{request.method} {path}: {error.detail}"))
        if isinstance(error, ApiError):
            return refusal(error)
        return refusal(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))


@dataclasses.dataclass
class _Pace:
    """Arrival of a sample's first and last tokens (monotonic seconds), and the number after the first ones."""

    first: float
    last: float
    tokens: int


@dataclasses.dataclass(eq=False)
class _Job:
    """One unfinished generation, and the time of the monotonic clock when it began."""

    endpoint: str
    generation: GenerationJob
    stream: Stream
    answer: Answer
    writer: _Writer | None
    status: int = 200  # status of an ended stream
    began: float = field(default_factory=time.monotonic)
    paces: dict[tuple[int, int], _Pace] = field(default_factory=dict)  # (request, sample) -> pace
