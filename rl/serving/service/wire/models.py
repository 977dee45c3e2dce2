"""Routes of training: models, passes, optimizer steps, saved states."""

import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from starlette.requests import Request as HttpRequest

from rl.serving.input.fields import Fields
from rl.serving.service.messages import ServiceError
from rl.serving.service.verbs import ServiceVerbs
from rl.serving.service.wire.listing import Json, model_info, weights_info
from rl.serving.service.wire.promises import Promise, Promises
from rl.serving.service.wire.protobuf import ProtobufCodec, unpacked
from rl.serving.service.wire.requests import (
    IGNORED,
    adam_params,
    check_base,
    check_optimizer,
    lora_spec,
    required_int,
    required_text,
    session_part,
)
from rl.serving.service.wire.tenants import Tenants, check_name
from rl.serving.web.http import read_body

_GROWTH = 8  # times that a body may grow when it is unpacked
_TTL = "ttl_seconds"  # ignored: saved states stay until they are deleted
Verb = Callable[[str, Fields], Awaitable[Json]]


class ModelRoutes:
    """Handlers of the verbs that train; `posts` are those with a JSON body, by name."""

    def __init__(self, verbs: ServiceVerbs, tenants: Tenants, promises: Promises, codec: ProtobufCodec):
        self._verbs, self._tenants, self._promises, self._codec = verbs, tenants, promises, codec
        self.posts: dict[str, Verb] = {
            "create_model": self._create,
            "unload_model": self._unload,
            "get_info": self._info,
            "optim_step": self._step,
            "save_weights": self._save,
            "load_weights": self._load,
            "save_weights_for_sampler": self._save_for_sampler,
            "weights_info": self._weights_info,
        }

    async def forward_backward(self, tenant: str, request: HttpRequest, max_body: int) -> Json:
        """Accept a pass, whose body is protobuf."""
        raw = await read_body(request, max_body)
        message = self._codec.request(unpacked(raw, request.headers.get("content-encoding"), _GROWTH * max_body))
        model, seq = self._tenants.check_model(tenant, message.model_id), message.seq_id
        if seq < 1:
            raise ServiceError(f"seq_id: got {seq}; expected an integer from 1")

        def start() -> Future[Any]:
            asked = self._codec.content(message)
            return self._verbs.forward_backward(
                tenant, model, seq, asked.rows, asked.loss, asked.config, asked.forward_only
            )

        return _promised(await self._promises.accept(tenant, model, seq, start))

    async def _create(self, tenant: str, fields: Fields) -> Json:
        model = session_part(self._tenants, tenant, fields, "train", "model_seq_id")

        def start() -> Future[Any]:
            check_base(required_text(fields, "base_model", "the name of the base"), self._verbs.base)
            check_optimizer(fields.take("optimizer_config"))
            spec = lora_spec(fields.take("lora_config"), model, self._verbs.base)
            fields.finish(IGNORED)
            return self._verbs.create_model(tenant, model, spec)

        return _promised(await self._promises.accept(tenant, model, 0, start))

    async def _unload(self, tenant: str, fields: Fields) -> Json:
        model = self._model(tenant, fields)
        unload = functools.partial(self._verbs.unload_model, tenant, model)
        return _promised(await self._promises.accept(tenant, model, "unload", unload))

    async def _info(self, tenant: str, fields: Fields) -> Json:
        return model_info(self._verbs, tenant, self._model(tenant, fields))

    async def _weights_info(self, tenant: str, fields: Fields) -> Json:
        path = self._tenants.check_path(tenant, required_text(fields, "tinker_path", "a path tinker://..."))
        return weights_info(self._verbs, tenant, str(path))

    async def _step(self, tenant: str, fields: Fields) -> Json:
        def start(model: str, seq: int) -> Future[Any]:
            params = adam_params(fields)
            fields.finish(IGNORED)
            return self._verbs.optim_step(tenant, model, seq, params)

        return await self._numbered(tenant, self._model(tenant, fields), fields, start)

    async def _save(self, tenant: str, fields: Fields) -> Json:
        def start(model: str, seq: int) -> Future[Any]:
            name, overwrite = check_name(fields.take_text("path") or f"{seq:06d}"), fields.take_bool("overwrite")
            fields.finish((*IGNORED, _TTL))
            return self._verbs.save_weights(tenant, model, seq, name, overwrite)

        return await self._numbered(tenant, self._model(tenant, fields), fields, start)

    async def _save_for_sampler(self, tenant: str, fields: Fields) -> Json:
        """Save under a name, or open a sampler of the weights as they are."""

        def start(model: str, seq: int) -> Future[Any]:
            name, number = fields.take_text("path"), fields.take("sampling_session_seq_id")
            fields.finish((*IGNORED, _TTL, "kind"))
            if number is None:
                return self._verbs.save_weights_for_sampler(tenant, model, seq, check_name(name or f"{seq:06d}"))
            sampler = self._tenants.check_sampler(tenant, f"{model.partition(':')[0]}:sample:{number}")
            return self._verbs.sampler_of_model(tenant, model, seq, sampler)

        return await self._numbered(tenant, self._model(tenant, fields), fields, start)

    async def _load(self, tenant: str, fields: Fields) -> Json:
        """Load into a model that exists, or into a new one, whose first request this is."""

        def read() -> tuple[str, bool]:
            path = self._tenants.check_path(tenant, required_text(fields, "path", "a path tinker://..."))
            check_base(fields.take_text("base_model"), self._verbs.base)
            check_optimizer(fields.take("optimizer_config"))
            optimizer = fields.take_bool("optimizer")
            fields.finish(IGNORED)
            return str(path), optimizer

        given = fields.take_text("model_id")
        if given is None:
            model = session_part(self._tenants, tenant, fields, "train", "model_seq_id")
            create = self._verbs.create_from_saved
            return _promised(await self._promises.accept(tenant, model, 0, lambda: create(tenant, model, *read())))
        load = self._verbs.load_weights
        model = self._tenants.check_model(tenant, given)
        return await self._numbered(tenant, model, fields, lambda model, seq: load(tenant, model, seq, *read()))

    def _model(self, tenant: str, fields: Fields) -> str:
        return self._tenants.check_model(tenant, required_text(fields, "model_id", "the id of a model"))

    async def _numbered(
        self, tenant: str, model: str, fields: Fields, start: Callable[[str, int], Future[Any]]
    ) -> Json:
        seq = required_int(fields, "seq_id", 1)
        return _promised(await self._promises.accept(tenant, model, seq, lambda: start(model, seq)))


def _promised(promise: Promise) -> Json:
    return {"request_id": promise.id, "model_id": promise.id.rpartition(":")[0]}
