"""A service whose models are one number each, for tests of the protocol: all is real but the slots and the engine.

The log-probability of a token t under weight w is w - t; the gradient of cross_entropy is minus the sum of the weights
of its tokens, an optimizer step subtracts learning rate times gradient. A sample counts up from the last token of its
prompt, with log-probabilities w.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from axlearn_like.layers.wrappers.adapters import Adapter, Factors
from rl.protocol.messages import Rollout
from rl.rollout.decoding.scores import MOST, TokenScores
from rl.rollout.request import Request, RequestOutput
from rl.serving.service.durable.journal import parse_records
from rl.serving.service.durable.records import REQUESTS
from rl.serving.service.messages import AdamParams, BaseFacts, LoraSpec, LossOutput, TrainPass
from rl.serving.service.row_batches import SlotLimits
from rl.serving.service.saved import SlotState
from rl.serving.service.service import AdapterService
from rl.serving.service.slots import TrainingSlots

BASE = BaseFacts("local/demo", context_length=64, max_rank=8, vocab_size=100)


class NumberSlots(TrainingSlots):
    """Slots without arrays of a model."""

    def __init__(self, vocab_size: int):
        self.limits = SlotLimits(slots=32, rank=BASE.max_rank, alpha=1.0, context_length=BASE.context_length)
        self.vocab_size, self._states = vocab_size, dict[str, SlotState]()

    def create(self, model: str, spec: LoraSpec) -> None:
        self._states[model] = SlotState(spec, 0, _number(0.0))

    def unload(self, model: str) -> None:
        del self._states[model]

    def state(self, model: str) -> SlotState:
        return self._states[model]

    def restore(self, model: str, state: SlotState, *, optimizer: bool = True) -> None:
        self._states[model] = state if optimizer else SlotState(state.spec, 0, state.factors)

    def forward_backward(self, passes: Sequence[TrainPass]) -> list[LossOutput]:
        return [self._run(one) for one in passes]

    def _run(self, job: TrainPass) -> LossOutput:
        state = self._states[job.model]
        logprobs = [(_weight(state.factors) - row.inputs["target_tokens"]).astype(np.float32) for row in job.rows]
        weights = [row.inputs.get("weights", np.ones(len(row.tokens), np.float32)) for row in job.rows]
        if not job.forward_only:
            gradient = _weight(state.gradients or _number(0.0)) - float(sum(one.sum() for one in weights))
            self._states[job.model] = dataclasses.replace(state, gradients=_number(gradient))
        total = -sum(float((a * b).sum()) for a, b in zip(logprobs, weights, strict=True))
        own = {f"{name}:sum": value for name, value in job.config.items()}
        return LossOutput(tuple(logprobs), {"loss:sum": total, **own})

    def optim_step(self, model: str, adam: AdamParams) -> dict[str, float]:
        state = self._states[model]
        gradient = _weight(state.gradients or _number(0.0))
        moved = _number(_weight(state.factors) - adam.learning_rate * gradient)
        self._states[model] = SlotState(state.spec, state.step + 1, moved)
        return {"grad_norm": abs(gradient)}


class NumberEngine:
    """An engine that counts; `asked` lists (adapter, seed) of what was drawn."""

    version = 0
    cfg = SimpleNamespace(max_num_seqs=16, stop_tokens=())
    runner = SimpleNamespace(bank=SimpleNamespace(limits=SimpleNamespace(slots=8)))

    def __init__(self, vocab_size: int):
        self.asked: list[tuple[str | None, int | None]] = []
        self._vocab_size, self._adapters, self._running = vocab_size, dict[str, float](), dict[int, Request]()
        self._numbers = itertools.count()

    busy = property(lambda self: bool(self._running))

    def stats(self) -> dict[str, float]:
        return {}

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        self._adapters[name] = _weight(adapter.factors)

    def unload_adapter(self, name: str) -> None:
        del self._adapters[name]

    def submit(self, request: Request, on_tokens: Any) -> int:
        self.asked.append((request.adapter, request.seed))
        self._running[number := next(self._numbers)] = request
        return number

    def abort(self, number: int) -> None:
        self._running.pop(number, None)

    def step(self) -> list[RequestOutput]:
        running, self._running = self._running, {}
        return [self._drawn(number, request) for number, request in running.items()]

    def _drawn(self, number: int, request: Request) -> RequestOutput:
        assert request.stop is not None
        weight, prompt = self._adapters[request.adapter] if request.adapter else 0.0, request.prompt.tokens
        tokens = (np.arange(request.stop.max_new_tokens or 4) + prompt[-1] + 1).astype(np.int32) % self._vocab_size
        logprobs, ones = np.full(len(tokens), weight, np.float32), np.ones(len(tokens), np.int32)
        rollout = Rollout(request.prompt.id, 0, tokens, logprobs, ones, ones > 0, "length")
        behind = prompt[1:]
        top = np.repeat(behind[:, None], MOST, 1), np.full((len(behind), MOST), weight, np.float32)
        scores = TokenScores((weight - behind).astype(np.float32), behind, *top) if request.prompt_scores else None
        count = request.samples
        return RequestOutput(number, (rollout,) * count, scores=(None,) * count, prompt_scores=scores)


def number_service(folder: Path, base: BaseFacts = BASE) -> AdapterService:
    """A service started, or started again, on a folder."""
    engine: Any = NumberEngine(base.vocab_size)
    return AdapterService(base, engine, NumberSlots(base.vocab_size), folder)


def accepted(folder: Path) -> list[tuple[str, int]]:
    """Return (kind, number) of the requests of models that a service has accepted, each once."""
    records, _ = parse_records((folder / "journal").read_bytes(), folder)
    return [(one.fields["kind"], one.fields["seq"]) for one in records if one.fields["kind"] in REQUESTS]


def _number(value: float) -> dict[str, Factors]:
    return {"w": Factors(np.full((1, 1, 1), value, np.float32), np.zeros((1, 1, 1), np.float32))}


def _weight(factors: Any) -> float:
    return float(factors["w"].a[0, 0, 0])
