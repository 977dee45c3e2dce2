"""Versions are whole, immutable, never reused, and waited for."""

import dataclasses
import threading

import numpy as np
import pytest

from rl.parameter_server import ParameterServer
from rl.weights.encoding import EncodedWeights, WeightsError, decode, encode


def weights(version: int, value: float | None = None) -> EncodedWeights:
    return encode({"w": np.full(3, version if value is None else value, np.float32)}, version)


def make(keep: int = 3, versions: range = range(0)) -> ParameterServer:
    server = ParameterServer.Config(keep=keep).build()
    for version in versions:
        server.push(weights(version))
    return server


def held(server: ParameterServer) -> list[int]:
    return [manifest.version for manifest in server.manifests()]


def test_the_newest_versions_are_held_and_pulled_exactly():
    server = make(keep=3, versions=range(5))
    assert held(server) == [2, 3, 4]
    assert (server.oldest(), server.latest()) == (2, 4)
    for version in (2, 3, 4):
        pulled = server.pull(version)
        assert pulled.manifest.version == version
        np.testing.assert_array_equal(decode(pulled)["w"], np.full(3, version, np.float32))


def test_an_empty_server_says_so():
    server = make()
    assert (server.oldest(), server.latest(), server.manifests()) == (-1, -1, [])
    with pytest.raises(WeightsError, match=r"version 0 not published within 0 s \(held: none\)"):
        server.pull(0)


def test_a_version_that_is_gone_is_refused_with_those_that_are_there():
    server = make(keep=2, versions=range(4))
    with pytest.raises(WeightsError, match=r"version 1 not published within 0.01 s \(held: 2, 3\)"):
        server.pull(1, timeout=0.01)


def test_the_same_version_with_the_same_content_is_fine_and_with_other_content_refused():
    server = make(versions=range(2))
    server.push(weights(1))
    with pytest.raises(WeightsError, match="version 1 was published before .* refusing other weights"):
        server.push(weights(1, value=9.0))
    np.testing.assert_array_equal(decode(server.pull(1))["w"], np.full(3, 1, np.float32))


def test_a_version_is_not_reused_when_it_is_no_longer_held():
    server = make(keep=1, versions=range(4))
    with pytest.raises(WeightsError, match="version 0 was published before"):
        server.push(weights(0, value=9.0))
    assert held(server) == [3]


def test_a_version_older_than_all_that_a_full_server_holds_is_refused():
    server = make(keep=2)
    for version in (5, 6):
        server.push(weights(version))
    with pytest.raises(WeightsError, match=r"version 4 is older than .* \(held: 5, 6\)"):
        server.push(weights(4))
    assert held(server) == [5, 6]


def test_damaged_weights_never_become_visible():
    server = make(versions=range(1))
    good = weights(1)
    buffer = bytearray(good.buffer)
    buffer[5] ^= 64
    with pytest.raises(WeightsError, match="version 1 are damaged"):
        server.push(dataclasses.replace(good, buffer=buffer))
    assert held(server) == [0]
    server.push(good)  # and do not block the good ones
    assert held(server) == [0, 1]


def test_rewind_forgets_later_versions_so_that_they_can_be_made_again():
    server = make(keep=4, versions=range(4))
    server.rewind(1)
    assert held(server) == [0, 1]
    server.push(weights(2, value=9.0))
    np.testing.assert_array_equal(decode(server.pull(2))["w"], np.full(3, 9.0, np.float32))
    with pytest.raises(WeightsError, match="version 1 was published before"):
        server.push(weights(1, value=9.0))
    server.rewind(5)
    assert held(server) == [0, 1, 2]


def test_a_waiting_pull_gets_the_version_that_another_thread_publishes():
    server = make(versions=range(1))
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(server.pull(2, timeout=60).manifest.version))
    thread.start()
    server.push(weights(1))
    server.push(weights(2))
    thread.join(20)
    assert found == [2]
