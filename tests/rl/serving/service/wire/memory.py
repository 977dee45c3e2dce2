"""Verbs in memory, for tests of the protocol: a model is one number, and every request is counted.

The log-probability of a token t under weight w is w - t; the gradient of cross_entropy is minus the sum of the weights
of its tokens, an optimizer step subtracts learning rate times gradient.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rl.serving.service.messages import (
    AdamParams,
    Datum,
    LoraSpec,
    LossOutput,
    Sample,
    SampleOutput,
    SampleRequest,
    ServiceError,
)
from rl.serving.service.verbs import (
    BaseFacts,
    ModelCreated,
    ModelFacts,
    ModelUnloaded,
    SamplerOpened,
    SavedFacts,
    ServiceBusy,
    StateLoaded,
    StateSaved,
    StepDone,
    UnknownId,
)

BASE = BaseFacts("local/demo", context_length=64, max_rank=8, vocab_size=100)


@dataclasses.dataclass
class _Model:
    spec: LoraSpec
    futures: dict[int, Future[Any]]
    waiting: dict[int, Any] = dataclasses.field(default_factory=dict)
    next: int = 1
    weight: float = 0.0
    gradient: float = 0.0


class InMemoryVerbs:
    """`ServiceVerbs` without a model; `ran` lists what was run."""

    base = BASE

    def __init__(self) -> None:
        self.ran: list[tuple[str, str, int]] = []  # (verb, model or sampler, number)
        self.held: list[Future[Any]] = []  # samples that wait, if `hold`
        self.hold = False
        self.busy = 0  # requests that are refused before the next is accepted
        self._models: dict[tuple[str, str], _Model] = {}
        self._saved: dict[tuple[str, str], tuple[float, LoraSpec]] = {}
        self._samplers: dict[tuple[str, str], tuple[str | None, float]] = {}
        self._samples: dict[tuple[str, int], Future[SampleOutput]] = {}

    # ---- models

    def create_model(self, tenant: str, model: str, spec: LoraSpec) -> Future[ModelCreated]:
        if (tenant, model) not in self._models:
            self.ran.append(("create_model", model, 0))
            self._models[tenant, model] = _Model(spec, {0: _done(ModelCreated(model))})
        return self._models[tenant, model].futures[0]

    def create_from_saved(self, tenant: str, model: str, path: str, optimizer: bool) -> Future[StateLoaded]:
        weight, spec = self._state(tenant, path)
        self._models[tenant, model] = _Model(spec, {0: _done(StateLoaded(path))}, weight=weight)
        return self._models[tenant, model].futures[0]

    def forward_backward(
        self,
        tenant: str,
        model: str,
        seq: int,
        rows: Sequence[Datum],
        loss: str,
        config: Mapping[str, float],
        forward_only: bool,
    ) -> Future[LossOutput]:
        def run(state: _Model) -> LossOutput:
            logprobs = tuple((state.weight - row.inputs["target_tokens"]).astype(np.float32) for row in rows)
            weights = [row.inputs.get("weights", np.ones(len(row.tokens), np.float32)) for row in rows]
            if not forward_only:
                state.gradient -= float(sum(one.sum() for one in weights))
            total = -sum(float((a * b).sum()) for a, b in zip(logprobs, weights, strict=True))
            return LossOutput(logprobs, {"loss:sum": total, **config})

        return self._numbered("forward_backward", tenant, model, seq, run)

    def optim_step(self, tenant: str, model: str, seq: int, adam: AdamParams) -> Future[StepDone]:
        def run(state: _Model) -> StepDone:
            norm = abs(state.gradient)
            state.weight, state.gradient = state.weight - adam.learning_rate * state.gradient, 0.0
            return StepDone({"grad_norm": norm})

        return self._numbered("optim_step", tenant, model, seq, run)

    def save_weights(self, tenant: str, model: str, seq: int, name: str, overwrite: bool = False) -> Future[StateSaved]:
        return self._save("weights", tenant, model, seq, name, overwrite)

    def save_weights_for_sampler(
        self, tenant: str, model: str, seq: int, name: str, overwrite: bool = False
    ) -> Future[StateSaved]:
        return self._save("sampler_weights", tenant, model, seq, name, overwrite)

    def load_weights(self, tenant: str, model: str, seq: int, path: str, optimizer: bool) -> Future[StateLoaded]:
        def run(state: _Model) -> StateLoaded:
            state.weight = self._state(tenant, path)[0]
            return StateLoaded(path)

        return self._numbered("load_weights", tenant, model, seq, run)

    def sampler_of_model(self, tenant: str, model: str, seq: int, sampler: str) -> Future[SamplerOpened]:
        def run(state: _Model) -> SamplerOpened:
            self._samplers[tenant, sampler] = None, state.weight
            return SamplerOpened(sampler)

        return self._numbered("sampler_of_model", tenant, model, seq, run)

    def unload_model(self, tenant: str, model: str) -> Future[ModelUnloaded]:
        self._model(tenant, model)
        del self._models[tenant, model]
        return _done(ModelUnloaded(model))

    def refuse(self, tenant: str, model: str, seq: int, error: ServiceError) -> Future[Any]:
        def run(state: _Model) -> Any:
            raise error

        return self._numbered("refuse", tenant, model, seq, run)

    def recall(self, tenant: str, owner: str, seq: int) -> Future[Any] | None:
        found = self._models.get((tenant, owner))
        return None if found is None else found.futures.get(seq)

    # ---- samplers

    def open_sampler(self, tenant: str, sampler: str, path: str | None) -> Future[SamplerOpened]:
        self._samplers[tenant, sampler] = path, 0.0 if path is None else self._state(tenant, path)[0]
        return _done(SamplerOpened(sampler))

    def sampler_path(self, tenant: str, sampler: str) -> str | None:
        return self._sampler(tenant, sampler)[0]

    def sample(self, tenant: str, sampler: str, seq: int, request: SampleRequest) -> Future[SampleOutput]:
        weight = self._sampler(tenant, sampler)[1]
        self._check_busy()
        if (sampler, seq) in self._samples:
            return self._samples[sampler, seq]
        self.ran.append(("sample", sampler, seq))
        tokens = (np.arange(request.max_tokens or 4) + request.tokens[-1] + 1).astype(np.int32) % BASE.vocab_size
        samples = (Sample(tokens, np.full(len(tokens), weight, np.float32), "length"),) * request.num_samples
        prompt = (weight - request.tokens).astype(np.float32) if request.prompt_logprobs else None
        top = tuple(((int(t), weight),) * request.top_prompt_logprobs for t in request.tokens)
        if prompt is not None:
            prompt[0] = np.nan
        output = SampleOutput(samples, prompt, top if request.top_prompt_logprobs else None)
        future = self._samples[sampler, seq] = Future() if self.hold else _done(output)
        if self.hold:
            self.held.append(future)
        return future

    # ---- lists

    def models(self, tenant: str) -> Sequence[ModelFacts]:
        return [ModelFacts(name, one.spec, 1.0) for (owner, name), one in self._models.items() if owner == tenant]

    def saved(self, tenant: str) -> Sequence[SavedFacts]:
        found = [(path, spec) for (owner, path), (_, spec) in self._saved.items() if owner == tenant]
        return [
            SavedFacts(path, path.split("/")[2], path.split("/")[3], spec, 4, 1.0)  # pyright: ignore[reportArgumentType]
            for path, spec in reversed(found)
        ]

    def delete_saved(self, tenant: str, path: str) -> None:
        self._state(tenant, path)
        del self._saved[tenant, path]

    def sessions(self) -> Sequence[tuple[str, str]]:
        return sorted({(tenant, model.partition(":")[0]) for tenant, model in self._models})

    def end_session(self, tenant: str, session: str) -> Future[None]:
        for owner, model in list(self._models):
            if owner == tenant and model.startswith(f"{session}:"):
                state = self._models.pop((owner, model))
                self._saved[tenant, f"tinker://{model}/weights/session-end"] = state.weight, state.spec
        return _done(None)

    def close(self) -> None:
        for future in self.held:
            future.cancel()

    # ---- helpers

    def _numbered(self, verb: str, tenant: str, model: str, seq: int, run: Any) -> Future[Any]:
        """Run now, or when its turn comes; a repeat gets the future of the first."""
        state = self._model(tenant, model)
        self._check_busy()
        if seq not in state.futures:
            state.futures[seq], state.waiting[seq] = Future(), (verb, run)
            while state.next in state.waiting:
                verb, run = state.waiting.pop(state.next)
                self.ran.append((verb, model, state.next))
                future, state.next = state.futures[state.next], state.next + 1
                try:
                    future.set_result(run(state))
                except Exception as error:
                    future.set_exception(error)
        return state.futures[seq]

    def _save(self, kind: str, tenant: str, model: str, seq: int, name: str, overwrite: bool) -> Future[StateSaved]:
        path = f"tinker://{model}/{kind}/{name}"

        def run(state: _Model) -> StateSaved:
            if (tenant, path) in self._saved and not overwrite:
                raise ServiceError(f"path: {path} is there already; overwrite=True replaces it")
            self._saved[tenant, path] = state.weight, state.spec
            return StateSaved(path)

        return self._numbered("save", tenant, model, seq, run)

    def _check_busy(self) -> None:
        if self.busy:
            self.busy -= 1
            raise ServiceBusy("too many requests of yours wait", 1.0)

    def _model(self, tenant: str, model: str) -> _Model:
        if (tenant, model) not in self._models:
            raise UnknownId("model", model)
        return self._models[tenant, model]

    def _sampler(self, tenant: str, sampler: str) -> tuple[str | None, float]:
        if (tenant, sampler) not in self._samplers:
            raise UnknownId("sampler", sampler)
        return self._samplers[tenant, sampler]

    def _state(self, tenant: str, path: str) -> tuple[float, LoraSpec]:
        if (tenant, path) not in self._saved:
            raise UnknownId("path", path)
        return self._saved[tenant, path]


def _done[T](value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
