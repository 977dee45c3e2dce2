"""A service over a base of a few thousand parameters, and a fixed list of requests for it.

As a script it is a service process that makes these requests and kills itself where it is told to: `FOLDER accepted
NUMBER` after so many were accepted, `FOLDER saving NUMBER` with half of the so many-th file written.
"""

import os
import signal
import sys
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from axlearn_like.layers.base import Params
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.serving.service.messages import (
    AdamParams,
    BaseFacts,
    CreateModel,
    Datum,
    LoadState,
    LoraSpec,
    OpenSampler,
    SaveState,
    TrainPass,
)
from rl.serving.service.row_batches import SlotLimits
from rl.serving.service.service import AdapterService
from rl.serving.service.slots import TrainingSlots
from rl.serving.service.training_tasks import ServiceLimits
from tests.rl.rollout.small import POLICY, VOCAB, make_engine, params

SLOTS, RANK = 3, 4
BASE = BaseFacts("tiny", context_length=64, max_rank=RANK, vocab_size=VOCAB)
A, B = "one:train:0", "two:train:0"
WAIT = 120


@cache
def weights() -> Params:
    return params()


def make_service(folder: Path, *, steps: int = 2, journal: int = 1 << 20, **limits: Any) -> AdapterService:
    """A service with snapshots every `steps` steps, started again on what is in the folder."""
    engine = make_engine(weights(), adapters=AdapterLimits(slots=2, rank=RANK))
    sizes = SlotLimits(slots=SLOTS, rank=RANK, context_length=64, tokens=128, shortest=16)
    slots = TrainingSlots(POLICY, weights(), sizes)
    return AdapterService(BASE, engine, slots, folder, ServiceLimits(steps=steps, journal=journal, **limits))


def rows(number: int, count: int = 2) -> list[Datum]:
    """Rows of random tokens, the same for the same number."""
    rng = np.random.default_rng(number)

    def row(length: int) -> Datum:
        tokens = rng.integers(0, VOCAB, length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": rng.random(length).astype(np.float32)}
        return Datum(tokens[:-1].astype(np.int32), inputs)

    return [row(int(rng.integers(3, 14))) for _ in range(count)]


def train(service: AdapterService, tenant: str, model: str, seq: int, number: int) -> Future[Any]:
    return service.submit(tenant, model, seq, TrainPass(model, tuple(rows(number)), "cross_entropy", {}))


def create(service: AdapterService, tenant: str, model: str, **spec: Any) -> Future[Any]:
    return service.submit(tenant, model, 0, CreateModel(LoraSpec(**{"rank": 2, **spec})))


def state_bits(service: AdapterService, model: str) -> Any:
    """Return the state of a model whose requests are answered, as something that compares to the bit."""
    state = service.slots.state(model)
    parts = [part or {} for part in (state.factors, state.first, state.second, state.gradients)]
    arrays = [[(path, a.tobytes(), b.tobytes()) for path, (a, b) in sorted(part.items())] for part in parts]
    return state.spec, state.step, arrays


ADAM = AdamParams(learning_rate=0.05, weight_decay=0.01)


def requests() -> list[tuple[str, str, int, str]]:
    """(tenant, model, number, verb): two tenants who train, save, load what they have saved, and go on."""
    verbs = ["create", "pass", "pass", "step", "pass", "step", "save", "pass", "step", "pass", "sampler", "step"]
    verbs += ["load", "pass", "evaluate", "step", "overwrite", "pass"]
    both = (("t1", A), ("t2", B))
    return [(tenant, model, number, verb) for number, verb in enumerate(verbs) for tenant, model in both]


def ask(service: AdapterService, request: tuple[str, str, int, str]) -> Future[Any]:
    """Make one of the requests."""
    tenant, model, seq, verb = request
    if verb == "create":
        return create(service, tenant, model, rank=2 if model == A else 4, seed=7)
    if verb == "pass":
        return train(service, tenant, model, seq, seq + (100 if model == A else 0))
    asked: Any = {
        "evaluate": TrainPass(model, tuple(rows(seq)), "cross_entropy", {}, forward_only=True),
        "step": ADAM,
        "load": LoadState(f"tinker://{model}/weights/x"),
        "sampler": OpenSampler(model.replace("train", "sample")),
        "save": SaveState("x"),
        "overwrite": SaveState("x", overwrite=True),
    }
    return service.submit(tenant, model, seq, asked[verb])


def main(folder: str, what: str, number: int) -> None:
    """Make the requests that are not answered yet, one after the other, until the kill."""
    if what == "saving":
        real, count = Path.replace, [0]

        def replace(self: Path, target: Path) -> Path:
            count[0] += 1
            if count[0] == number:
                self.write_bytes(self.read_bytes()[:-50])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, target)

        mock.patch.object(Path, "replace", replace).start()
    service = make_service(Path(folder))
    for done, request in enumerate(requests()):
        ask(service, request)
        if what == "accepted" and done == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "saving":
            ask(service, request).result(WAIT)
    service.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
