"""An engine whose pages go to the host and come back draws, to the bit, what one with room for all of them draws."""

import os
import resource
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.base import Params
from rl.protocol.messages import Rollout
from rl.rollout.agent_loops.commands import Command, Completion, Generate, Observe, Wait
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.tiers.costs import TransferCosts
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.request import Request
from tests.elsewhere import elsewhere
from tests.rl.rollout import test_engine_routing
from tests.rl.rollout.small import assert_no_page_is_held, assert_same, make_engine, params, request
from tests.rl.rollout.test_engine_mesh import TWO_DEVICES
from tests.rl.rollout.test_engine_pages import latent
from tests.rl.tiny import tiny_params

pytestmark = [pytest.mark.numerics, pytest.mark.slow]

POOL = 15  # pages, of which the requests below need four times as many
PAGE = 1024 + 8  # bytes of a page of the test policy

# Bring every page back: by measured seconds, a busy machine may find it cheaper to compute nearly all of them again.
bring_back = mock.patch.object(TransferCosts, "pays", lambda *_: True)


@pytest.fixture(autouse=True)
def _pages_come_back() -> Generator[None]:
    with bring_back:
        yield


def with_tools(completion: Completion) -> Generator[Command, Any, None]:
    """Draw, wait for a tool that another thread runs, read its answer, and draw again."""
    with ThreadPoolExecutor(1) as pool:
        for turn in range(3):
            yield Generate(max_new_tokens=4)
            answer = yield Wait(pool.submit(lambda turn=turn: [5 + turn, 77, 40 + completion.sample]))
            yield Observe(answer)
        yield Generate()


def requests(loop: Any = with_tools) -> list[Request]:
    return [request(n, samples=1 + n % 2, agent_loop=loop) for n in range(14)]


@cache
def expected(case: str = "plain") -> list[Rollout]:
    engine = make_engine(weights(case), pages=200, **CASES[case])
    found = engine.generate(requests()) + engine.generate(requests())
    assert engine.stats()["preemptions"] == 0
    return found


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "latents": {"model": latent("expanded")},
    "routing": {"model": test_engine_routing.RECORDING},
    "from pages": {"decode_from": "pages"},
}


def weights(case: str) -> Params | None:
    model = CASES[case].get("model")
    return None if model is None else tiny_params(model, 0)


def draw_twice(tiers: HostTiers.Config, case: str = "plain") -> RolloutEngine:
    """Draw twice in a small pool, the second time over what is left of the first; assert that nothing has changed."""
    engine = make_engine(weights(case), pages=POOL, tiers=tiers, **CASES[case])
    found = engine.generate(requests()) + engine.generate(requests())
    assert_same(found, expected(case))
    for a, b in zip(found, expected(case), strict=True):
        np.testing.assert_array_equal(a.routing, b.routing)
    assert_no_page_is_held(engine)
    return engine


@pytest.mark.parametrize("case", ["plain", *(pytest.param(case, marks=pytest.mark.full) for case in list(CASES)[1:])])
def test_the_same_bits_from_host_memory(case: str):
    stats = draw_twice(HostTiers.Config(), case).stats()
    assert stats["preemptions"] > 0
    assert stats["tier_hits_host"] > 20
    assert stats["tier_damaged"] == stats["tier_dropped"] == stats["tier_disk_bytes"] == 0


def test_the_same_bits_from_the_disk(tmp_path: Path):
    stats = draw_twice(HostTiers.Config(host_bytes=8 * PAGE, disk=str(tmp_path))).stats()
    assert stats["tier_hits_disk"] > 5
    assert stats["tier_host_bytes"] <= 8 * PAGE and stats["tier_disk_bytes"] > 8 * PAGE


def test_without_room_on_the_host_pages_are_computed_again(tmp_path: Path):
    tiers = HostTiers.Config(host_bytes=2 * PAGE, disk=str(tmp_path), disk_bytes=PAGE)
    assert draw_twice(tiers).stats()["tier_dropped"] > 20


def test_on_a_full_disk_pages_are_computed_again(tmp_path: Path):
    """The limit on the size of files stands for a full disk. All is compiled before: its cache needs files too."""
    draw_twice(HostTiers.Config(host_bytes=4 * PAGE, disk=str(tmp_path)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * PAGE, before[1]))
        stats = draw_twice(HostTiers.Config(host_bytes=4 * PAGE, disk=str(tmp_path))).stats()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stats["tier_failed_writes"] > 20 and stats["tier_disk_bytes"] <= 8 * PAGE


def test_a_damaged_file_is_computed_again(tmp_path: Path):
    tiers = HostTiers.Config(host_bytes=4 * PAGE, disk=str(tmp_path))
    engine = make_engine(pages=POOL, tiers=tiers)
    found = engine.generate(requests())
    held = engine.scheduler.kv_cache.tiers
    assert held is not None and held._disk is not None
    held.settle()
    size = os.fstat(held._disk.descriptor).st_size
    assert size > 10 * PAGE
    for place in range(100, size, 2 * PAGE):
        os.pwrite(held._disk.descriptor, b"\xa5" * 8, place)
    assert_same(found + engine.generate(requests()), expected())
    assert engine.stats()["tier_damaged"] > 0


@pytest.mark.parametrize("swap", ["keep_cache", "recompute"])
def test_new_weights_meet_no_page_of_old_ones(swap: Any):
    """The same version number with other weights, as after a rewind, must not find pages of the former ones."""
    engine = make_engine(pages=POOL, tiers=HostTiers.Config())
    engine.generate(requests())
    assert engine.stats()["tier_host_bytes"] > 0
    engine.set_weights(params(1), 5, swap=swap)
    assert engine.stats()["tier_host_bytes"] == 0
    assert_same(engine.generate(requests()), make_engine(params(1), pages=200).generate(requests()))


def test_a_reset_engine_has_no_pages():
    engine = make_engine(pages=POOL, tiers=HostTiers.Config())
    engine.generate(requests())
    engine.reset()
    assert engine.stats()["tier_host_bytes"] == engine.stats()["pages_used"] == 0
    assert_same(engine.generate(requests()), expected()[: len(expected()) // 2])


def test_pages_of_a_lossy_codec_are_an_approximation():
    engine = make_engine(pages=POOL, tiers=HostTiers.Config(codec="int8"))
    found = engine.generate(requests())
    assert all(r.tags == ("int8-pages",) for r in found)
    assert engine.stats()["tier_hits_host"] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_prefix_caching": False, "tiers": HostTiers.Config()},
        {"kv_cache_dtype": "int8", "tiers": HostTiers.Config(codec="int8")},
    ],
)
def test_tiers_that_cannot_work_are_refused(changes: dict[str, Any]):
    with pytest.raises(ConfigError, match="tiers"):
        make_engine(**changes)


@bring_back
def on_two_devices() -> float:
    requests = [request(n) for n in range(8)]
    expected = make_engine(mesh={"tensor": 2}).generate(requests)
    engine = make_engine(mesh={"tensor": 2}, pages=14, tiers=HostTiers.Config())
    assert_same(engine.generate(requests) + engine.generate(requests), expected + expected)
    return engine.stats()["tier_hits_host"]


@pytest.mark.full
def test_the_same_bits_with_heads_on_two_devices():
    assert elsewhere(on_two_devices, environ=TWO_DEVICES) > 5
