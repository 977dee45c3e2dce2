"""Engines of several whole models behind the interface of one with adapters: a name stands for a model's weights.

So the worker of several policies draws episodes whose roles are whole models as it draws those of adapters. Each engine
has the weights of one version, its own rows and pages; all share compiled programs, and one arrangement of weights.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from axlearn_like.layers.base import Params
from mesh import UserError
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.request import Request, RequestOutput


class WholeModels:
    """Engines, of which each is taken by a loaded model, and free again when that is unloaded.

    Attributes:
        engines: the engines.
        cfg: config of each engine.
        runner, executor: those of the first engine; all are alike.
        version: 0: there is no base to be loaded beside the models.
        adapters: names of loaded models.
    """

    version = 0

    def __init__(self, engines: Sequence[RolloutEngine]):
        """Take engines of one config, each of one process."""
        first = engines[0]
        self.cfg, self.runner, self.executor = first.cfg, first.runner, first.executor
        self.engines = list(engines)
        self.adapters: dict[str, RolloutEngine] = {}
        self._requests: dict[int, tuple[RolloutEngine, int]] = {}  # unfinished ones, with their number in an engine
        self._submitted = 0

    def set_weights(self, params: Params | PlacedWeights, version: int, *, rewind: bool = False) -> None:
        """Refuse the weights of a base: whole models have none (UserError)."""
        raise UserError(f"version {version} is of a base; whole models have none")

    def load_adapter(self, name: str, adapter: PlacedWeights, version: int = 0) -> None:
        """Load a model into a free engine, between two dispatches (UserError: there is none)."""
        taken = [id(engine) for engine in self.adapters.values()]
        free = next((engine for engine in self.engines if id(engine) not in taken), None)
        if free is None:
            raise UserError(f"{name}: all {len(self.engines)} engines have a model; unload one first")
        free.invalidate_weights()  # another model's, perhaps of the same version
        free.set_weights(adapter, version, rewind=True)
        self.adapters[name] = free

    def unload_adapter(self, name: str) -> None:
        """Free the engine of a model (UserError: requests of it are unfinished)."""
        if self.adapters[name].unfinished:
            raise UserError(f"{name} cannot be unloaded: requests of it are unfinished")
        del self.adapters[name]

    def sleep(self) -> None:
        """Give back the memory of weights and pages (UserError: a request is unfinished)."""
        for engine in self.engines:
            engine.sleep()
        self.adapters.clear()

    def submit(self, request: Request) -> int:
        """Queue a request of the model that it names; returns its number."""
        assert request.adapter is not None, "whole models have no base"
        engine, number = self.adapters[request.adapter], self._submitted
        self._requests[number] = engine, engine.submit(_replaced(request, adapter=None))
        self._submitted += 1
        return number

    def abort(self, number: int) -> None:
        """End a request; what it has comes out with finish reason "abort"."""
        if number in self._requests:
            engine, own = self._requests[number]
            engine.abort(own)

    def abort_all(self) -> list[RequestOutput]:
        """End all requests and return what they have."""
        return [one for engine in self.engines for one in self._numbered(engine, engine.abort_all())]

    @property
    def busy(self) -> bool:
        """True with a request unfinished, or an output not handed out yet."""
        return any(engine.busy for engine in self.engines)

    @property
    def unfinished(self) -> int:
        """Sequences that have not ended, of the engine that has most: each has rows of its own."""
        return max(engine.unfinished for engine in self.engines)

    def step(self) -> list[RequestOutput]:
        """Run an iteration of each busy engine; returns what has finished."""
        return [one for engine in self.engines if engine.busy for one in self._numbered(engine, engine.step())]

    def _numbered(self, engine: RolloutEngine, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        numbers = {own: number for number, (other, own) in self._requests.items() if other is engine}
        found = [_replaced(one, number=numbers[one.number]) for one in outputs]
        for one in found:
            del self._requests[one.number]
        return found


def _replaced[Record: Request | RequestOutput](record: Record, **fields: Any) -> Record:
    return dataclasses.replace(record, **fields)
