"""Addresses on which the processes of a run accept connections."""

import contextlib
import ipaddress

import psutil


def listeners(pid: int) -> set[tuple[str, int]]:
    """Return the addresses on which the processes started by this one accept connections."""
    found = set()
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return {(address.ip, address.port) for address in found}


def is_loopback(host: str) -> bool:
    """Return True for a loopback address, ::ffff:127.0.0.1 included."""
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
