"""A sampling queue over an engine of a few thousand parameters, with random adapters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.wrappers.adapters import Adapter, Factors, matrices
from rl.controller.fair_share import FairShare
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.serving.engine_thread import EngineThread
from rl.serving.service.messages import SampleRequest
from rl.serving.service.sampling import SamplingLimits, SamplingQueue
from tests.rl.rollout.small import POLICY, make_engine

PLACES, RANK = 2, 4


def random_adapter(name: str) -> Adapter:
    """An adapter of all matrices, far from zero, the same for the same name."""
    rng = np.random.default_rng([ord(letter) for letter in name])
    return Adapter(
        {
            path: Factors(
                *(
                    (0.3 * rng.standard_normal(shape)).astype(np.float32)
                    for shape in ((one.layers, one.inputs, RANK), (one.layers, RANK, one.outputs))
                )
            )
            for path, one in matrices(build_abstract(POLICY))
        }
    )


def small_engine(**changes: Any) -> RolloutEngine:
    """An engine with room for two adapters."""
    return make_engine(adapters=AdapterLimits(slots=PLACES, rank=RANK), **changes)


@contextmanager
def sampling(
    engine: RolloutEngine,
    *,
    read: Callable[[str], Adapter] = random_adapter,
    limits: SamplingLimits | None = None,
) -> Iterator[tuple[SamplingQueue, EngineThread]]:
    """A queue before this engine, which runs until the end of the block."""
    thread = EngineThread(engine)
    thread.start()
    queue = SamplingQueue(thread, engine.cfg, FairShare(), read, PLACES, limits)
    try:
        yield queue, thread
    finally:
        queue.close()
        thread.close()


def sample_request(number: int, **fields: Any) -> SampleRequest:
    """A request with a prompt and a seed of its own."""
    tokens = np.random.default_rng(number).integers(0, 256, 1 + number * 5 % 30).astype(np.int32)
    return SampleRequest(tokens, **{"num_samples": 1 + number % 6, "seed": number, "max_tokens": 9, **fields})
