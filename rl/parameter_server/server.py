"""The parameter server: versions of the weights in memory, published whole, verified, never reused.

It consists of shard servers, each with a store of shards and possibly in a process of its own, and one directory in the
process of the first. docs/concepts/parameter-server.md describes the protocol.
"""

import secrets
from collections.abc import Sequence
from typing import override

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.kernels.exact.scope import numerics_of
from axlearn_like.run.clock import REAL, RunClock
from axlearn_like.run.object_store import store_spec
from mesh import UserError
from mesh.distributed import is_loopback
from rl.parameter_server.broadcast import BroadcastScheduler
from rl.parameter_server.codecs import get_codec
from rl.parameter_server.codecs.rows import RowCodec
from rl.parameter_server.directory import Directory
from rl.parameter_server.rpc import Handle, serve
from rl.parameter_server.store.offload import OffloadStore
from rl.parameter_server.store.page_depot import LocalPageDepot
from rl.parameter_server.store.shard_server import LocalShardServer, ShardServer
from rl.parameter_server.store.shard_store import ShardStore
from rl.parameter_server.transport.endpoint import Endpoint, own_address
from rl.parameter_server.transport.server import RpcServer
from rl.parameter_server.transport.tls import Tls
from rl.protocol.experiment import ExperimentFields

_SWEEP_DELAY = 0.5  # seconds: by then workers that wait for a version have read it


class ParameterServer(Configurable):
    """One process of the parameter server: shard server `index`, and the directory if that is 0."""

    class Config(ConfigBase["ParameterServer"]):
        keep: int = 4  # number of versions held in memory
        shard_servers: int = 1  # number of server processes
        host: str = "127.0.0.1"  # address to listen on
        port: int = 0  # port of server 0, with the next ports for the others; 0: any free port
        tls: Tls.Config | None = None
        shared_memory: bool = True  # use shared memory between processes of one host
        codec: str = "raw"  # encoding of weights: raw, delta (lossless), bf16, int8, ecsq or hevc (approximate)
        peer_to_peer: bool = True  # workers on other hosts serve each other
        fanout: int = 2  # concurrent readers of one worker
        verify: bool = True  # fingerprints of the contents, on the workers' devices
        offload: str | None = None  # disk or bucket for versions evicted from memory: file://, gs:// or s3://
        offload_keep: int = 16  # number of versions held there

        @override
        def reaches(self) -> tuple[str, ...]:
            offload = () if self.offload is None or self.offload.startswith("memory://") else (self.offload,)
            return offload if is_loopback(self.host) else (*offload, f"listen:{self.host}")

        @override
        def check_fields(self) -> None:
            self.require_least(1, "keep", "shard_servers", "fanout", "offload_keep")
            with self.errors_in("codec"):
                get_codec(self.codec)
            if self.offload is not None:
                with self.errors_in("offload"):
                    store_spec(self.offload, "offload")

        def requires(self, experiment: ExperimentFields) -> None:
            """Refuse too few versions for the experiment's staleness, and weights that change where none may."""
            least = experiment.staleness + 2  # staleness + 1 that workers may ask for, and the one that is being pushed
            self.require("keep", self.keep >= least, f"{least} or more with staleness={experiment.staleness}")
            same = numerics_of(experiment.policy) != "exact" or self.codec in ("raw", "delta")
            expected = 'raw or delta with policy.numerics="exact", for workers must have the numbers of the trainer'
            self.require("codec", same, expected)
            with self.errors_in("codec"):
                rounded = not isinstance(get_codec(self.codec), RowCodec) or experiment.objective.corrects
            expected = f"raw or delta; {self.codec} needs an objective with importance=TruncatedImportance.Config(...)"
            self.require("codec", rounded, expected)

    def __init__(
        self,
        cfg: Config,
        *,
        index: int = 0,
        others: Sequence[ShardServer] = (),
        token: str | None = None,
        clock: RunClock = REAL,
    ):
        """Create shard server `index`; `others` are the remaining shard servers, for the directory."""
        self.cfg = cfg
        self.shard_server = LocalShardServer(
            ShardStore(), None if cfg.offload is None else self._open_offload(cfg, index)
        )
        self.directory: Directory | None = None
        self.depot = LocalPageDepot()
        if index == 0:
            self.directory = Directory(
                [self.shard_server, *others],
                keep=cfg.keep,
                broadcast=BroadcastScheduler(fanout=cfg.fanout, first_id=secrets.randbits(40) << 20, clock=clock),
                offloads=cfg.offload is not None,
                sweep_delay=_SWEEP_DELAY,
                clock=clock,
            )
        self._server: RpcServer | None = None
        self._index, self._token = index, token

    @staticmethod
    def _open_offload(cfg: Config, index: int) -> OffloadStore:
        assert cfg.offload is not None
        place = f"{cfg.offload.rstrip('/')}/server-{index}"
        return OffloadStore(place, cfg.offload_keep, setting="parameter_server.offload")

    def listen(self, advertised_host: str | None = None) -> Endpoint:
        """Listen on the config's socket, once; returns the endpoint. `advertised_host`: this host as others see it."""
        if self._server is None:
            tls = None if self.cfg.tls is None else self.cfg.tls.build()
            port = self.cfg.port and self.cfg.port + self._index
            try:
                self._server = RpcServer(
                    self.answers(),
                    host=self.cfg.host,
                    port=port,
                    token=self._token,
                    tls=tls,
                    advertise=(advertised_host or own_address()) if self.cfg.host in ("0.0.0.0", "::") else None,
                )
            except UserError as error:
                raise UserError(f"parameter server {error} (parameter_server.host, parameter_server.port)") from error
        return self._server.endpoint

    def answers(self) -> Handle:
        """Return the handler of RPC requests."""
        return serve(self.shard_server, self.directory, self.depot)

    def release(self, worker: str) -> None:
        """Free the source from which a worker that is gone was reading, and read no more from that worker."""
        if self.directory is not None:
            self.directory.forget(worker)

    def close(self) -> None:
        """Stop listening, and drop all shards."""
        if self._server is not None:
            self._server.close()
        self.shard_server.keep(())
