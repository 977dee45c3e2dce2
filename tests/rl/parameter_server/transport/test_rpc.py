"""Requests over real sockets: what is sent arrives, in the memory meant for it."""

import gc
import os
import threading
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rl.parameter_server.errors import VersionGone, WeightsError, WrongBase
from rl.parameter_server.transport.client import RpcClient
from rl.parameter_server.transport.server import Body, RpcServer
from tests.rl.parameter_server.transport.rpc_bed import Store, connections, until


def test_fields_and_bytes_go_both_ways(client: RpcClient):
    data = os.urandom(1000)
    assert client.call("echo", {"a": [1, None, "ü"]}, [data]) == ({"a": [1, None, "ü"]}, bytearray(data))
    assert client.call("echo") == ({}, bytearray())


def test_megabytes_arrive_in_the_memory_meant_for_them(client: RpcClient):
    rng = np.random.default_rng(0)
    sent = rng.integers(0, 255, 9 << 20, np.uint8)
    found = np.zeros_like(sent)
    halves = np.split(found, [5 << 20])
    fields, data = client.call("echo", {}, [sent], into=lambda fields, nbytes: halves)
    assert (fields, data) == ({}, None)
    np.testing.assert_array_equal(found, sent)


def test_more_buffers_than_one_system_call_takes(client: RpcClient):
    rng = np.random.default_rng(0)
    sizes = [int(size) for size in rng.integers(0, 3000, 5000)]
    sent = rng.integers(0, 255, sum(sizes), np.uint8)
    found = np.zeros_like(sent)
    cuts = np.cumsum(sizes)[:-1]
    client.call("parts", {"sizes": sizes}, np.split(sent, cuts), into=lambda fields, nbytes: np.split(found, cuts))
    np.testing.assert_array_equal(found, sent)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        np.float32(3).reshape(()),
        np.zeros((0, 4), np.int8),
        np.arange(4, dtype=np.complex64),
    ],
    ids=["bfloat16", "scalar", "empty", "complex"],
)
def test_arrays_travel_as_their_bytes(client: RpcClient, array: np.ndarray):
    assert client.call("echo", {}, [array])[1] == array.tobytes()


def test_an_array_that_would_have_to_be_copied_is_refused(client: RpcClient):
    with pytest.raises(ValueError, match=r"shape \(4, 2\) that is not C-contiguous"):
        client.call("echo", {}, [np.zeros((4, 4))[:, ::2]])
    with pytest.raises(WeightsError, match="127.0.0.1:.*ValueError: .*not C-contiguous"):
        client.call("strided")


def test_no_more_is_read_than_came(client: RpcClient):
    with pytest.raises(WeightsError, match="ValueError: 10 bytes asked for, 7 of 10 are left"):
        client.call("beyond", {}, [bytes(10)])
    client.call("echo")


def test_a_body_that_nobody_reads_is_in_nobodys_way(client: RpcClient):
    assert client.call("ignore", {}, [bytes(3 << 20)]) == ({"nbytes": 3 << 20}, bytearray())
    assert client.call("echo", {"still": "here"})[0] == {"still": "here"}
    assert len(connections()) == 1


def test_memory_of_another_size_than_the_answer(client: RpcClient):
    with pytest.raises(WeightsError, match="5 bytes came for memory of 4"):
        client.call("echo", {}, [b"12345"], into=lambda fields, nbytes: [bytearray(4)])
    assert client.call("echo", {}, [b"12345"])[1] == b"12345"


def test_what_the_caller_of_into_raises_comes_out_as_it_is(client: RpcClient):
    def into(fields: dict[str, Any], nbytes: int) -> list[memoryview]:
        raise FileNotFoundError("mine")

    with pytest.raises(FileNotFoundError, match="mine"):
        client.call("echo", {}, [b"12345"], into=into)
    assert client.call("echo", {}, [b"12345"])[1] == b"12345"


@pytest.mark.parametrize("kind", [VersionGone, WrongBase, WeightsError])
def test_errors_of_weights_travel_as_themselves(client: RpcClient, kind: type[WeightsError]):
    with pytest.raises(WeightsError, match=r"parameter server 127.0.0.1:\d+: version 3 is no more") as caught:
        client.call("fail", {"kind": kind.__name__}, [bytes(1 << 20)])
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "kind", ["Unreachable", "UserError", "ValueError", "KeyError", "TypeError", "FileNotFoundError"]
)
def test_other_errors_travel_too(client: RpcClient, kind: str):
    """An error about a peer behind the server does not mean that the server is unreachable."""
    with pytest.raises(WeightsError, match=r"parameter server 127.0.0.1:\d+: .*version 3 is no more") as caught:
        client.call("fail", {"kind": kind})
    assert type(caught.value) is WeightsError
    assert len(connections()) == 1
    client.call("echo")


def test_headers_are_bounded(client: RpcClient):
    with pytest.raises(ValueError, match="a header of .* bytes is too large"):
        client.call("echo", {"text": "x" * (17 << 20)})
    with pytest.raises(WeightsError, match="a header of .* bytes is too large"):
        client.call("much")


def test_calls_at_the_same_time_take_a_connection_each(client: RpcClient, store: Store):
    waiting = threading.Thread(target=client.call, args=("wait",), kwargs={"timeout": 60})
    waiting.start()
    for number in range(20):
        assert client.call("echo", {"number": number})[0] == {"number": number}
    assert waiting.is_alive()
    store.release.set()
    waiting.join(20)
    assert len(connections()) == 2


def test_many_threads_get_their_own_answers(client: RpcClient):
    wrong: list[int] = []

    def ask(mine: int) -> None:
        rng = np.random.default_rng(mine)
        for _ in range(20):
            sent = rng.integers(0, 255, int(rng.integers(0, 300_000)), np.uint8)
            fields, data = client.call("echo", {"mine": mine}, [sent])
            if fields != {"mine": mine} or data != sent.tobytes():
                wrong.append(mine)

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(connections()) <= 8


@pytest.mark.slow
def test_nothing_of_a_request_is_held_after_its_answer():
    alive: list[weakref.ref[np.ndarray]] = []

    def handle(operation: str, fields: dict[str, Any], body: Body) -> Any:
        array = np.ones(1 << 20, np.uint8)
        alive.append(weakref.ref(array))
        return {}, [array]

    server = RpcServer(handle)
    client = RpcClient(server.endpoint, name="parameter server")
    client.call("read")
    until(lambda: not gc.collect() and alive[0]() is None, "the array is let go")
    client.close()
    server.close()
