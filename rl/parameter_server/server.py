"""The parameter server: versions of the weights in memory, published whole, verified, never reused.

It is made of data shards, each a store of pieces that may live in a process of its own, and one directory, which lives
with the first of them. See rl/parameter_server for the parts, docs/concepts/parameter-server.md for the whole.
"""

import secrets
from collections.abc import Sequence

from axlearn_like.config import ConfigBase, Configurable
from mesh import UserError
from rl.parameter_server.broadcast import Relays
from rl.parameter_server.client import WeightAccess
from rl.parameter_server.codecs import get_codec
from rl.parameter_server.directory import Directory
from rl.parameter_server.rpc import Handle, serve
from rl.parameter_server.store.offload import Spill
from rl.parameter_server.store.shard_server import Holder, Shard
from rl.parameter_server.store.shard_store import PieceStore
from rl.parameter_server.transport.shared_memory import sweep
from rl.parameter_server.transport.tls import Tls
from rl.parameter_server.transport.wire import Endpoint, Server, own_address


class ParameterServer(Configurable):
    """One process's part of the server: data shard `index`, and the directory if that is 0."""

    class Config(ConfigBase["ParameterServer"]):
        keep: int = 4  # versions in memory
        shards: int = 1  # processes
        host: str = "127.0.0.1"  # where the bytes are served
        port: int = 0  # of shard 0, the next for shard 1, and so on; 0: any free port
        tls: Tls.Config | None = None
        shared_memory: bool = True  # between processes of one host
        codec: str = "raw"  # how weights travel to workers: raw, delta (lossless), bf16 or int8 (approximate)
        key_every: int = 0  # with codec="delta": versions that are a multiple of it travel whole; 0: none
        relays: bool = True  # workers on other hosts serve each other
        fanout: int = 2  # workers that one of them serves at a time
        verify: bool = True  # contents, on the workers' devices
        spill: str | None = None  # disk or bucket for versions not kept in memory: file://, gs:// or s3://
        spill_keep: int = 16  # versions there

    def __init__(self, cfg: Config, *, index: int = 0, others: Sequence[Shard] = (), token: str | None = None):
        """`others`: links to the shards behind this one, for the directory."""
        for name, least in {"keep": 1, "shards": 1, "fanout": 1, "key_every": 0, "spill_keep": 1}.items():
            if getattr(cfg, name) < least:
                raise UserError(f"parameter_server.{name}={getattr(cfg, name)}; expected {least} or more")
        try:
            get_codec(cfg.codec)
        except UserError as error:
            raise UserError(f"parameter_server.codec: {error}") from error
        sweep()
        self.cfg = cfg
        self.holder = Holder(PieceStore(), None if cfg.spill is None else self._open_spill(cfg, index))
        self.directory: Directory | None = None
        if index == 0:
            self.directory = Directory(
                [self.holder, *others],
                keep=cfg.keep,
                relays=Relays(fanout=cfg.fanout, first_id=secrets.randbits(40) << 20),
                spills=cfg.spill is not None,
            )
        self._server: Server | None = None
        self._index, self._token = index, token

    @staticmethod
    def _open_spill(cfg: Config, index: int) -> Spill:
        assert cfg.spill is not None
        place = f"{cfg.spill.rstrip('/')}/shard-{index}"
        return Spill(place, cfg.spill_keep, setting="parameter_server.spill")

    def listen(self, known_as: str | None = None) -> Endpoint:
        """Serve on the socket that the config names, once; where that is. `known_as`: this host's address for others,
        where the server listens on all that it has.
        """
        if self._server is None:
            tls = None if self.cfg.tls is None else self.cfg.tls.build()
            port = self.cfg.port and self.cfg.port + self._index
            try:
                self._server = Server(
                    self.answers(),
                    host=self.cfg.host,
                    port=port,
                    token=self._token,
                    tls=tls,
                    advertise=(known_as or own_address()) if self.cfg.host in ("0.0.0.0", "::") else None,
                )
            except UserError as error:
                raise UserError(f"parameter server {error} (parameter_server.host, parameter_server.port)") from error
        return self._server.endpoint

    def answers(self) -> Handle:
        """To requests over the wire."""
        return serve(self.holder, self.directory)

    def access(self) -> WeightAccess:
        """For roles that live in this process: no sockets, no copies."""
        assert self.directory is not None, "only shard 0 has the directory"
        return WeightAccess(self.cfg, self.directory, [self.holder])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.holder.keep(())
