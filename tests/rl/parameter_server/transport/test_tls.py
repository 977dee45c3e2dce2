"""TLS of the RPC, with certificates made by the `openssl` command."""

import dataclasses
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh import UserError
from rl.parameter_server.transport.client import RpcClient, Unreachable
from rl.parameter_server.transport.server import Body, RpcServer
from rl.parameter_server.transport.tls import Tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no `openssl` command to make certificates")


def openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def self_signed(folder: Path, name: str, hosts: str = "IP:127.0.0.1") -> tuple[str, str]:
    cert, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "2"),
        *("-subj", f"/CN={name}", "-addext", f"subjectAltName={hosts}", "-keyout", key, "-out", cert),
    )
    return str(cert), str(key)


def signed(folder: Path, name: str, ca: tuple[str, str]) -> tuple[str, str]:
    cert, key, request, extra = (folder / f"{name}{end}" for end in (".pem", "-key.pem", ".csr", ".ext"))
    extra.write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-subj", f"/CN={name}"),
        *("-keyout", key, "-out", request),
    )
    openssl(
        *("x509", "-req", "-in", request, "-CA", ca[0], "-CAkey", ca[1], "-days", "2", "-extfile", extra, "-out", cert),
    )
    return str(cert), str(key)


@dataclasses.dataclass(frozen=True)
class Certificates:
    """Pairs of files, certificate and key."""

    own: tuple[str, str]  # signed by itself
    other: tuple[str, str]
    elsewhere: tuple[str, str]  # certificate of another host
    ca: tuple[str, str]
    server: tuple[str, str]  # signed by `ca`
    client: tuple[str, str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    ca = self_signed(folder, "ca")
    return Certificates(
        own=self_signed(folder, "own"),
        other=self_signed(folder, "other"),
        elsewhere=self_signed(folder, "elsewhere", "DNS:trainer-7.example"),
        ca=ca,
        server=signed(folder, "server", ca),
        client=signed(folder, "client", ca),
    )


def echo(operation: str, fields: dict[str, Any], body: Body) -> Any:
    return fields, [body.read()]


def tls(pair: tuple[str, str], **options: Any) -> Tls:
    return Tls.Config(cert=pair[0], key=pair[1], **options).build()


@pytest.fixture
def server(made: Certificates) -> Iterator[RpcServer]:
    running = RpcServer(echo, tls=tls(made.own))
    yield running
    running.close()


def test_bytes_arrive(server: RpcServer, made: Certificates):
    assert server.endpoint.tls_ca == made.own[0]
    client = RpcClient(server.endpoint, name="parameter server")
    for size in (0, 1, 5 << 20):
        data = os.urandom(size)
        assert client.call("echo", {"size": size}, [data]) == ({"size": size}, data)
    parts = [np.full(size, size % 251, np.uint8) for size in (3, 40_000, 0, 17, 200_000, 5, 1_000_000)]
    found = [np.zeros_like(part) for part in parts]
    client.call("echo", {}, parts, into=lambda fields, nbytes: found)
    assert all(np.array_equal(one, other) for one, other in zip(parts, found, strict=True))
    client.close()


def test_the_token_is_asked_for_as_well(server: RpcServer):
    with pytest.raises(Unreachable, match="wrong token"):
        RpcClient(dataclasses.replace(server.endpoint, token="guess"), name="parameter server").call("echo")


def test_a_certificate_of_another_authority_is_refused(server: RpcServer, made: Certificates):
    stranger = dataclasses.replace(server.endpoint, tls_ca=made.other[0])
    expected = r"parameter server 127.0.0.1:\d+: echo failed: its certificate is refused: .*self.signed.*\(tls.ca"
    with pytest.raises(Unreachable, match=expected):
        RpcClient(stranger, name="parameter server").call("echo")


def test_a_certificate_of_another_host_is_refused_unless_told_otherwise(made: Certificates):
    server = RpcServer(echo, tls=tls(made.elsewhere))
    with pytest.raises(Unreachable, match="its certificate is refused: .*127.0.0.1.*tls.check_host"):
        RpcClient(server.endpoint, name="parameter server").call("echo")
    lenient = Tls.Config(ca=made.elsewhere[0], check_host=False).build()
    client = RpcClient(server.endpoint, name="parameter server", tls=lenient)
    assert client.call("echo", {"a": 1})[0] == {"a": 1}
    client.close()
    server.close()


def test_one_side_without_tls_is_an_error_that_says_so(server: RpcServer, made: Certificates):
    plain = dataclasses.replace(server.endpoint, tls_ca=None)
    with pytest.raises(Unreachable, match="echo failed: nothing came for 0.3 s"):
        RpcClient(plain, name="parameter server", connect_timeout=0.3).call("echo")
    open_server = RpcServer(echo)
    hoping = dataclasses.replace(open_server.endpoint, tls_ca=made.own[0])
    with pytest.raises(Unreachable, match="echo failed: no TLS: "):
        RpcClient(hoping, name="parameter server").call("echo")
    open_server.close()


def test_a_silent_server_ends_the_wait(server: RpcServer):
    client = RpcClient(server.endpoint, name="parameter server", connect_timeout=0.3)

    def never(operation: str, fields: dict[str, Any], body: Body) -> Any:
        done.wait(30)
        return {}

    done = threading.Event()
    server._handle = never
    with pytest.raises(Unreachable, match="wait failed: nothing came for 0.3 s"):
        client.call("wait")
    done.set()
    client.close()


def test_clients_may_have_to_show_a_certificate(made: Certificates):
    server = RpcServer(echo, tls=tls(made.server, ca=made.ca[0], verify_clients=True))
    assert server.endpoint.tls_ca == made.ca[0]
    known = RpcClient(server.endpoint, name="parameter server", tls=tls(made.client, ca=made.ca[0]))
    assert known.call("echo", {"a": 1})[0] == {"a": 1}
    for stranger in (None, tls(made.other, ca=made.ca[0])):
        with pytest.raises(Unreachable, match="echo failed"):
            RpcClient(server.endpoint, name="parameter server", tls=stranger).call("echo")
    known.close()
    server.close()


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, "Tls.cert: expected a file, or ca"),
        ({"cert": "/nowhere.pem"}, "Tls.cert: expected a file that exists, got '/nowhere.pem'"),
        ({"ca": "/nowhere.pem"}, "Tls.ca: expected a file that exists, got '/nowhere.pem'"),
        ({"ca": __file__}, "tls.ca=.*test_tls.py: no certificates in PEM form"),
    ],
)
def test_wrong_files_are_named(fields: dict[str, Any], expected: str):
    with pytest.raises(UserError, match=expected):
        assert Tls.Config(**fields).build().client_context


def test_a_server_needs_a_certificate(made: Certificates):
    with pytest.raises(UserError, match="tls.cert is empty"):
        RpcServer(echo, tls=Tls.Config(ca=made.ca[0]).build())


def test_a_key_of_another_certificate_is_refused(made: Certificates):
    with pytest.raises(UserError, match="not a certificate and its private key"):
        RpcServer(echo, tls=tls((made.own[0], made.other[1])))
