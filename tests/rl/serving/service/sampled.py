"""A sampling queue over an engine of a few thousand parameters, with random adapters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from axlearn_like.layers.base import build_abstract
from axlearn_like.layers.wrappers.adapters import Adapter, Factors, matrices
from rl.controller.fair_share import FairShare
from rl.protocol.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.serving.engine_thread import EngineThread
from rl.serving.input.prompts import prompt_id
from rl.serving.service.sampling import SamplingQueue
from tests.rl.rollout.small import POLICY, STOP, make_engine

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
    waiting: int = 2048,
    share: FairShare | None = None,
) -> Iterator[tuple[SamplingQueue, EngineThread]]:
    """A queue before this engine, which runs until the end of the block."""
    thread = EngineThread(engine)
    thread.start()
    queue = SamplingQueue(thread, engine.cfg, share or FairShare(), read, PLACES, waiting)
    try:
        yield queue, thread
    finally:
        queue.close()
        thread.close()


def sample_request(number: int, **fields: Any) -> Request:
    """A request with a prompt and a seed of its own; `fields` are those of it, its sampler and its rules to stop."""
    tokens = np.random.default_rng(number).integers(0, 256, 1 + number * 5 % 30).astype(np.int32)
    given: Any = {"samples": 1 + number % 6, "seed": number, "max_new_tokens": 9, **fields}
    sampler = {name: given.pop(name) for name in ("temperature", "top_k", "top_p") if name in given}
    stop = given.pop("stop", ())
    ids, texts = (tuple(one for one in stop if isinstance(one, kind)) for kind in (int, str))
    rules: Any = ((*STOP, *ids), texts, given.pop("max_new_tokens"))
    settings: Any = {"temperature": 1.0, **sampler}
    return Request(
        Prompt(prompt_id(tokens), "service", tokens),
        sampler=Sampler.Config(**settings),
        stop=StopConditions(*rules),
        **given,
    )
