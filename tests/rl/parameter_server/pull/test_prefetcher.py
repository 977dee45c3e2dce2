"""Weights are fetched beside generation: what a worker takes is there already, and is what it asked for."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from axlearn_like.layers.base import Params
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.pull import prefetcher as prefetcher_module
from rl.parameter_server.pull.prefetcher import Prefetcher
from rl.parameter_server.server import ParameterServer
from tests.rl.parameter_server.small import constant, host, on_device, publish
from tests.rl.parameter_server.test_server import Deployment, wait_until


class Bed:
    """A server, and followers of it that note what they have placed, and when."""

    def __init__(self, **cfg: Any):
        self.deployment = Deployment(ParameterServer.Config(keep=8, **cfg), remote=True)
        self.client = self.deployment.connect()
        self.placed: list[float] = []

    def prefetcher(self, **options: Any) -> Prefetcher:
        def place(params: Params) -> Params:
            self.placed.append(float(np.asarray(params["w"])[0]))
            return params

        return Prefetcher(self.client.receiver(on_device(constant(0))), place, **options)

    def publish(self, *versions: int) -> None:
        for version in versions:
            publish(self.client, constant(version), version)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setattr(prefetcher_module, "_WAIT", 0.2)  # for which a server that closes waits, too
    made = Bed()
    yield made
    made.deployment.close()


def taken(prefetcher: Prefetcher, version: int, timeout: float = 0.0) -> bool:
    return host(prefetcher.take(version, timeout)[0]) == host(constant(version))


def test_the_next_version_is_here_before_it_is_asked_for(bed: Bed):
    bed.publish(0)
    prefetcher = bed.prefetcher(newest=False)
    assert taken(prefetcher, 0)
    bed.publish(1, 2, 3)
    wait_until(lambda: bed.placed == [0.0, 1.0])
    time.sleep(0.2)
    assert bed.placed == [0.0, 1.0]  # one ahead, and no further
    assert taken(prefetcher, 1)
    wait_until(lambda: bed.placed == [0.0, 1.0, 2.0])
    assert taken(prefetcher, 2)
    prefetcher.close()


def test_another_version_than_the_next_is_fetched_when_it_is_asked_for(bed: Bed):
    bed.publish(0, 1, 2, 3)
    prefetcher = bed.prefetcher(newest=False)
    for version in (0, 3, 1):
        assert taken(prefetcher, version)
    with pytest.raises(WeightsError, match="version 9 not published"):
        prefetcher.take(9)
    assert taken(prefetcher, 2, timeout=10)
    prefetcher.close()


@pytest.mark.parametrize("background", [True, False])
def test_the_newest_version_is_offered_once_and_nothing_older(bed: Bed, background: bool):
    bed.publish(0)
    prefetcher = bed.prefetcher(newest=True, background=background)
    assert taken(prefetcher, 0)
    assert prefetcher.newer() is None
    bed.publish(1, 2)
    found = poll(prefetcher.newer)
    while found[0] < 2:  # in the background it may have met version 1 first
        found = poll(prefetcher.newer)
    assert (found[0], host(found[1])) == (2, host(constant(2)))
    assert prefetcher.newer() is None
    prefetcher.close()


@pytest.mark.parametrize("newest", [True, False])
def test_what_was_fetched_of_a_trainer_that_died_is_not_what_its_successor_published(bed: Bed, newest: bool):
    bed.publish(0)
    prefetcher = bed.prefetcher(newest=newest)
    assert taken(prefetcher, 0)
    bed.publish(1)
    wait_until(lambda: bed.placed == [0.0, 1.0])
    bed.client.directory.rewind(0)
    if newest:
        assert prefetcher.newer() is None
    publish(bed.client, constant(7.0), 1)
    found = poll(prefetcher.newer)[1] if newest else prefetcher.take(1)[0]
    assert host(found) == host(constant(7.0))
    prefetcher.close()


def test_a_server_that_is_gone_for_a_while_is_no_reason_to_stop_following(bed: Bed):
    bed.publish(0)
    prefetcher = bed.prefetcher(newest=True)
    assert taken(prefetcher, 0)
    bed.client.directory.rewind(-1)
    bed.publish(5)
    assert poll(prefetcher.newer)[0] == 5
    prefetcher.close()


def poll(ask: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while (found := ask()) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return found
