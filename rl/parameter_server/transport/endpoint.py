"""Network address and credentials of an RPC server."""

import contextlib
import dataclasses
import socket

import psutil


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """Address, token and TLS authority of a server. `dataclasses.asdict` of it is JSON."""

    host: str
    port: int
    token: str = dataclasses.field(repr=False)
    tls_ca: str | None = None  # file of certificates to verify the server with; None: no TLS

    @property
    def address(self) -> str:
        """Return host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def own_address() -> str:
    """Return this host's address as others see it: of the default route's interface, else of any."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation
        return probe.getsockname()[0]
    addresses = [a.address for nic in psutil.net_if_addrs().values() for a in nic if a.family == socket.AF_INET]
    others = [address for address in addresses if not address.startswith("127.")]
    return others[0] if others else "127.0.0.1"
