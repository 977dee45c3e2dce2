"""Requests that go on in another engine, over pages that came with them."""

import dataclasses
import multiprocessing
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh import UserError
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.request import Request, StopConditions
from rl.rollout.scheduling.page_exports import export_pages, import_pages
from tests.rl.rollout import test_engine_routing
from tests.rl.rollout.small import assert_same, make_engine, params
from tests.rl.tiny import make_prompt, tiny_params

pytestmark = pytest.mark.numerics

TIERS = HostTiers.Config()
REQUEST = Request(make_prompt(3, 37), seed=5, stop=StopConditions(max_new_tokens=24))
PAGE = 8


def interrupted(engine: RolloutEngine) -> tuple[Request, np.ndarray]:
    """Draw some tokens, end the request as a worker does that must go, and return what is left to do."""
    engine.submit(REQUEST)
    for _ in range(3):
        engine.step()
    (output,) = engine.abort_all()
    (rollout,) = output.rollouts
    assert rollout.finish_reason == "abort" and 4 <= len(rollout.tokens) < 24
    return dataclasses.replace(REQUEST, partial=(rollout,)), np.concatenate([REQUEST.prompt.tokens, rollout.tokens])


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, pytest.param(test_engine_routing.RECORDING, marks=pytest.mark.full)])
def test_a_request_goes_on_in_another_engine_without_prefill(model: Any):
    changes = {} if model is None else {"model": model}
    weights = params() if model is None else tiny_params(model, 0)
    (expected,) = make_engine(weights, **changes).generate([REQUEST])
    source, target = (make_engine(weights, tiers=TIERS, **changes) for _ in range(2))
    rest, tokens = interrupted(source)
    data = export_pages(source, tokens)
    moved = import_pages(target, data)
    assert moved == (len(tokens) - 1) // PAGE * PAGE
    (found,) = target.generate([rest])
    assert_same([found], [expected])
    np.testing.assert_array_equal(found.routing, expected.routing)
    stats = target.stats()
    assert stats["tier_hits_host"] == moved // PAGE and stats["prefill_tokens"] == len(tokens) - 1 - moved
    assert_same(source.generate([rest]), [expected])


def _serve(data: bytes, rest: Request, sent: Callable[[Any], None]) -> None:
    engine = make_engine(tiers=TIERS)
    moved = import_pages(engine, data)
    sent((moved, engine.generate([rest])[0], engine.stats()["prefill_tokens"]))


def _child(connection: Any) -> None:
    data, rest = connection.recv_bytes(), connection.recv()
    _serve(data, rest, connection.send)


@pytest.mark.full
def test_pages_move_to_another_process():
    source = make_engine(tiers=TIERS)
    rest, tokens = interrupted(source)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_child, args=(theirs,))
    process.start()
    ours.send_bytes(export_pages(source, tokens))
    ours.send(rest)
    assert ours.poll(200)
    moved, rollout, prefilled = ours.recv()
    process.join()
    assert moved == (len(tokens) - 1) // PAGE * PAGE and prefilled == len(tokens) - 1 - moved
    assert_same([rollout], make_engine().generate([REQUEST]))


@pytest.mark.slow
def test_pages_are_exported_from_the_tiers_too(tmp_path: Path):
    """A pool so small that the pages have left it, host memory too small for all of them."""
    tiers = HostTiers.Config(host_bytes=6 * 1032, disk=str(tmp_path))  # six on their way at once fit
    source, target = make_engine(pages=9, tiers=tiers), make_engine(tiers=TIERS)
    rest, tokens = interrupted(source)
    source.generate([Request(make_prompt(9, 40), samples=2, seed=1)])
    kv_cache = source.scheduler.kv_cache
    pages, _ = kv_cache.hold((5, None), tokens.astype(np.int32))
    kv_cache.pool.release(pages)
    assert len(pages) < len(tokens) // PAGE - 1
    assert kv_cache.tiers is not None and kv_cache.tiers.stats()["tier_disk_bytes"] > 0
    moved = import_pages(target, export_pages(source, tokens))
    assert moved >= 32
    assert_same(target.generate([rest]), make_engine().generate([REQUEST]))


def test_nothing_is_cached_and_nothing_moves():
    source, target = make_engine(tiers=TIERS), make_engine(tiers=TIERS)
    assert import_pages(target, export_pages(source, REQUEST.prompt.tokens)) == 0


OTHERS: dict[str, tuple[Callable[[], RolloutEngine], str]] = {
    "other weights of the same version": (lambda: make_engine(params(1), tiers=TIERS), "whose policy is"),
    "another version": (lambda: make_engine(version=6, tiers=TIERS), "whose version is 5; expected 6"),
    "pages of another size": (lambda: make_engine(page_size=16, tiers=TIERS), "whose page size is 8; expected 16"),
    "another cache": (lambda: make_engine(kv_cache_dtype="int8", tiers=TIERS), "whose form of pages is"),
    "no tiers": (make_engine, "RolloutEngine.tiers is None"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_an_engine_refuses_pages_of_others(case: str):
    source = make_engine(tiers=TIERS)
    _, tokens = interrupted(source)
    make, text = OTHERS[case]
    target = make()
    with pytest.raises(UserError, match=text):
        import_pages(target, export_pages(source, tokens))
    assert target.stats().get("tier_host_bytes", 0) == 0


def test_damaged_pages_are_refused_whole():
    source, target = make_engine(tiers=TIERS), make_engine(tiers=TIERS)
    _, tokens = interrupted(source)
    data = export_pages(source, tokens)
    for place in (30, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 4
        with pytest.raises(UserError, match="damaged"):
            import_pages(target, bytes(changed))
    for cut in (data[:-1], data[: len(data) // 2]):
        with pytest.raises(UserError, match="damaged"):
            import_pages(target, cut)
    for nothing in (b"", b"x" * 200, struct.pack("<Q", 7)):
        with pytest.raises(UserError, match="no pages of an engine"):
            import_pages(target, nothing)
    assert target.stats()["tier_host_bytes"] == 0
