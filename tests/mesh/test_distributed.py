"""A process that does not come is named, and no other waits for ever."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mesh import UserError
from mesh.distributed import free_address, rendezvous


def test_all_that_come_go_on_whoever_else_knocks():
    address = free_address()
    host, _, port = address.rpartition(":")
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(rendezvous, address, index, 3, "trainer", 60.0) for index in (1, 2)]
        first = pool.submit(rendezvous, address, 0, 3, "trainer", 60.0)
        stranger = threading.Thread(target=knock, args=(host, int(port)))
        stranger.start()
        assert [done.result() for done in (first, *others)] == [None] * 3
        stranger.join()


def knock(host: str, port: int) -> None:
    """Send a line that is not ours, as a port scanner does."""
    try:
        with socket.create_connection((host, port), timeout=5.0) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n")
    except OSError:
        pass


def test_the_first_names_who_has_not_come():
    address = free_address()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(rendezvous, address, 2, 4, "trainer", 3.0)
        with pytest.raises(UserError, match=f"trainer has waited 2 s for trainer-1, trainer-3 to come to {address}"):
            rendezvous(address, 0, 4, "trainer", 2.0)
        with pytest.raises(UserError, match="trainer-2 has waited 3 s"):
            other.result()


def test_the_others_name_the_address():
    address = free_address()
    with pytest.raises(UserError, match=f"trainer-1 has waited 0 s at {address} for trainer and the others"):
        rendezvous(address, 1, 2, "trainer", 0.4)
