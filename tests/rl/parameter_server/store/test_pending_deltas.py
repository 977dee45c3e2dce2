"""Deltas are passed on as they came, and decoded for readers that want more, or before their base goes."""

import time

import numpy as np
import pytest

from rl.parameter_server.codecs.delta import DELTA, DeltaCodec
from rl.parameter_server.codecs.layout import CHECKSUM_NBYTES, add_checksum
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.fingerprint import digest_of
from rl.parameter_server.index_ranges import whole
from rl.parameter_server.store.pending_deltas import DeltaShard, PendingDeltas
from rl.parameter_server.store.shard_server import LocalShardServer, ReadOptions
from rl.parameter_server.store.shard_store import ShardStore

CODEC = DeltaCodec()
VERSIONS = [np.arange(4000, dtype=np.uint16) + (np.arange(4000) % 50 < key).astype(np.uint16) for key in range(5)]
RANGE = whole((4000,))


def delta(key: int, base: int) -> DeltaShard:
    blob = bytes(CODEC.encode(VERSIONS[key], VERSIONS[base]))
    return DeltaShard("w", RANGE, "uint16", digest_of(VERSIONS[key]), blob)


@pytest.fixture
def server() -> LocalShardServer:
    """Key 0 in full, and keys 1 to 3 as deltas, each to the one before."""
    made = LocalShardServer(ShardStore())
    made.write(0, [("w", RANGE, VERSIONS[0], digest_of(VERSIONS[0]))])
    for key in (1, 2, 3):
        made.write_deltas(key, key - 1, [delta(key, key - 1)])
    return made


def decoded(server: LocalShardServer) -> list[int]:
    return server.store.versions()


def test_who_has_the_base_gets_the_very_bytes_before_and_after_they_are_decoded(server: LocalShardServer):
    options = ReadOptions(codec="delta", base=2)
    (answer,) = server.read(3, [("w", RANGE)], options)
    assert (answer.codec, answer.digest, answer.data) == ("delta", digest_of(VERSIONS[3]), delta(3, 2).blob)
    assert decoded(server) == [0]
    server.read(3, [("w", RANGE)], ReadOptions())
    (again,) = server.read(3, [("w", RANGE)], options)
    assert again == answer


def test_a_part_or_another_base_is_read_from_the_decoded_shards(server: LocalShardServer):
    part = ((17, 1000),)
    (answer,) = server.read(2, [("w", part)], ReadOptions(codec="delta", base=1))
    base = VERSIONS[1][17:1000]
    assert np.array_equal(CODEC.decode(answer.data, shape=(983,), dtype="uint16", base=base), VERSIONS[2][17:1000])
    assert decoded(server) == [0, 1, 2]
    (answer,) = server.read(3, [("w", RANGE)], ReadOptions(codec="delta", base=0))
    found = CODEC.decode(answer.data, shape=(4000,), dtype="uint16", base=VERSIONS[0])
    assert np.array_equal(found, VERSIONS[3]) and answer.digest == digest_of(VERSIONS[3])


def test_what_is_a_delta_to_a_version_that_goes_is_decoded_first(server: LocalShardServer):
    server.keep({2, 3})
    assert decoded(server) == [2]
    (answer,) = server.read(3, [("w", RANGE)], ReadOptions())
    assert np.array_equal(answer.data, VERSIONS[3]) and answer.digest == digest_of(VERSIONS[3])
    server.keep(())
    assert decoded(server) == []
    with pytest.raises(VersionGone):
        server.read(3, [("w", RANGE)], ReadOptions())


def test_a_reader_whose_base_is_gone_gets_the_bytes_of_the_trainer(server: LocalShardServer):
    server.keep({1})
    assert decoded(server) == [1]
    (answer,) = server.read(1, [("w", RANGE)], ReadOptions(codec="delta", base=0))
    assert (answer.codec, answer.digest, answer.data) == ("delta", digest_of(VERSIONS[1]), delta(1, 0).blob)
    (answer,) = server.read(1, [("w", ((17, 1000),))], ReadOptions(codec="delta", base=0))
    assert answer.codec == "raw" and np.array_equal(answer.data, VERSIONS[1][17:1000])


def test_links_of_frozen_tensors_decode_no_other(server: LocalShardServer):
    server.write(3, [("frozen", RANGE, VERSIONS[0], digest_of(VERSIONS[0]))])
    server.link(4, 3, [("frozen", RANGE)])
    assert server._deltas.keys() == [1, 2, 3]
    server.link(4, 3, [("w", RANGE)])
    assert server._deltas.keys() == []
    (answer,) = server.read(4, [("w", RANGE)], ReadOptions())
    assert np.array_equal(answer.data, VERSIONS[3])


def test_a_blob_without_the_digest_of_its_result_is_refused(server: LocalShardServer):
    noise = np.random.default_rng(0).integers(0, 1 << 16, 4000, np.uint16)
    dense = bytes(CODEC.encode(noise, VERSIONS[3]))
    short = bytes(add_checksum(np.array([0] * CHECKSUM_NBYTES + [DELTA, 7], np.uint8)))
    for blob in (dense, short):
        with pytest.raises(WeightsError, match=r"w\[0:4000\]: not a delta with the digest"):
            server.write_deltas(4, 3, [DeltaShard("w", RANGE, "uint16", digest_of(noise), blob)])


def test_a_delta_to_what_is_not_held_is_refused(server: LocalShardServer):
    for base, shard in (
        (7, delta(4, 3)),
        (3, delta(4, 3)._replace(tensor="v")),
        (0, delta(4, 0)._replace(dtype="int16")),
    ):
        with pytest.raises(VersionGone, match="the base of its delta"):
            server.write_deltas(4, base, [shard])


def test_a_delta_that_decodes_to_something_else_is_never_read(server: LocalShardServer):
    server.write_deltas(4, 3, [delta(4, 3)._replace(digest=digest_of(VERSIONS[0]))])
    for _ in range(2):
        with pytest.raises(WeightsError, match=r"w\[0:4000\]: its delta decodes to digest"):
            server.read(4, [("w", RANGE)], ReadOptions())
    server.keep({4})  # its base goes: it cannot be decoded, and goes too
    assert decoded(server) == []
    server.keep(())
    assert server.keys() == []
    assert server._encoded.names() == []


def test_deltas_are_decoded_when_nothing_has_arrived_for_a_while():
    store = ShardStore()
    store.add(0, [("w", RANGE, VERSIONS[0])])
    pending = PendingDeltas(store, idle=0.01)
    pending.add(1, 0, [delta(1, 0)])
    end = time.monotonic() + 30
    while 1 not in store.versions() and time.monotonic() < end:
        time.sleep(0.01)
    assert np.array_equal(store.read(1, "w", RANGE), VERSIONS[1])
    assert pending.find(1, "w", RANGE, 0) is None
