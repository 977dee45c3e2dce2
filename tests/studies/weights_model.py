"""Analytical model of the parameter server: bytes, and lower bounds in seconds, of large policies on TPU fleets.

Every figure is a bound computed from bandwidths, or a simulation of the broadcast scheduler; none is a measurement.
Units: bytes, seconds, bytes per second; GB is 1e9 bytes.
"""

import dataclasses
import math

from tests.studies.broadcast_simulation import Outcome, simulate

GB = 1e9
ENCODE, DECODE = 0.55, 0.4  # CPU seconds for a GB of weights, 3 % changed; measured, docs/benchmarks/codecs.md


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """Machine with accelerators and NICs. The sources of the figures are in docs/benchmarks/weights-at-scale.md."""

    name: str
    chips: int
    hbm: float  # a chip
    pcie: float  # a chip, one way
    nic: float  # the host, each way
    memory: float
    cores: int
    memory_bandwidth: float = 200 * GB


V5P = Host("v5p", chips=4, hbm=95 * GB, pcie=15 * GB, nic=25 * GB, memory=448 * GB, cores=104)
V6E = Host("v6e", chips=8, hbm=32 * GB, pcie=32 * GB, nic=100 * GB, memory=1440 * GB, cores=90)
V5E = Host("v5e", chips=8, hbm=16 * GB, pcie=15 * GB, nic=25 * GB, memory=384 * GB, cores=112)
SERVER = Host("server", chips=0, hbm=0, pcie=0, nic=25 * GB, memory=704 * GB, cores=88)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Policy of `params` bfloat16 values, its trainer hosts, shard-server hosts, and rollout workers (replicas)."""

    policy: str
    params: float
    host: Host
    trainer_hosts: int
    server_hosts: int
    worker_hosts: int  # hosts of one worker
    workers: int

    @property
    def name(self) -> str:
        """Policy and host."""
        return f"{self.policy}, {self.host.name}"

    @property
    def total(self) -> float:
        """Bytes of the weights in bfloat16."""
        return 2 * self.params

    @property
    def pushed(self) -> float:
        """Bytes that a trainer host sends; a server host receives `total / server_hosts`."""
        return self.total / self.trainer_hosts

    @property
    def share(self) -> float:
        """Bytes that a worker host receives: a worker holds every value once, sharded evenly over its chips."""
        return self.total / self.worker_hosts

    @property
    def server_links(self) -> float:
        """Number of worker NICs that the servers can saturate with each shard set."""
        return self.server_hosts * SERVER.nic / self.worker_hosts / self.host.nic


CASES = (
    Case("32B", 32.8e9, V5P, trainer_hosts=64, server_hosts=8, worker_hosts=1, workers=128),
    Case("32B", 32.8e9, V6E, trainer_hosts=32, server_hosts=8, worker_hosts=1, workers=64),
    Case("32B", 32.8e9, V5E, trainer_hosts=32, server_hosts=8, worker_hosts=2, workers=64),
    Case("671B", 671e9, V5P, trainer_hosts=256, server_hosts=32, worker_hosts=16, workers=16),
    Case("671B", 671e9, V6E, trainer_hosts=128, server_hosts=32, worker_hosts=16, workers=16),
    Case("671B", 671e9, V5E, trainer_hosts=128, server_hosts=32, worker_hosts=32, workers=16),
)


def push_bounds(case: Case) -> dict[str, float]:
    """Return a lower bound in seconds for each resource of one push. Pushes are not compressed.

    Host memory sees every byte twice (written by one device, read by the next); device memory is read whole.
    """
    host, received = case.host, case.total / case.server_hosts
    return {
        "PCIe": case.pushed / (host.chips * host.pcie),
        "host memory": 2 * max(case.pushed / host.memory_bandwidth, received / SERVER.memory_bandwidth),
        "trainer NIC": case.pushed / host.nic,
        "server NIC": received / SERVER.nic,
    }


def pull_bounds(case: Case, ratio: float = 1.0, codec: bool = False) -> dict[str, float]:
    """Return a lower bound in seconds for each resource when one worker pulls alone, compressed `ratio` times.

    The servers encode with all their cores, the worker decodes with its own, in host memory, and copies to the devices.
    """
    host = case.host
    encode = case.total / case.server_hosts / GB * ENCODE / SERVER.cores if codec else 0.0
    return {
        "encode": encode,
        "server NIC": case.total / ratio / (case.server_hosts * SERVER.nic),
        "worker NIC": case.share / ratio / host.nic,
        "decode": case.share / GB * DECODE / host.cores if codec else 0.0,
        "host memory": (2 if ratio == 1 else 3) * case.share / host.memory_bandwidth,
        "PCIe": case.share / (host.chips * host.pcie),
    }


def pipelined(workers: int, chunks: int) -> float:
    """Return the transfers until the end of a chain in which each worker forwards a chunk while it reads the next."""
    return 1 + (workers - 1) / chunks


def direct(case: Case) -> float:
    """Return the seconds until the servers have sent every version to every worker."""
    return max(case.workers * case.total / (case.server_hosts * SERVER.nic), case.share / case.host.nic)


def broadcast(case: Case, fanout: int, seeds: int = 1) -> Outcome:
    """Simulate as many readers of each shard set as there are workers; shard sets are read concurrently."""
    return simulate(case.workers, fanout=fanout, seeds=seeds, server_egress=case.server_links)


def hop(case: Case, ratio: float) -> float:
    """Return the seconds from one reader to the next: each source encodes for its readers, each reader decodes."""
    return case.share / ratio / case.host.nic + case.share / GB * (ENCODE + DECODE) / case.host.cores


def readers_within(limit: float, transfer: float, first: float) -> str:
    """Return the readers done within `limit` seconds: sources double with every transfer of `transfer` seconds.

    The first transfer, from the server, takes `first` seconds if that is longer.
    """
    doublings = math.floor((limit - max(first, transfer)) / transfer + 1e-9)
    return "0" if doublings < 0 else f"{2**doublings:,}" if doublings < 20 else "over 1,000,000"
