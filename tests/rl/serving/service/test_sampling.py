"""Samples for many tenants: bits that depend on the request alone, fair shares, limits, and errors that stay alone."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from axlearn_like.layers.wrappers.adapters import Adapter
from rl.controller.fair_share import FairShare, Quota
from rl.protocol.messages import Prompt, Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, RequestOutput
from rl.serving.engine_thread import EngineThread
from rl.serving.service.messages import ServiceBusy, ServiceError
from rl.serving.service.sampling import SamplingQueue
from tests.rl.rollout.small import STOP, make_engine, params, plain_logits
from tests.rl.serving.service.sampled import random_adapter, sample_request, sampling, small_engine

pytestmark = [pytest.mark.numerics, pytest.mark.slow]

WAIT = 60


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return small_engine()


@pytest.fixture
def queue(engine: RolloutEngine) -> Iterator[SamplingQueue]:
    with sampling(engine) as (queue, _):
        yield queue
    for name in engine.adapters:
        engine.unload_adapter(name)


def is_empty(queue: SamplingQueue) -> bool:
    return not queue._unanswered.total() and not queue._rows.total()


def bits(output: RequestOutput) -> list[Any]:
    return [(s.tokens.tobytes(), s.logprobs.tobytes(), s.finish_reason) for s in output.rollouts]


def ask(queue: SamplingQueue, tenant: str, adapter: str | None, request: Request) -> Future[RequestOutput]:
    return queue.sample(tenant, replace(request, adapter=adapter))


def test_an_answer_depends_on_its_request_alone_while_more_adapters_than_places_are_in_use(queue: SamplingQueue):
    asked = [(f"tenant{number % 3}", (None, "a", "b", "c")[number % 4], sample_request(number)) for number in range(12)]
    alone = [bits(ask(queue, "one", adapter, request).result(WAIT)) for _, adapter, request in asked]
    futures = [ask(queue, tenant, adapter, request) for tenant, adapter, request in asked]
    assert [bits(future.result(WAIT)) for future in futures] == alone
    assert [len(one) for one in alone] == [request.samples for _, _, request in asked]
    different = {tuple(bits(ask(queue, "x", adapter, sample_request(5)).result(WAIT))) for adapter in (None, *"abc")}
    assert len(different) == 4
    assert is_empty(queue) and len(queue._adapters.loaded) == 2


def test_samples_are_those_of_an_engine_with_the_adapter(queue: SamplingQueue):
    request = sample_request(3, samples=4, max_new_tokens=None)
    found = ask(queue, "one", "a", request).result(WAIT).rollouts
    plain = small_engine()
    plain.load_adapter("other name", random_adapter("a"))
    expected = plain.generate([replace(request, adapter="other name")])
    for a, b in zip(found, expected, strict=True):
        assert a.tokens.tobytes() == b.tokens.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()
        assert a.finish_reason == ("stop" if a.tokens[-1] in STOP else "length") == b.finish_reason


def test_rules_of_a_request(queue: SamplingQueue):
    def one(**fields: Any) -> Rollout:
        return ask(queue, "one", None, sample_request(2, samples=1, **fields)).result(WAIT).rollouts[0]

    greedy = one(temperature=0.0, seed=5)
    assert one(temperature=0.0, seed=77).tokens.tolist() == greedy.tokens.tolist()
    assert one(top_k=1).tokens.tolist() == one(top_p=1e-6).tokens.tolist() == greedy.tokens.tolist()
    second = int(greedy.tokens[1])
    by_id = one(temperature=0.0, stop=(second,))
    by_text = one(temperature=0.0, stop=(chr(0x100 + second),))
    assert by_id.tokens.tolist() == by_text.tokens.tolist() == greedy.tokens[:2].tolist()
    assert by_id.finish_reason == by_text.finish_reason == "stop"


def test_scores_of_a_prompt_are_those_of_a_forward_pass(queue: SamplingQueue):
    request = sample_request(4, samples=6, prompt_scores=True)
    output = ask(queue, "one", None, request).result(WAIT)
    tokens, found = request.prompt.tokens, output.prompt_scores
    given = Rollout(
        0, 0, tokens[1:], np.zeros(len(tokens) - 1, np.float32), tokens[1:], np.ones(len(tokens) - 1, bool), "length"
    )
    logits = plain_logits(params(), [(Prompt(0, "x", tokens[:1]), given)])[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert found is not None
    chosen = np.take_along_axis(logprobs, tokens[1:, None].astype(int), axis=1)[:, 0]
    np.testing.assert_allclose(found.logprobs, chosen, atol=2e-5)
    assert found.tokens[:, :3].tolist() == np.argsort(-logprobs)[:, :3].tolist()
    np.testing.assert_allclose(found.top_logprobs[:, :3], -np.sort(-logprobs)[:, :3], atol=2e-5)
    assert len(output.rollouts) == 6


def test_ten_thousand_tiny_requests_of_a_tenant_do_not_starve_another(engine: RolloutEngine):
    order: list[str] = []
    with sampling(engine, waiting=10_000) as (queue, thread):
        thread.pause().result(WAIT)
        for tenant, count in (("busy", 10_000), ("quiet", 8)):
            for number in range(count):
                future = ask(queue, tenant, None, sample_request(number % 50, samples=1, max_new_tokens=1))
                future.add_done_callback(lambda done, tenant=tenant: done.exception() or order.append(tenant))
                last = future
        with pytest.raises(ServiceBusy, match="10000 requests"):
            ask(queue, "busy", None, sample_request(0))
        thread.resume()
        last.result(WAIT)
        before = Counter(order[: len(order) - order[::-1].index("quiet")])
    assert before["quiet"] == 8
    assert before["busy"] <= 3 * 8, "one request of each tenant in turn, and those in flight"


def test_shares_of_tenants_do_not_depend_on_how_many_requests_or_samples_each_sends(engine: RolloutEngine):
    """Two tenants with enough to do have as many tokens, whatever the sizes of their requests."""
    drawn: Counter[str] = Counter()
    shapes = {"many": {"samples": 1, "max_new_tokens": 2}, "large": {"samples": 12, "max_new_tokens": 20}}
    with sampling(engine) as (queue, thread):
        thread.pause().result(WAIT)
        futures = []
        for tenant, count in (("large", 12), ("many", 300)):
            for number in range(count):
                request = sample_request(number % 50, **shapes[tenant])

                def count_up(done: Any, tenant: str = tenant, prompt: int = len(request.prompt.tokens)) -> None:
                    if not done.exception():
                        parts = -(-len(done.result().rollouts) // 4)
                        drawn[tenant] += prompt * parts + sum(len(s.tokens) for s in done.result().rollouts)

                futures.append(ask(queue, tenant, None, request))
                futures[-1].add_done_callback(count_up)
        thread.resume()
        futures[150].result(WAIT)
        found = dict(drawn)
    assert 0.6 < found["many"] / found["large"] < 1.6


def test_a_tenant_beyond_its_quota_waits_and_goes_on_by_itself(engine: RolloutEngine):
    now = [0.0]
    share = FairShare(quotas={"busy": Quota(tokens_per_second=10.0)}, clock=lambda: now[0])
    with sampling(engine, share=share, waiting=2) as (queue, _):
        busy = [ask(queue, "busy", None, sample_request(number, samples=1)) for number in range(2)]
        with pytest.raises(ServiceBusy, match=r"the quota of 'busy': tokens_per_second=10"):
            ask(queue, "busy", None, sample_request(3))
        busy[0].result(WAIT)
        for number in range(3):
            ask(queue, "quiet", None, sample_request(number)).result(WAIT)
        assert not busy[1].done()
        now[0] = 100.0  # nothing else happens
        busy[1].result(WAIT)


def test_an_error_fails_its_request_alone(engine: RolloutEngine):
    def read(name: str) -> Adapter:
        if name == "broken":
            raise ServiceError("no such weights")
        return random_adapter(name)

    with sampling(engine, read=read) as (queue, _):
        good = ask(queue, "one", "a", sample_request(1))
        long = ask(queue, "one", None, sample_request(1, max_new_tokens=1000))
        broken = ask(queue, "one", "broken", sample_request(1))
        behind = ask(queue, "one", "a", sample_request(1))
        with pytest.raises(ServiceError, match="1000 new tokens") as caught:
            long.result(WAIT)
        assert caught.value.category == "user"
        with pytest.raises(ServiceError, match="no such weights"):
            broken.result(WAIT)
        assert bits(good.result(WAIT)) == bits(behind.result(WAIT))


def test_a_cancelled_request_leaves_the_engine_and_the_queue(engine: RolloutEngine):
    with sampling(engine, waiting=3) as (queue, thread):
        thread.pause().result(WAIT)
        futures = [ask(queue, "one", "a", sample_request(5, max_new_tokens=20)) for _ in range(3)]
        assert all(future.cancel() for future in futures)
        thread.resume()
        kept = ask(queue, "one", "a", sample_request(2))
        assert len(kept.result(WAIT).rollouts) == 3
        assert is_empty(queue)


def test_what_waits_fails_when_the_queue_is_closed():
    thread = EngineThread(engine := make_engine())
    queue = SamplingQueue(thread, engine.cfg, FairShare(), random_adapter, 1)
    futures = [ask(queue, "one", None, sample_request(5)) for _ in range(8)]
    queue.close()
    thread.start()
    thread.close()
    for future in futures:
        with pytest.raises(ServiceError, match="shutting down"):
            future.result(WAIT)
