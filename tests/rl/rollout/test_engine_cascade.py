"""Keys that are read once for several rows change no bit: tokens and log-probabilities are those of plain decoding."""

from collections.abc import Callable, Generator
from typing import Any

import pytest

from mesh import UserError
from rl.protocol.messages import Rollout
from rl.rollout.agent_loops.commands import Generate, Observe
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from tests.rl.rollout.small import assert_no_page_is_held, assert_same, drain, make_engine
from tests.rl.tiny import make_prompt, tiny_params, tiny_policy

SIZES: dict[str, Any] = {
    "model": tiny_policy(),
    "max_prompt_tokens": 72,
    "max_new_tokens": 24,
    "max_num_seqs": 8,
    "pages": 45,
}


def asked(number: int, length: int, samples: int, **fields: Any) -> Request:
    stop = StopConditions(max_new_tokens=20 + number % 5)
    return Request(make_prompt(number, length), samples=samples, seed=3, stop=stop, **fields)


# The first block ends with a prompt, in it, and behind it; few pages, so that some are preempted.
REQUESTS = [asked(1, 64, 4), asked(2, 65, 3), asked(3, 63, 5), asked(4, 72, 2), asked(5, 20, 2), asked(2, 65, 2)]


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return make_engine(tiny_weights(), **SIZES, cascade=4)


def tiny_weights(seed: int = 0) -> Any:
    return tiny_params(SIZES["model"], seed)


def plainly(engine: RolloutEngine, run: Callable[[], list[Rollout]]) -> list[Rollout]:
    """Return what the engine draws when each row reads its own keys; nothing is cached before and after."""
    engine.scheduler.kv_cache.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.dispatcher, "tiles", lambda rows: None)
        found = run()
    engine.scheduler.kv_cache.forget()
    return found


def both(engine: RolloutEngine, run: Callable[[], list[Rollout]]) -> dict[str, float]:
    """Assert that both ways draw the same; returns how much some counts have grown with shared keys."""
    expected, before = plainly(engine, run), engine.stats()
    assert_same(run(), expected, versions=False)
    assert_no_page_is_held(engine)
    return {name: value - before[name] for name, value in engine.stats().items()}


@pytest.mark.full
def test_groups_draw_the_same_bits_and_read_fewer_keys(engine: RolloutEngine):
    grown = both(engine, lambda: engine.generate(REQUESTS))
    assert grown["preemptions"] > 0
    assert grown["cascade_keys_read"] < 0.9 * grown["cascade_keys_alone"]


@pytest.mark.slow
def test_forks_and_given_tokens_draw_the_same_bits(engine: RolloutEngine):
    def loop(completion: Any) -> Generator[Any, Any, None]:
        yield Generate(max_new_tokens=4)
        if completion.sample < 2:
            yield Observe([5, 6, 7])
            yield Generate(max_new_tokens=6)

    assert both(engine, lambda: engine.generate([asked(7, 62, 4, agent_loop=loop)]))["cascade_keys_read"]


@pytest.mark.slow
def test_weights_that_change_in_flight_are_shared_by_page_alone(engine: RolloutEngine):
    weights, versions = [tiny_weights(0), tiny_weights(1)], iter(range(6, 60))

    def run() -> list[Rollout]:
        engine.set_weights(weights[0], next(versions))
        numbers = [engine.submit(request) for request in REQUESTS[:2]]
        found = engine.step()
        engine.set_weights(weights[1], next(versions), swap="keep_cache")
        done = {one.number: one for one in found} | drain(engine)
        return [rollout for number in numbers for rollout in done[number].rollouts]

    grown = both(engine, run)
    assert grown["cascade_keys_read"] < grown["cascade_keys_alone"]


@pytest.mark.full
@pytest.mark.parametrize("heads", [(3, 1, 32), (4, 4, 16)])
def test_long_prompts_draw_the_same_bits(heads: tuple[int, int, int]):
    """Blocks of several sizes, of which tiles share some, all, or none."""
    policy: Any = tiny_policy(num_layers=2)
    queries, keys, width = heads
    policy.block.attention.set(num_heads=queries, num_kv_heads=keys, head_dim=width)
    policy.set(dim=96)
    sizes = {"model": policy, "max_prompt_tokens": 700, "max_new_tokens": 60, "max_num_seqs": 16, "prefill_tokens": 512}
    engine = make_engine(tiny_params(policy), **sizes, cascade=4)
    lengths = [(256, 4), (700, 6), (129, 3), (384, 5), (513, 4), (30, 2)]
    requests = [asked(number, length, samples) for number, (length, samples) in enumerate(lengths)]
    grown = both(engine, lambda: engine.generate(requests))
    assert grown["cascade_keys_read"] < 0.8 * grown["cascade_keys_alone"]


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(UserError, match=r"cascade.*2 or more"):
        make_engine(cascade=1)
