"""OpenAI's completions and chats of the same adapters: `model` is the base's name, or a path of saved weights.

The requests go the way of all others, so that tenants have their fair shares. Streams and alternatives of tokens are
those of `axl serve` alone.
"""

import asyncio
import itertools
from concurrent.futures import Future
from typing import Any

import numpy as np

from axlearn_like.tokenizers.protocol import Tokenizer
from rl.protocol.messages import Rollout
from rl.rollout.decoding.grammar import Grammars
from rl.rollout.request import Request, RequestOutput
from rl.rollout.sampling import Sampler
from rl.serving.adapters import ServedAdapters
from rl.serving.chat_template import ChatTemplate
from rl.serving.context import ServingContext
from rl.serving.errors import bad_field
from rl.serving.input.request import GenerationJob, parse
from rl.serving.output.answers import Answer
from rl.serving.service.messages import SampleOutput, SampleRequest, UnknownId
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
        """Return the body of a response.

        Raises:
            ApiError: names the field at fault.
        """
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str) and model.startswith("tinker://"):
            body = {**body, "model": self._service.base.name}
        job = parse(body, self._context, chat=chat)
        asked = [_as_sample(request, job, self._context) for request in job.requests]
        path = None if model == self._service.base.name else self._tenants.check_path(tenant, str(model))
        sampler = await self._sampler(tenant, path)
        futures: list[Future[SampleOutput]] = []
        try:
            for one in asked:
                futures.append(self._service.samplers.sample(tenant, sampler, next(self._numbers), one))
            outputs = [await asyncio.wrap_future(future) for future in futures]
        finally:  # a client that is gone, or a request that failed, leaves nothing running
            for future in futures:
                future.cancel()
        results = [_as_output(request, output) for request, output in zip(job.requests, outputs, strict=True)]
        return Answer(job, self._tokenizer, str(model), 0).whole(results)

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


def _as_sample(request: Request, job: GenerationJob, context: ServingContext) -> SampleRequest:
    """Return a request of the service, which has fewer settings."""
    sampler, stop = request.sampler or context.sampler, request.stop
    plain = Sampler.Config(temperature=sampler.temperature, top_k=sampler.top_k, top_p=sampler.top_p)
    assert stop is not None
    refused = {
        "stream": job.stream,
        "logprobs": job.logprobs is not None and job.logprobs > 0,
        "prompt_logprobs": request.prompt_scores,
        "response_format": request.grammar is not None,
        "min_tokens": stop.min_new_tokens > 0,
        "ignore_eos": not set(context.stop_tokens) <= set(stop.tokens),
        "sampling": sampler != plain,
    }
    for name, asked in refused.items():
        if asked:
            raise bad_field(name, "not supported by this service; leave it out")
    return SampleRequest(
        tokens=request.prompt.tokens,
        num_samples=request.samples,
        max_tokens=stop.max_new_tokens,
        temperature=sampler.temperature,
        top_k=-1 if sampler.top_k is None else sampler.top_k,
        top_p=sampler.top_p,
        seed=request.seed,
        stop=(*stop.tokens, *stop.strings),
    )


def _as_output(request: Request, output: SampleOutput) -> RequestOutput:
    rollouts = tuple(
        Rollout(
            prompt_id=request.prompt.id,
            sample_id=index,
            tokens=sample.tokens,
            logprobs=sample.logprobs,
            versions=np.zeros(len(sample.tokens), np.int32),
            action_mask=np.ones(len(sample.tokens), bool),
            finish_reason=sample.stop_reason,
        )
        for index, sample in enumerate(output.samples)
    )
    return RequestOutput(0, rollouts, scores=(None,) * len(rollouts))
