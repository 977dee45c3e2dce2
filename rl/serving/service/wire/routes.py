"""The verbs that train and sample: from the fields of a body to a request, and the promise of its result."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from rl.serving.errors import ApiError
from rl.serving.input.fields import Fields
from rl.serving.service.messages import (
    CreateModel,
    Json,
    LoadState,
    LossOutput,
    OpenSampler,
    Outcome,
    Request,
    ServiceError,
)
from rl.serving.service.service import AdapterService
from rl.serving.service.wire.listing import model_info, weights_info
from rl.serving.service.wire.promises import Promises
from rl.serving.service.wire.protobuf import CONTENT_TYPE, ProtobufCodec
from rl.serving.service.wire.requests import (
    IGNORED,
    adam_params,
    check_base,
    check_optimizer,
    lora_spec,
    required_int,
    required_text,
    sample_request,
    save_state,
)
from rl.serving.service.wire.tenants import Tenants
from rl.serving.web.http import read_body

_LARGE = 1 << 20  # bytes of an answer from which a client is told the size first, since it bounds what it holds
Verb = Callable[[str, Fields], Awaitable[Json]]
Read = Callable[[str, str, int, Fields], Request]  # tenant, model, number, fields -> request


class VerbRoutes:
    """Handlers; `posts` are those with a JSON body, by name."""

    def __init__(self, service: AdapterService, tenants: Tenants, promises: Promises):
        self._service, self._tenants, self._promises, self._codec = service, tenants, promises, ProtobufCodec()
        numbered: dict[str, Read] = {
            "optim_step": lambda tenant, model, seq, fields: adam_params(fields),
            "save_weights": lambda tenant, model, seq, fields: save_state(fields, "weights", seq),
            "save_weights_for_sampler": self._save_for_sampler,
        }
        self.posts: dict[str, Verb] = {
            **{name: partial(self._numbered, read) for name, read in numbered.items()},
            "create_model": self._create,
            "load_weights": self._load,
            "unload_model": self._unload,
            "get_info": self._info,
            "weights_info": self._weights_info,
            "create_sampling_session": self._open_sampler,
            "asample": self._sample,
        }

    async def forward_backward(self, tenant: str, request: HttpRequest, max_body: int) -> Response:
        """Accept a pass, whose body is protobuf."""
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            raise ServiceError(f"Content-Encoding {encoding[:40]!r}; expected none")
        message = self._codec.request(await read_body(request, max_body))
        model, seq = self._tenants.check_model(tenant, message.model_id), message.seq_id
        if seq < 1:
            raise ServiceError(f"seq_id: got {seq}; expected an integer from 1")
        return JSONResponse(await self._promise(tenant, model, seq, lambda: self._codec.content(message, model)))

    async def _promise(self, tenant: str, model: str, seq: int, read: Callable[[], Request]) -> Json:
        """Accept a request of a model, which is read and put on disk in another thread."""

        def start() -> Future[Any]:
            return self._service.submit(tenant, model, seq, read())

        return _promised(await self._promises.accept(tenant, model, seq, start))

    async def _numbered(self, read: Read, tenant: str, fields: Fields) -> Json:
        model = self._model(tenant, fields)
        seq = required_int(fields, "seq_id", 1)

        def whole() -> Request:
            request = read(tenant, model, seq, fields)
            fields.finish(IGNORED)
            return request

        return await self._promise(tenant, model, seq, whole)

    async def _create(self, tenant: str, fields: Fields) -> Json:
        model = self._session_part(tenant, fields, "train", "model_seq_id")

        def read() -> Request:
            check_base(required_text(fields, "base_model", "the name of the base"), self._service.base)
            check_optimizer(fields.take("optimizer_config"))
            spec = lora_spec(fields.take("lora_config"), model, self._service.base)
            fields.finish(IGNORED)
            return CreateModel(spec)

        return await self._promise(tenant, model, 0, read)

    async def _load(self, tenant: str, fields: Fields) -> Json:
        """Load into a model that exists, or into a new one, whose first request this is."""
        given = fields.take_text("model_id")
        if given is None:
            model, seq = self._session_part(tenant, fields, "train", "model_seq_id"), 0
        else:
            model, seq = self._tenants.check_model(tenant, given), required_int(fields, "seq_id", 1)

        def read() -> Request:
            path = self._tenants.check_path(tenant, required_text(fields, "path", "a path tinker://..."))
            check_base(fields.take_text("base_model"), self._service.base)
            check_optimizer(fields.take("optimizer_config"))
            optimizer = fields.take_bool("optimizer")
            fields.finish(IGNORED)
            return LoadState(path, optimizer) if seq else CreateModel(path=path, optimizer=optimizer)

        return await self._promise(tenant, model, seq, read)

    def _save_for_sampler(self, tenant: str, model: str, seq: int, fields: Fields) -> Request:
        """Save under a name, or open a sampler of the weights as they are."""
        number = fields.take("sampling_session_seq_id")
        if number is None:
            return save_state(fields, "sampler_weights", seq)
        fields.take("path")
        return OpenSampler(self._tenants.check_sampler(tenant, f"{model.partition(':')[0]}:sample:{number}"))

    async def _unload(self, tenant: str, fields: Fields) -> Json:
        model = self._model(tenant, fields)
        unload = partial(self._service.unload, tenant, model)
        return _promised(await self._promises.accept(tenant, model, "unload", unload))

    async def _info(self, tenant: str, fields: Fields) -> Json:
        return model_info(self._service, tenant, self._model(tenant, fields))

    async def _weights_info(self, tenant: str, fields: Fields) -> Json:
        path = self._tenants.check_path(tenant, required_text(fields, "tinker_path", "a path tinker://..."))
        return weights_info(self._service, tenant, path)

    def _model(self, tenant: str, fields: Fields) -> str:
        return self._tenants.check_model(tenant, required_text(fields, "model_id", "the id of a model"))

    def _session_part(self, tenant: str, fields: Fields, part: str, name: str) -> str:
        """Return the id of a model (`part` is "train") or sampler ("sample") that a session has a number for."""
        session = required_text(fields, "session_id", "the id of a session")
        self._tenants.touch(tenant, session)
        return f"{session}:{part}:{required_int(fields, name)}"

    def sampler(self, tenant: str, request: HttpRequest) -> Json:
        """Return what a sampler draws from."""
        sampler, base = self._tenants.check_sampler(tenant, request.path_params["id"]), self._service.base
        path = self._service.samplers.path(tenant, sampler)
        # A client loads the tokenizer of this name.
        return {"sampler_id": sampler, "base_model": base.tokenizer or base.name, "model_path": path}

    async def _open_sampler(self, tenant: str, fields: Fields) -> Json:
        sampler = self._session_part(tenant, fields, "sample", "sampling_session_seq_id")
        path, base = fields.take_text("model_path"), fields.take_text("base_model")
        fields.finish(IGNORED)
        if path is None and base is None:
            raise fields.missing("base_model", "the name of the base, or model_path")
        check_base(base, self._service.base)
        checked = None if path is None else self._tenants.check_path(tenant, path)
        await asyncio.to_thread(self._service.samplers.open, tenant, sampler, checked)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def _sample(self, tenant: str, fields: Fields) -> Json:
        sampler = required_text(fields, "sampling_session_id", "the id of a sampler")
        sampler, seq = self._tenants.check_sampler(tenant, sampler), required_int(fields, "seq_id")
        count, refused = 1, None
        try:
            asked, scores = sample_request(fields, self._service.base)
            count = asked.samples
        except ApiError as error:
            refused = error

        def start() -> Future[Any]:
            if refused is not None:
                raise refused
            finish = partial(self._codec.samples, scores=scores)
            return self._service.samplers.sample(tenant, sampler, seq, asked, finish)

        id = await self._promises.accept(tenant, sampler, seq, start)
        return {"request_id": id, "sample_sequence_ids": [f"{id}-{n}" for n in range(count)]}

    def answer(self, outcome: Outcome | ServiceError, *, size_first: bool) -> Response:
        """Return the response to a finished promise, with `size_first` only its size if that is large."""
        if isinstance(outcome, LossOutput | bytes):
            body = outcome if isinstance(outcome, bytes) else self._codec.losses(outcome)
            if size_first and len(body) >= _LARGE:
                return JSONResponse({"status": "complete_metadata", "response_payload_size": len(body)})
            return Response(body, media_type=CONTENT_TYPE)
        if isinstance(outcome, ServiceError):
            return JSONResponse({"error": str(outcome), "category": outcome.category})
        return JSONResponse(outcome)


def _promised(id: str) -> Json:
    return {"request_id": id, "model_id": id.rpartition(":")[0]}
