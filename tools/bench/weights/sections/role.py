"""The process of one role: it reads requests from standard input, one per line, and answers in JSON.

python -m tools.bench.weights.sections.role server OPTIONS
"""

import json
import os
import sys
import threading
import time
from typing import Any

import jax

from rl.parameter_server.client import ParameterServerClient, connect
from rl.parameter_server.pull.receiver import Receiver
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.transport.endpoint import Endpoint
from tools.bench.weights.sections import model

Answer = dict[str, Any]


class Clocks:
    """Wall seconds and this process's CPU seconds inside the `with` block. All processes share the clock of `began`."""

    def __enter__(self) -> "Clocks":
        self.began, self._cpu = time.monotonic(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.cpu_s = time.monotonic() - self.began, time.process_time() - self._cpu


class Role:
    """A role, whose public methods are its requests."""

    def spent(self) -> Answer:
        """Return the CPU seconds of this process."""
        return {"cpu_s": time.process_time()}

    def ready(self) -> Answer:
        """Return the answer that the process sends when it has started."""
        return {}


class Server(Role):
    """The parameter server, which counts what it sends."""

    def __init__(self, keep: int = 1):
        self._server = ParameterServer.Config(keep=keep).build()
        self._sent, self._lock = 0, threading.Lock()
        shard_server, read = self._server.shard_server, self._server.shard_server.read

        def counted(*args: Any) -> Any:
            answers = read(*args)
            with self._lock:
                self._sent += sum(memoryview(answer.data).nbytes for answer in answers)
            return answers

        shard_server.read = counted  # pyright: ignore

    def ready(self) -> Answer:
        """Start to listen and return the address."""
        endpoint = self._server.listen()
        return {"host": endpoint.host, "port": endpoint.port, "token": endpoint.token}

    def sent(self) -> Answer:
        """Return the bytes sent since the last call."""
        sent, self._sent = self._sent, 0
        return {"nbytes": sent}


class Trainer(Role):
    """A trainer that publishes the gigabyte, or a part of it."""

    def __init__(self, place: dict[str, Any], cut: int = 1):
        self._params = model.random_weights(cut)
        self._publishers = {shared: reach(place, shared_memory=shared).publisher() for shared in (False, True)}

    def publish(self, version: int, shared: bool) -> Answer:
        """Publish; `copy_s`: until the trainer may overwrite its arrays; `wall_s`: until the version can be read."""
        params = jax.block_until_ready(model.updated(self._params, version))
        with Clocks() as clocks:
            push = self._publishers[shared].publish_async(params, version)
            nbytes, copied = push.snapshot().nbytes, time.monotonic()
            push.wait()
        return {
            "nbytes": nbytes,
            "wall_s": clocks.wall_s,
            "cpu_s": clocks.cpu_s,
            "copy_s": copied - clocks.began,
            "at": clocks.began + clocks.wall_s,
        }


class PolicyTrainer(Role):
    """A trainer that publishes the policy of the engine's benchmark periodically."""

    def __init__(self, place: dict[str, Any], quick: bool):
        from tools.bench.rollout.sections.bed import Bed

        self._params = Bed(quick=quick).params()
        self._publishers = {shared: reach(place, shared_memory=shared).publisher() for shared in (False, True)}
        self._stop = threading.Event()

    def begin(self, first: int, every: float, shared: bool) -> Answer:
        """Publish version `first`, and from then on, in the background, the next one every `every` seconds."""
        self._published: list[tuple[int, float]] = []
        self._stop.clear()
        self._publish(first, shared)
        self._thread = threading.Thread(target=self._go_on, args=(first + 1, every, shared))
        self._thread.start()
        return {}

    def end(self) -> Answer:
        """Stop publishing; return the versions, with the time at which each was published."""
        self._stop.set()
        self._thread.join()
        return {"published": self._published}

    def _go_on(self, version: int, every: float, shared: bool) -> None:
        while not self._stop.wait(every):
            self._publish(version, shared)
            version += 1

    def _publish(self, version: int, shared: bool) -> None:
        params = jax.block_until_ready(jax.tree.map(lambda leaf: leaf * 1.0001, self._params))
        self._publishers[shared].publish_async(params, version).wait()
        self._published.append((version, time.monotonic()))


class Resharding(Role):
    """A process that publishes from one mesh of virtual devices and pulls to another."""

    def __init__(self, devices: int):
        jax.config.update("jax_num_cpu_devices", devices)

    def overread(self, trainer: dict[str, int], worker: dict[str, int], cut: int) -> Answer:
        """Return the bytes needed and requested, and the statistics of the pull."""
        from tools.bench.weights.sections.reshard import spread

        server = ParameterServer.Config(shared_memory=False).build()
        access = connect(server.cfg, [server.listen])
        access.publisher().publish_async(spread(trainer, cut), 0).wait()
        like = spread(worker, cut)
        receiver = access.receiver(like)
        pulled = receiver.pull(0)
        if not all(map(jax.numpy.array_equal, jax.tree.leaves(pulled), jax.tree.leaves(like))):
            raise AssertionError(f"{trainer} -> {worker}: other weights came")
        server.close()
        stats = receiver.stats
        return {"needed": stats.needed, "read": stats.read, "network": stats.network}


class Worker(Role):
    """A worker that pulls the trainer's versions."""

    def __init__(self, place: dict[str, Any], cut: int = 1, name: str | None = None):
        self._place, self._cut, self._name = place, cut, name
        self._accesses: list[ParameterServerClient] = []
        self._receivers: dict[tuple[bool, bool, bool], Receiver] = {}

    def pull(self, version: int, shared: bool = False, verify: bool = True, peer_to_peer: bool = False) -> Answer:
        """Pull a version to arrays on the device, then release those of the previous version, as a worker does."""
        receiver = self._receiver(shared, verify, peer_to_peer)
        with Clocks() as clocks:
            params = jax.block_until_ready(receiver.pull(version, 60.0))
        if int(params["layer0"]["ffn_norm"][0]) != version:
            raise AssertionError(f"version {version} was asked for")
        self._in_use = params
        stats = receiver.stats
        return {
            "wall_s": clocks.wall_s,
            "cpu_s": clocks.cpu_s,
            "at": clocks.began + clocks.wall_s,
            "needed": stats.needed,
            "read": stats.read,
            "network": stats.network,
            "mapped": stats.mapped,
            "source": stats.source,
        }

    def _receiver(self, shared: bool, verify: bool, peer_to_peer: bool) -> Receiver:
        key = (shared, verify, peer_to_peer)
        if key not in self._receivers:
            access = reach(self._place, shared_memory=shared, verify=verify, peer_to_peer=peer_to_peer)
            self._accesses.append(access)
            self._receivers[key] = access.receiver(model.like(self._cut), self._name)
        return self._receivers[key]


def reach(place: dict[str, Any], **settings: Any) -> ParameterServerClient:
    """Return a client of the parameter server at a place."""
    endpoint = Endpoint(**place)
    return connect(ParameterServer.Config().set(**settings), [lambda: endpoint])


ROLES: dict[str, type[Role]] = {
    "server": Server,
    "trainer": Trainer,
    "policy_trainer": PolicyTrainer,
    "worker": Worker,
    "resharding": Resharding,
}


def main(kind: str, options: dict[str, Any]) -> None:
    """Serve the requests of one role until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is no answer
    role = ROLES[kind](**options)
    replies.write(json.dumps(role.ready()) + "\n")
    for line in sys.stdin:
        what, fields = json.loads(line)
        replies.write(json.dumps(getattr(role, what)(**fields)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
