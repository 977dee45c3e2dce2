"""A parameter server of some shard servers, in one process or over connections."""

import time
from typing import Any

from rl.parameter_server.client import ParameterServerClient, connect, connect_local
from rl.parameter_server.server import ParameterServer


class Deployment:
    """A parameter server of some shard servers, and how a role reaches it."""

    def __init__(self, cfg: ParameterServer.Config, *, remote: bool):
        others = [ParameterServer(cfg, index=index) for index in range(1, cfg.shard_servers)]
        self.servers = [ParameterServer(cfg, others=[other.shard_server for other in others]), *others]
        self.cfg, self.remote = cfg, remote
        self._clients: list[ParameterServerClient] = []

    def connect(self) -> ParameterServerClient:
        if not self.remote:
            return connect_local(self.servers[0])
        self._clients.append(connect(self.cfg, [server.listen for server in self.servers]))
        return self._clients[-1]

    def held(self) -> int:
        return sum(server.shard_server.store.nbytes() for server in self.servers)

    def held_soon(self, most: int) -> int:
        """Return the bytes held, once they are no more than `most`; what they are after 20 s if they stay more."""
        end = time.monotonic() + 20
        while self.held() > most and time.monotonic() < end:
            time.sleep(0.01)
        return self.held()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for server in self.servers:
            server.close()


WAYS: dict[str, dict[str, Any]] = {
    "in one process": {"remote": False},
    "shared memory": {"remote": True},
    "sockets": {"remote": True, "shared_memory": False},
    "three shard servers": {"remote": True, "shared_memory": False, "shard_servers": 3},
    "deltas": {"remote": True, "shared_memory": False, "codec": "delta"},
}


def deploy(way: str) -> Deployment:
    """Start the servers of one of `WAYS`."""
    changes = dict(WAYS[way])
    remote = changes.pop("remote")
    return Deployment(ParameterServer.Config(keep=3).set(**changes), remote=remote)
