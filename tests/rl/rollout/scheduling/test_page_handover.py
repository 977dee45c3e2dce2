"""Pages of rollouts that a worker hands back come to the worker that continues them; others are computed again."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from rl.parameter_server.client import connect
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.page_depot import LocalPageDepot, PageDepot
from rl.protocol.messages import Lease, Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.request import Request, StopConditions
from rl.rollout.scheduling.page_handover import PageHandover
from tests.rl.rollout.small import assert_same, make_engine
from tests.rl.tiny import make_prompt

TIERS = HostTiers.Config()
REQUEST = Request(make_prompt(3, 37), seed=5, stop=StopConditions(max_new_tokens=24))


class Damaging(LocalPageDepot):
    """A depot that flips a bit of all that it gives."""

    def take(self, name: str) -> bytes | None:
        data = bytearray(super().take(name) or b"")
        data[len(data) // 2] ^= 4
        return bytes(data)


def leave(depot: PageDepot, events: EventLog) -> tuple[Lease, Rollout, RolloutEngine]:
    """Draw some tokens in one engine, and leave the pages; returns what the next one continues, and that engine."""
    engine = make_engine(tiers=TIERS)
    engine.submit(REQUEST)
    for _ in range(3):
        engine.step()
    (output,) = engine.abort_all()
    (rollout,) = output.rollouts
    lease = Lease(id=1, step=0, prompts=(REQUEST.prompt,), samples=1, version=5, seconds=9.0, partial=(rollout,))
    PageHandover(engine, depot, events).leave("worker-0", dataclasses.replace(lease, partial=()), [rollout])
    return lease, rollout, engine


def go_on(depot: PageDepot, events: EventLog, lease: Lease, version: int = 5) -> tuple[Rollout, float]:
    """Continue in another engine; returns the rollout, and the tokens that were prefilled."""
    engine = make_engine(version=version, tiers=TIERS)
    PageHandover(engine, depot, events).take("worker-1", lease)
    (found,) = engine.generate([dataclasses.replace(REQUEST, partial=lease.partial)])
    return found, engine.stats()["prefill_tokens"]


@pytest.mark.parametrize("remote", [False, True])
def test_a_rollout_goes_on_over_pages_that_were_left(remote: bool, tmp_path: Path) -> None:
    (expected,) = make_engine().generate([REQUEST])
    server = ParameterServer.Config().build(token="t")
    client = connect(server.cfg, [server.listen])
    events, depot = EventLog(tmp_path / "events.jsonl"), client.depot if remote else server.depot
    lease, rollout, _ = leave(depot, events)
    found, prefilled = go_on(depot, events, lease)
    assert_same([found], [expected])
    tokens = 37 + len(rollout.tokens)
    assert prefilled == (tokens - 1) % 8, "but the last page, which is not full"
    left, taken = read_rows(tmp_path / "events.jsonl")
    assert (left["role"], left["event"], left["sequences"]) == ("worker-0", "pages_left", 1)
    assert (taken["event"], taken["pages"], taken["damaged"]) == ("pages_taken", (tokens - 1) // 8, 0)
    assert taken["nbytes"] == left["nbytes"] > 0
    again, prefilled = go_on(depot, events, lease)
    assert_same([again], [expected])
    assert prefilled == tokens - 1, "they are given once"
    client.close()
    server.close()


def test_damaged_pages_and_those_of_another_version_are_computed_again(tmp_path: Path) -> None:
    (expected,) = make_engine().generate([REQUEST])
    events = EventLog(tmp_path / "events.jsonl")
    for depot, version, damaged in ((Damaging(), 5, 1), (LocalPageDepot(), 6, 0)):
        lease, rollout, _ = leave(depot, events)
        found, prefilled = go_on(depot, events, lease, version=version)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        assert prefilled == 37 + len(rollout.tokens) - 1
        taken = read_rows(tmp_path / "events.jsonl")[-1]
        assert (taken["sequences"], taken["pages"], taken["damaged"]) == (0, 0, damaged)


def test_a_depot_has_a_limit_and_the_oldest_pages_make_room() -> None:
    depot = LocalPageDepot(10)
    for name, size in (("a", 4), ("b", 4), ("a", 3), ("c", 5)):
        depot.put(name, bytes(size))
    assert [depot.take(name) for name in "abc"] == [bytes(3), None, bytes(5)]
    depot.put("too large", bytes(11))
    depot.put("d", bytes(10))
    assert depot.take("too large") is None and depot.take("d") == bytes(10)
