"""Clients of the parameter server, for trainers and workers, in its process or elsewhere."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from axlearn_like.layers.base import Params
from rl.parameter_server.directory import Directory
from rl.parameter_server.pull.receiver import Peer, Receiver
from rl.parameter_server.push.publisher import Publisher, Pusher
from rl.parameter_server.rpc import endpoint_from_text, endpoint_text, remote_directory, remote_shard_server, serve
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.store.page_depot import PageDepot, RemotePageDepot
from rl.parameter_server.store.shard_server import LocalShardServer, ShardServer
from rl.parameter_server.store.shard_store import ShardStore
from rl.parameter_server.transport.client import RpcClient
from rl.parameter_server.transport.endpoint import Endpoint, own_address
from rl.parameter_server.transport.server import RpcServer
from rl.parameter_server.transport.shared_memory import host_identity


class ParameterServerClient:
    """Client of the directory and of all shard servers; creates publishers and receivers.

    >>> import jax.numpy as jnp
    >>> from rl.parameter_server.client import connect_local
    >>> from rl.parameter_server.server import ParameterServer
    >>> server = ParameterServer.Config().build()
    >>> client = connect_local(server)
    >>> client.publisher().publish_async({"w": jnp.arange(4.0)}, version=7).wait()
    True
    >>> client.receiver({"w": jnp.zeros(4)}).pull(7)["w"].tolist()
    [0.0, 1.0, 2.0, 3.0]
    >>> client.close()
    >>> server.close()
    """

    def __init__(
        self,
        cfg: ParameterServer.Config,
        directory: Directory,
        servers: Sequence[ShardServer],
        depot: PageDepot,
        clients: Sequence[RpcClient] = (),
        advertised_host: str | None = None,
    ):
        """`clients`: RPC clients of the remote proxies, closed with this one; `advertised_host`: see `connect`."""
        self._advertised_host, self.depot = advertised_host, depot
        self._cfg, self.directory, self._servers = cfg, directory, list(servers)
        self.remote = bool(clients)
        self._closing: list[RpcClient | RpcServer] = list(clients)

    @property
    def codec(self) -> str:
        """Name of the codec by which weights travel to workers."""
        return self._cfg.codec

    def publisher(
        self,
        *,
        pusher: Pusher | None = None,
        unrounded: Collection[str] = (),
        dtypes: Callable[[str, np.dtype], np.dtype] = lambda path, dtype: dtype,
    ) -> Publisher:
        """Create the publisher of one trainer process (see `Publisher`)."""
        shared = self.remote and self._cfg.shared_memory
        deltas = self.remote and not shared and self._cfg.codec == "delta"
        types: dict[str, Any] = {"unrounded": unrounded, "dtypes": dtypes}
        return Publisher(self.directory, self._servers, pusher=pusher, shared_memory=shared, deltas=deltas, **types)

    def receiver(self, like: Params, worker: str | None = None) -> Receiver:
        """Create a receiver for arrays like these.

        With a `worker` name, unique per process, the receiver also serves peers, unless it can map the server's shared
        memory, which is cheaper than any transfer.
        """
        cfg = self._cfg
        return Receiver(
            self.directory,
            self._servers,
            like,
            codec=cfg.codec,
            shared_memory=self.remote and cfg.shared_memory,
            verify=cfg.verify,
            peer=self._peer(worker) if worker is not None and cfg.peer_to_peer and self._apart() else None,
        )

    def close(self) -> None:
        """Close all connections, and stop serving peers."""
        for end in self._closing:
            end.close()

    def _apart(self) -> bool:
        if not self.remote:
            return False
        return not self._cfg.shared_memory or self._servers[0].host() != host_identity()

    def _peer(self, worker: str) -> Peer:
        cfg, shard_server = self._cfg, LocalShardServer(ShardStore())
        tls = None if cfg.tls is None else cfg.tls.build()
        alone = cfg.host in ("127.0.0.1", "::1", "localhost")
        advertised_host = None if alone else self._advertised_host or own_address()
        server = RpcServer(
            serve(shard_server), host=cfg.host if alone else "0.0.0.0", tls=tls, advertise=advertised_host
        )
        self._closing.append(server)
        links: dict[str, ShardServer] = {}

        def link(endpoint: str) -> ShardServer:
            if endpoint not in links:
                client = RpcClient(endpoint_from_text(endpoint), name="worker", tls=tls)
                self._closing.append(client)
                links[endpoint] = remote_shard_server(client)
            return links[endpoint]

        return Peer(worker, endpoint_text(server.endpoint), shard_server, link)


def connect(
    cfg: ParameterServer.Config,
    locate: Sequence[Callable[[], Endpoint]],
    *,
    retry_timeout: float = 90.0,
    connect_timeout: float = 10.0,
    on_wait: Callable[[int, str, float], None] | None = None,
    warn_after: float = 30.0,
    advertised_host: str | None = None,
) -> ParameterServerClient:
    """Connect to the shard servers whose endpoints these functions resolve, the one with the directory first.

    Args:
        locate: one function per shard server. A lost server is resolved again, for up to `retry_timeout` seconds.
        on_wait: as in `RpcClient`, called with the number of the shard server before the other arguments.
        warn_after: as in `RpcClient`.
        advertised_host: this host's address as peers see it, who may read from here.
    """
    tls = None if cfg.tls is None else cfg.tls.build()
    names = [f"parameter server (server {number})" if number else "parameter server" for number in range(len(locate))]
    clients = [
        RpcClient(
            where,
            name=name,
            tls=tls,
            retry_timeout=retry_timeout,
            connect_timeout=connect_timeout,
            on_wait=None if on_wait is None else partial(on_wait, number),
            warn_after=warn_after,
        )
        for number, (where, name) in enumerate(zip(locate, names, strict=True))
    ]
    servers = [remote_shard_server(client) for client in clients]
    depot = RemotePageDepot(clients[0])
    return ParameterServerClient(cfg, remote_directory(clients[0]), servers, depot, clients, advertised_host)


def connect_local(server: ParameterServer) -> ParameterServerClient:
    """Return a client for roles in the process of shard server 0: no sockets, no copies."""
    assert server.directory is not None, "only shard server 0 has the directory"
    return ParameterServerClient(server.cfg, server.directory, [server.shard_server], server.depot)
