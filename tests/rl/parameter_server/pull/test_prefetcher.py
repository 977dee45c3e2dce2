"""Weights are fetched beside generation: what a worker takes is there already, and is what it asked for."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from axlearn_like.layers.base import Params
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.pull.prefetcher import Follower
from rl.parameter_server.server import ParameterServer
from tests.rl.parameter_server.small import constant, host, on_device, publish
from tests.rl.parameter_server.test_server import Deployment, wait_until


class Bed:
    """A server, and followers of it that note what they have placed, and when."""

    def __init__(self, **cfg: Any):
        self.deployment = Deployment(ParameterServer.Config(keep=8, **cfg), remote=True)
        self.access = self.deployment.access()
        self.placed: list[float] = []

    def follower(self, **options: Any) -> Follower:
        def place(params: Params) -> Params:
            self.placed.append(float(np.asarray(params["w"])[0]))
            return params

        return Follower(self.access.puller(on_device(constant(0))), place, **options)

    def publish(self, *versions: int) -> None:
        for version in versions:
            publish(self.access, constant(version), version)


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    yield made
    made.deployment.close()


def taken(follower: Follower, version: int, timeout: float = 0.0) -> bool:
    return host(follower.take(version, timeout)[0]) == host(constant(version))


def test_the_next_version_is_here_before_it_is_asked_for(bed: Bed):
    bed.publish(0)
    follower = bed.follower(newest=False)
    assert taken(follower, 0)
    bed.publish(1, 2, 3)
    wait_until(lambda: bed.placed == [0.0, 1.0])
    time.sleep(0.2)
    assert bed.placed == [0.0, 1.0]  # one ahead, and no further
    assert taken(follower, 1)
    wait_until(lambda: bed.placed == [0.0, 1.0, 2.0])
    assert taken(follower, 2)
    follower.close()


def test_another_version_than_the_next_is_fetched_when_it_is_asked_for(bed: Bed):
    bed.publish(0, 1, 2, 3)
    follower = bed.follower(newest=False)
    for version in (0, 3, 1):
        assert taken(follower, version)
    with pytest.raises(WeightsError, match="version 9 not published"):
        follower.take(9)
    assert taken(follower, 2, timeout=10)
    follower.close()


@pytest.mark.parametrize("background", [True, False])
def test_the_newest_version_is_offered_once_and_nothing_older(bed: Bed, background: bool):
    bed.publish(0)
    follower = bed.follower(newest=True, background=background)
    assert taken(follower, 0)
    assert follower.newer() is None
    bed.publish(1, 2)
    found = poll(follower.newer)
    while found[0] < 2:  # in the background it may have met version 1 first
        found = poll(follower.newer)
    assert (found[0], host(found[1])) == (2, host(constant(2)))
    assert follower.newer() is None
    follower.close()


@pytest.mark.parametrize("newest", [True, False])
def test_what_was_fetched_of_a_trainer_that_died_is_not_what_its_successor_published(bed: Bed, newest: bool):
    bed.publish(0)
    follower = bed.follower(newest=newest)
    assert taken(follower, 0)
    bed.publish(1)
    wait_until(lambda: bed.placed == [0.0, 1.0])
    bed.access.directory.rewind(0)
    if newest:
        assert follower.newer() is None
    publish(bed.access, constant(7.0), 1)
    found = poll(follower.newer)[1] if newest else follower.take(1)[0]
    assert host(found) == host(constant(7.0))
    follower.close()


def test_a_server_that_is_gone_for_a_while_is_no_reason_to_stop_following(bed: Bed):
    bed.publish(0)
    follower = bed.follower(newest=True)
    assert taken(follower, 0)
    bed.access.directory.rewind(-1)
    bed.publish(5)
    assert poll(follower.newer)[0] == 5
    follower.close()


def poll(ask: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while (found := ask()) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return found
