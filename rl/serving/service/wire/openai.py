"""OpenAI's completions and chats of the same adapters: `model` is the base's name, or a path of saved weights.

The requests go the way of all others, so that tenants have their fair shares. Streams are those of `axl serve` alone.
"""

import asyncio
import itertools
from concurrent.futures import Future
from typing import Any

from axlearn_like.tokenizers.protocol import Tokenizer
from rl.rollout.decoding.grammar import Grammars
from rl.rollout.request import RequestOutput
from rl.rollout.sampling import Sampler
from rl.serving.adapters import ServedAdapters
from rl.serving.chat_template import ChatTemplate
from rl.serving.context import ServingContext
from rl.serving.errors import bad_field
from rl.serving.input.request import parse
from rl.serving.output.answers import Answer
from rl.serving.service.messages import UnknownId
from rl.serving.service.service import AdapterService
from rl.serving.service.wire.tenants import Tenants

_DEADLINE = 600.0  # seconds
_MOST_SAMPLES = 64


class OpenAIRoutes:
    """Answers of `/v1/completions` and `/v1/chat/completions` by the adapters of a tenant."""

    def __init__(self, service: AdapterService, tenants: Tenants, tokenizer: Tokenizer, limits: tuple[int, int]):
        """`limits`: tokens of a prompt and of an answer."""
        self._service, self._tenants, self._tokenizer = service, tenants, tokenizer
        self._context = ServingContext(
            models=ServedAdapters(service.base.name),
            tokenizer=tokenizer,
            template=ChatTemplate.Config().build(tokenizer=tokenizer),
            max_prompt_tokens=limits[0],
            max_new_tokens=limits[1],
            stop_tokens=tuple(tokenizer.stop_ids),
            sampler=Sampler.Config(),
            max_samples=_MOST_SAMPLES,
            deadline=_DEADLINE,
            grammars=Grammars(tokenizer),
        )
        self._sessions: dict[str, str] = {}  # tenant -> session of its samplers here
        self._samplers: dict[tuple[str, str | None, float], str] = {}  # (tenant, path, time of its saving) -> sampler
        self._numbers = itertools.count()  # numbers of samplers and of their requests

    def models(self, tenant: str) -> dict[str, Any]:
        """Return the list of models."""
        names = [self._service.base.name, *(facts.path for facts in self._service.saved(tenant))]
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "axlearn-like"} for name in names]
        return {"object": "list", "data": cards}

    async def answer(self, tenant: str, body: Any, *, chat: bool) -> dict[str, Any]:
        """Return the body of a response (ApiError: names the field at fault)."""
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str) and model.startswith("tinker://"):
            body = {**body, "model": self._service.base.name}
        job = parse(body, self._context, chat=chat)
        if job.stream:
            raise bad_field("stream", "not supported by this service; leave it out")
        path = None if model == self._service.base.name else self._tenants.check_path(tenant, str(model))
        sampler = await self._sampler(tenant, path)
        futures: list[Future[RequestOutput]] = []
        try:
            for one in job.requests:
                futures.append(self._service.samplers.sample(tenant, sampler, next(self._numbers), one))
            outputs = [await asyncio.wrap_future(future) for future in futures]
        finally:  # a client that is gone, or a request that failed, leaves nothing running
            for future in futures:
                future.cancel()
        return Answer(job, self._tokenizer, str(model), 0).whole(outputs)

    async def _sampler(self, tenant: str, path: str | None) -> str:
        """Return an open sampler of saved weights, as they are now, or of the base."""
        saved = {facts.path: facts.created for facts in self._service.saved(tenant)} if path is not None else {}
        if path is not None and path not in saved:
            raise UnknownId("path", path)
        session = self._sessions.get(tenant)
        if session is None or self._tenants.is_over(session):
            session = self._sessions[tenant] = self._tenants.open_session(tenant)
            self._samplers = {key: sampler for key, sampler in self._samplers.items() if key[0] != tenant}
        self._tenants.touch(tenant, session)
        key = (tenant, path, 0.0 if path is None else saved[path])
        if key not in self._samplers:
            sampler = f"{session}:sample:{next(self._numbers)}"
            await asyncio.to_thread(self._service.samplers.open, tenant, sampler, path)
            self._samplers[key] = sampler
        return self._samplers[key]
