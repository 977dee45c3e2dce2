"""Shards of a version as differences to those of the version before, made where both are in memory."""

from collections.abc import Mapping, Sequence

from rl.parameter_server.codecs.delta import DeltaCodec
from rl.parameter_server.push.snapshot import HostShard
from rl.parameter_server.store.pending_deltas import DeltaShard
from rl.parameter_server.store.shard_server import ShardId

_LEAST = 1 << 10  # bytes of a shard: for smaller ones a delta saves nothing
_WIDEST = 2  # bytes of an entry: of float32 weights nearly all change in every update


def encode_deltas(
    shards: Sequence[HostShard], bases: Mapping[ShardId, HostShard]
) -> tuple[list[DeltaShard], list[HostShard]]:
    """Return the shards worth a delta to their `bases` (by tensor and index range), encoded, and the rest."""
    codec, deltas, rest = DeltaCodec(), [], []
    for shard in shards:
        base, array = bases.get(shard_id(shard)), shard.array
        worth = array.nbytes >= _LEAST and array.dtype.itemsize <= _WIDEST
        if base is None or not worth or base.array.dtype != array.dtype:
            rest.append(shard)
            continue
        blob = bytes(codec.encode(array, base.array))
        if len(blob) >= array.nbytes:
            rest.append(shard)
            continue
        digest = codec.digest(blob)
        assert digest is not None, "only blobs longer than the array have none"
        deltas.append(DeltaShard(*shard_id(shard), array.dtype.name, digest, blob))
    return deltas, rest


def shard_id(shard: HostShard) -> ShardId:
    """Return the tensor and index range of a shard."""
    return shard.tensor, shard.index_range
