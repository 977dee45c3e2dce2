"""The parameter server as trainers and workers see it, in this process or elsewhere."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from axlearn_like.layers.base import Params
from rl.parameter_server.directory import Directory
from rl.parameter_server.pull.receiver import Puller, Relaying
from rl.parameter_server.push.publisher import Publisher
from rl.parameter_server.rpc import RemoteDirectory, RemoteHolder, endpoint_from_text, endpoint_text, serve
from rl.parameter_server.store.shard_server import Holder, Shard
from rl.parameter_server.store.shard_store import PieceStore
from rl.parameter_server.transport.shared_memory import host_identity
from rl.parameter_server.transport.wire import Client, Endpoint, Server, own_address

if TYPE_CHECKING:
    from rl.parameter_server.server import ParameterServer


class WeightAccess:
    """Links to the directory and to the data shards, and what is made with them."""

    def __init__(
        self,
        cfg: "ParameterServer.Config",
        directory: Directory | RemoteDirectory,
        shards: Sequence[Shard],
        clients: Sequence[Client] = (),
        known_as: str | None = None,
    ):
        """`clients`: whose links these are, if they go over sockets. `known_as`: this host's address for others."""
        self._known_as = known_as
        self._cfg, self.directory, self._shards = cfg, directory, list(shards)
        self.remote = isinstance(directory, RemoteDirectory)
        self._closing: list[Client | Server] = list(clients)

    def publisher(self, *, pusher: str | None = None, process: int = 0, processes: int = 1) -> Publisher:
        """For one process of a trainer (see `Publisher`)."""
        shared = self.remote and self._cfg.shared_memory
        return Publisher(
            self.directory, self._shards, pusher=pusher, process=process, processes=processes, shared_memory=shared
        )

    def puller(self, like: Params, worker: str | None = None) -> Puller:
        """For arrays like these. As `worker` (a name of its own for every process) it serves others in turn, unless the
        server's memory can be mapped here, which is cheaper than any serving.
        """
        cfg = self._cfg
        return Puller(
            self.directory,
            self._shards,
            like,
            codec=cfg.codec,
            key_every=cfg.key_every,
            shared_memory=self.remote and cfg.shared_memory,
            verify=cfg.verify,
            relaying=self._relaying(worker) if worker is not None and cfg.relays and self._apart() else None,
        )

    def close(self) -> None:
        """End all connections, and serve no more."""
        for end in self._closing:
            end.close()

    def _apart(self) -> bool:
        if not self.remote:
            return False
        return not self._cfg.shared_memory or self._shards[0].host() != host_identity()

    def _relaying(self, worker: str) -> Relaying:
        cfg, holder = self._cfg, Holder(PieceStore())
        tls = None if cfg.tls is None else cfg.tls.build()
        alone = cfg.host in ("127.0.0.1", "::1", "localhost")
        known_as = None if alone else self._known_as or own_address()
        server = Server(serve(holder), host=cfg.host if alone else "0.0.0.0", tls=tls, advertise=known_as)
        self._closing.append(server)
        links: dict[str, RemoteHolder] = {}

        def link(endpoint: str) -> RemoteHolder:
            if endpoint not in links:
                client = Client(endpoint_from_text(endpoint), name="worker", tls=tls)
                self._closing.append(client)
                links[endpoint] = RemoteHolder(client)
            return links[endpoint]

        return Relaying(worker, endpoint_text(server.endpoint), holder, link)


def connect(
    cfg: "ParameterServer.Config",
    locate: Sequence[Callable[[], Endpoint]],
    *,
    patience: float = 90.0,
    connect_timeout: float = 10.0,
    on_wait: Callable[[int, str, float], None] | None = None,
    say_after: float = 30.0,
    known_as: str | None = None,
) -> WeightAccess:
    """To the shards that these functions find, the directory's first; each is asked anew, for up to `patience` seconds,
    when its shard is gone. `on_wait` and `say_after` are those of `Client`, the number of the shard before the rest.
    `known_as`: this host's address for others, who may be served from here.
    """
    tls = None if cfg.tls is None else cfg.tls.build()
    names = [f"parameter server (shard {number})" if number else "parameter server" for number in range(len(locate))]
    clients = [
        Client(
            where,
            name=name,
            tls=tls,
            patience=patience,
            connect_timeout=connect_timeout,
            on_wait=None if on_wait is None else partial(on_wait, number),
            say_after=say_after,
        )
        for number, (where, name) in enumerate(zip(locate, names, strict=True))
    ]
    shards = [RemoteHolder(client) for client in clients]
    return WeightAccess(cfg, RemoteDirectory(clients[0]), shards, clients, known_as)
