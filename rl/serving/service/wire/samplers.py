"""Routes of sampling: samplers, and what they draw."""

import asyncio
from concurrent.futures import Future
from typing import Any

from starlette.requests import Request as HttpRequest

from rl.serving.errors import ApiError
from rl.serving.input.fields import Fields
from rl.serving.service.messages import SampleRequest, ServiceError
from rl.serving.service.verbs import ServiceVerbs
from rl.serving.service.wire.listing import Json
from rl.serving.service.wire.promises import Promises
from rl.serving.service.wire.requests import (
    IGNORED,
    check_base,
    required_int,
    required_text,
    sample_request,
    session_part,
)
from rl.serving.service.wire.tenants import Tenants

# Fields that are not supported, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "topk_sample_logprobs": (0,),
    "target_prompt_logprobs": (),
    "prompt_alt_tokens_k": (0,),
    "prompt_logprobs_last_n": (),
    "record_stability_info": (False,),
}


class SamplerRoutes:
    """Handlers of the verbs that sample; `posts` are those with a JSON body, by name."""

    def __init__(self, verbs: ServiceVerbs, tenants: Tenants, promises: Promises):
        self._verbs, self._tenants, self._promises = verbs, tenants, promises
        self.posts = {"create_sampling_session": self._open, "asample": self._sample}

    def facts(self, tenant: str, request: HttpRequest) -> Json:
        """Return what a sampler draws from."""
        sampler = self._tenants.check_sampler(tenant, request.path_params["id"])
        path, base = self._verbs.sampler_path(tenant, sampler), self._verbs.base
        # A client loads the tokenizer of this name.
        return {"sampler_id": sampler, "base_model": base.tokenizer or base.name, "model_path": path}

    async def _open(self, tenant: str, fields: Fields) -> Json:
        sampler = session_part(self._tenants, tenant, fields, "sample", "sampling_session_seq_id")
        path, base = fields.take_text("model_path"), fields.take_text("base_model")
        fields.finish(IGNORED)
        if path is None and base is None:
            raise fields.missing("base_model", "the name of the base, or model_path")
        check_base(base, self._verbs.base)
        checked = None if path is None else str(self._tenants.check_path(tenant, path))
        await asyncio.wrap_future(await asyncio.to_thread(self._verbs.open_sampler, tenant, sampler, checked))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def _sample(self, tenant: str, fields: Fields) -> Json:
        sampler = required_text(fields, "sampling_session_id", "the id of a sampler")
        sampler, seq = self._tenants.check_sampler(tenant, sampler), required_int(fields, "seq_id")
        asked = self._read(fields)

        def start() -> Future[Any]:
            if isinstance(asked, ServiceError):
                raise asked
            return self._verbs.sample(tenant, sampler, seq, asked)

        promise = await self._promises.accept(tenant, sampler, seq, start)
        count = 1 if isinstance(asked, ServiceError) else asked.num_samples
        return {"request_id": promise.id, "sample_sequence_ids": [f"{promise.id}-{n}" for n in range(count)]}

    def _read(self, fields: Fields) -> SampleRequest | ServiceError:
        try:
            asked = sample_request(fields, self._verbs.base)
            fields.finish(IGNORED, _NEUTRAL)
        except ApiError as error:
            return ServiceError(error.message)
        return asked
