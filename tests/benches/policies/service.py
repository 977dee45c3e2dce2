"""Sections of a service with 32 adapters: training of many beside one, a new adapter's first token, fair latencies."""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from axlearn_like.layers.base import Params, split
from models.tiny import tiny
from rl.protocol.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.serving.service.messages import (
    AdamParams,
    BaseFacts,
    CreateModel,
    Datum,
    LoraSpec,
    SaveState,
    ServiceBusy,
    TrainPass,
)
from rl.serving.service.row_batches import SlotLimits
from rl.serving.service.service import AdapterService
from rl.serving.service.slots import TrainingSlots

_VOCAB, _RANK, _MANY = 2048, 8, 32
_POLICY = tiny(vocab_size=_VOCAB)
_PROMPT, _ANSWER = 64, 64  # tokens
_OTHERS = 3  # tenants beside the one with much to do
_WAIT = 600.0  # seconds for an answer


def slots(quick: bool = False) -> dict[str, Any]:
    """Return what rows of 32 models cost beyond as many rows of one, in CPU time of forward, backward and sum."""
    params = _params()
    length, turns = (32, 2) if quick else (128, 9)
    sizes = {"rank": _RANK, "context_length": length, "tokens": _MANY * length, "shortest": 32}
    one = TrainingSlots(_POLICY, params, SlotLimits(slots=1, **sizes))
    many = TrainingSlots(_POLICY, params, SlotLimits(slots=_MANY, **sizes))
    rows = [_row(number, length) for number in range(_MANY)]
    one.create("one", LoraSpec(_RANK))
    for number in range(_MANY):
        many.create(str(number), LoraSpec(_RANK, seed=number))
    adam = AdamParams(1e-4)
    works: dict[str, Callable[[], Any]] = {
        "one": lambda: one.forward_backward([_pass("one", rows)]),
        "many": lambda: many.forward_backward([_pass(str(number), [row]) for number, row in enumerate(rows)]),
        "one_step": lambda: one.optim_step("one", adam),
        "many_steps": lambda: [many.optim_step(str(number), adam) for number in range(_MANY)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(turns + 1):
        for name, work in works.items():
            began = time.process_time()
            work()
            if turn:  # the first one compiles
                seconds[name].append(time.process_time() - began)
    cpu = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "slots_overhead": round(cpu["many"] / cpu["one"] - 1, 4),
        "pass_cpu_s": {"one": round(cpu["one"], 4), "32": round(cpu["many"], 4)},
        "step_cpu_s": {"one": round(cpu["one_step"], 5), "32": round(cpu["many_steps"], 5)},
    }


def first_token(quick: bool = False) -> dict[str, Any]:
    """Return the longest time from the registration of a new adapter to its first token, with all places taken."""
    with _service() as service:
        model, tenant = "bench:train:0", "bench"
        service.submit(tenant, model, 0, CreateModel(LoraSpec(_RANK))).result(_WAIT)
        seconds: list[float] = []
        for number in range(1, 4 if quick else _MANY + 16):
            save = SaveState(f"w{number}", "sampler_weights")
            path = service.submit(tenant, model, number, save).result(_WAIT)["path"]
            sampler = f"bench:sample:{number}"
            began = time.perf_counter()
            service.samplers.open(tenant, sampler, path)
            service.samplers.sample(tenant, sampler, 0, _request(number, answer=1)).result(_WAIT)
            seconds.append(time.perf_counter() - began)
        warm = seconds[1:]  # the first one compiles
    return {"first_token_s": round(max(warm), 4), "first_token_median_s": round(statistics.median(warm), 4)}


def fairness(quick: bool = False) -> dict[str, Any]:
    """Return the others' p95 of sampling latency beside a tenant with 100 times their load, over that without it."""
    rounds, each = (1, 3) if quick else (3, 25)
    idle: list[float] = []
    loaded: list[float] = []
    with _service() as service:
        service.samplers.open("busy", "busy:sample:0", None)
        for other in range(_OTHERS):
            service.samplers.open(f"other{other}", f"other{other}:sample:0", None)
        _latencies(service, 0, 2)  # compiles
        with _flood(service):
            _latencies(service, 1, 2)
        for number in range(rounds):
            idle += _latencies(service, 2 + 2 * number, each)
            with _flood(service):
                loaded += _latencies(service, 3 + 2 * number, each)
    p95 = [float(np.percentile(values, 95)) for values in (idle, loaded)]
    return {
        "fairness_p95_ratio": round(p95[1] / p95[0], 3),
        "sampling_p95_s": {"idle": round(p95[0], 4), "beside 100 times the load": round(p95[1], 4)},
        "sampling_median_s": {
            "idle": round(statistics.median(idle), 4),
            "beside 100 times the load": round(statistics.median(loaded), 4),
        },
    }


def _latencies(service: AdapterService, part: int, count: int) -> list[float]:
    """Return the seconds of requests that other tenants make side by side, each one after the other."""
    seconds: list[list[float]] = [[] for _ in range(_OTHERS)]

    def ask(other: int) -> None:
        for number in range(count):
            seq = part * 1000 + number
            began = time.perf_counter()
            service.samplers.sample(f"other{other}", f"other{other}:sample:0", seq, _request(seq)).result(_WAIT)
            seconds[other].append(time.perf_counter() - began)

    threads = [threading.Thread(target=ask, args=(other,)) for other in range(_OTHERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [one for own in seconds for one in own]


@contextmanager
def _flood(service: AdapterService) -> Iterator[None]:
    """Keep 100 requests of the busy tenant unanswered for each of the others."""
    stop, room = threading.Event(), threading.Semaphore(100 * _OTHERS)

    def ask() -> None:
        seq = int(time.monotonic() * 1e6)
        while not stop.is_set():
            room.acquire()
            seq += 1
            try:
                future = service.samplers.sample("busy", "busy:sample:0", seq, _request(seq))
            except ServiceBusy:
                room.release()
                continue
            asked.append(future)
            future.add_done_callback(lambda _: room.release())

    asked: list[Any] = []
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        for future in asked:
            future.cancel()
        thread.join()
        for future in asked:
            future.cancel()


@contextmanager
def _service() -> Iterator[AdapterService]:
    params = _params()
    engine_cfg = RolloutEngine.Config(
        model=_POLICY,
        stop_tokens=(),
        max_prompt_tokens=_PROMPT,
        max_new_tokens=_ANSWER,
        max_num_seqs=16,
        steps_per_dispatch=8,
    )
    engine = engine_cfg.build(adapters=AdapterLimits(_MANY, _RANK))
    needed, rest = engine.executor.compilations()
    for program in [*needed, *rest]:
        program()
    engine.set_weights(params, 0)
    engine.executor.run_idle()
    length = _PROMPT + _ANSWER
    slots = TrainingSlots(_POLICY, params, SlotLimits(slots=1, rank=_RANK, context_length=length, tokens=4 * length))
    base = BaseFacts("bench", length, _RANK, _VOCAB)
    with tempfile.TemporaryDirectory() as folder:
        service = AdapterService(base, engine, slots, Path(folder))
        try:
            yield service
        finally:
            service.close()


def _params() -> Params:
    return split(_POLICY.build(rngs=nnx.Rngs(0)))[1]


def _pass(model: str, rows: Sequence[Datum]) -> TrainPass:
    return TrainPass(model, tuple(rows), "cross_entropy", {})


def _row(number: int, length: int) -> Datum:
    tokens = np.random.default_rng(number).integers(0, _VOCAB, length + 1)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
    return Datum(tokens[:-1].astype(np.int32), inputs)


def _request(number: int, answer: int = _ANSWER) -> Request:
    tokens = np.random.default_rng(number).integers(0, _VOCAB, _PROMPT).astype(np.int32)
    rules = StopConditions(max_new_tokens=answer)
    sampler = Sampler.Config(temperature=1.0)
    return Request(Prompt(number, "bench", tokens), seed=number % (1 << 31), sampler=sampler, stop=rules)
