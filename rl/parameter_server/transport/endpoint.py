"""Where a server of weights is, as one process tells another."""

import contextlib
import dataclasses
import socket

import psutil


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens, and how to get in. `dataclasses.asdict` of it is JSON."""

    host: str
    port: int
    token: str = dataclasses.field(repr=False)
    tls_ca: str | None = None  # file of certificates by which a client verifies the server; None: no TLS

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def own_address() -> str:
    """The address of this host that others see: of the interface that its default route goes by (no packet is sent), or
    of any if it has no such route.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # of a range that is reserved for documentation
        return probe.getsockname()[0]
    addresses = [a.address for nic in psutil.net_if_addrs().values() for a in nic if a.family == socket.AF_INET]
    others = [address for address in addresses if not address.startswith("127.")]
    return others[0] if others else "127.0.0.1"
