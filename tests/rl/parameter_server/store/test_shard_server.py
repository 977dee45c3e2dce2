"""A shard server refuses what is damaged, and encodes once for all who want the same."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rl.parameter_server.codecs import get_codec
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.fingerprint import as_bytes, digest_of
from rl.parameter_server.store import shard_server as shard_server_module
from rl.parameter_server.store import shard_store
from rl.parameter_server.store.shard_server import LocalShardServer, ReadOptions
from rl.parameter_server.store.shard_store import ShardStore
from rl.parameter_server.transport.shared_memory import SharedSegment, host_identity

BOX = ((0, 1000), (0, 8))
BASE = np.random.default_rng(0).standard_normal((1000, 8)).astype(np.float32)
NEW = np.where(np.arange(1000)[:, None] % 50 == 0, np.nextafter(BASE, np.float32(9)), BASE)


@pytest.fixture
def shard_server() -> LocalShardServer:
    made = LocalShardServer(ShardStore())
    for key, array in ((1, BASE), (2, NEW)):
        made.write(key, [("w", BOX, array, digest_of(array))])
    return made


def test_damaged_shards_are_refused_and_nothing_of_their_request_is_held(shard_server: LocalShardServer):
    good, bad = BASE + 1, BASE + 2
    with pytest.raises(WeightsError, match="w .*damaged in transit"):
        shard_server.write(3, [("v", BOX, good, digest_of(good)), ("w", BOX, bad, digest_of(good))])
    with pytest.raises(VersionGone):
        shard_server.read(3, [("v", BOX)], ReadOptions())


def test_shared_memory_is_read_for_those_who_cannot_map_it(
    shard_server: LocalShardServer, monkeypatch: pytest.MonkeyPatch
):
    read: list[int] = []
    for module in (shard_server_module, shard_store):
        monkeypatch.setattr(module, "digest_of", lambda data: (read.append(1), digest_of(data))[1])
    segment = SharedSegment.create(BASE.nbytes)
    np.copyto(segment.buffer, as_bytes(BASE))
    shard_server.adopt(3, segment.name, [("w", BOX, "float32", 0)])
    shard_server.link(4, 3, [("w", BOX)])
    (answer,) = shard_server.read(4, [("w", BOX)], ReadOptions(host=host_identity()))
    assert answer.location is not None and not answer.data and not answer.digest
    mapped, offset = answer.location
    assert np.array_equal(SharedSegment.attach(mapped).buffer[offset:], segment.buffer)
    assert not read  # neither by the trainer's push nor for a worker on this host
    for key in (3, 4):
        (answer,) = shard_server.read(key, [("w", BOX)], ReadOptions(host="another"))
        assert np.array_equal(answer.data, BASE) and answer.digest == digest_of(BASE)


def test_the_digest_that_was_verified_is_the_one_that_is_given_out(shard_server: LocalShardServer):
    array = BASE + 1
    digest = digest_of(array)
    shard_server.write(3, [("w", BOX, array, digest)])
    array[17, 3] = 9  # damage in the shard server's memory: a reader shall notice
    shard_server.link(4, 3, [("w", BOX)])
    for key in (3, 4):
        (answer,) = shard_server.read(key, [("w", BOX)], ReadOptions())
        assert answer.digest == digest != digest_of(answer.data)


def test_shards_that_reach_beyond_their_segment_are_refused(shard_server: LocalShardServer):
    segment = SharedSegment.create(BASE.nbytes)
    with pytest.raises(WeightsError, match="ends before byte"):
        shard_server.adopt(3, segment.name, [("w", BOX, "float32", 64)])


def test_many_readers_of_one_delta_cost_one_encoding(shard_server: LocalShardServer, monkeypatch: pytest.MonkeyPatch):
    codec, encoded = get_codec("delta"), []
    encode = type(codec).encode
    monkeypatch.setattr(type(codec), "encode", lambda *args: (encoded.append(1), encode(*args))[1])
    options = ReadOptions(codec="delta", base=1)
    with ThreadPoolExecutor(8) as pool:
        answers = [
            part for done in pool.map(lambda _: shard_server.read(2, [("w", BOX)], options), range(16)) for part in done
        ]
    assert len(encoded) == 1
    for answer in answers:
        decoded = codec.decode(answer.data, shape=BASE.shape, dtype=BASE.dtype, base=BASE)
        assert decoded.tobytes() == NEW.tobytes()
        assert len(answer.data) < BASE.nbytes / 20


def test_a_base_that_is_not_held_gives_the_whole(shard_server: LocalShardServer):
    (answer,) = shard_server.read(2, [("w", BOX)], ReadOptions(codec="delta", base=77))
    assert answer.codec == "raw" and np.array_equal(answer.data, NEW)


def test_what_is_not_kept_is_gone_with_what_was_encoded_of_it(shard_server: LocalShardServer):
    shard_server.read(2, [("w", BOX)], ReadOptions(codec="delta", base=1))
    shard_server.keep([1])
    with pytest.raises(VersionGone):
        shard_server.read(2, [("w", BOX)], ReadOptions(codec="delta", base=1))
    assert shard_server._encoded.names() == []
