"""`axl watch --serve`: the page over real HTTP, and requests that have no business there."""

import http.client
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from mesh.errors import UserError
from tests.axlearn_like.tiny import ROOT
from tests.tools.report.made_up_run import HOSTILE, Page, write_run
from tools.watch.serve import ReportServer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("served") / "mine", steps=20, finished=False)
    (path.parent / "secret.txt").write_text("secret")
    return path


@pytest.fixture
def server(run: Path) -> Iterator[ReportServer]:
    with ReportServer(run) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: ReportServer, target: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request(method, target, headers=headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def test_the_page_is_the_report_it_renews_itself_and_runs_nothing(server: ReportServer, run: Path) -> None:
    target = server.url.partition(str(server.server_port))[2]
    status, headers, body = ask(server, target)
    assert status == 200 and "stopped before its end" in body and HOSTILE not in body
    page = Page(body)
    assert page.open == [] and "Reward during RL" in " ".join(page.words)
    assert not {"script", "iframe", "form", "img"} & {tag for tag, _ in page.tags}
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "script" not in policy
    assert headers["refresh"] == "5" and headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer" and headers["x-content-type-options"] == "nosniff"
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"phase": "rl", "step": 4321, "time": 1795000999.0, "reward": 0.25}\n')
    server._until = 0.0  # pyright: ignore[reportPrivateUsage]
    assert "RL step 4321" in ask(server, target)[2]


def test_who_has_not_the_token_sees_nothing(server: ReportServer) -> None:
    token = urlsplit(server.url).query.partition("=")[2]
    assert len(token) >= 20
    for target in (
        "/",
        "/?token=",
        f"/?token={token[:-1]}",
        f"/?token={token}x",
        f"/?Token={token}",
        f"/{token}",
        "/?token=%ff",
    ):
        status, headers, body = ask(server, target)
        assert (status, "mine" in body, "refresh" in headers) == (403, False, False)
    for host in ("evil.example", f"evil.example:{server.server_port}", "", f"127.0.0.1:{server.server_port + 1}"):
        assert ask(server, f"/?token={token}", Host=host)[0] == 403  # a name that was bound again to this machine
    assert ask(server, f"/?token={token}", Host=f"localhost:{server.server_port}")[0] == 200


def test_there_is_nothing_but_the_page(server: ReportServer) -> None:
    token = server.url.partition("?")[2]
    for path in (
        "/../secret.txt",
        "/metrics.jsonl",
        "/%2e%2e/secret.txt",
        "//etc/passwd",
        "/report.html",
        "/./",
        "/?x",
    ):
        status, _, body = ask(server, f"{path}?{token}")
        assert status in (403, 404) and "secret" not in body and "root:" not in body
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert ask(server, f"/?{token}", method)[0] == 501
    with socket.create_connection(("127.0.0.1", server.server_port)) as raw:
        raw.sendall(b"GET http://[/?token=x HTTP/1.1\r\nHost: a\r\n\r\n")
        assert raw.recv(100).split()[1] in (b"403", b"500")
    assert ask(server, f"/?{token}")[0] == 200


def test_it_listens_on_loopback_alone_and_a_taken_port_is_refused(server: ReportServer, run: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(UserError, match=rf"--port {server.server_port}: cannot listen there: .*in use"):
        ReportServer(run, server.server_port)


@pytest.mark.slow
def test_the_command_prints_the_address_and_ends_on_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "tools.cli", "watch", "--serve", str(run)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = urlsplit(process.stdout.readline().split()[-1])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
    connection.request("GET", f"/?{url.query}")
    assert connection.getresponse().status == 200
    idle = socket.create_connection(("127.0.0.1", url.port or 0))  # as browsers open in advance
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    idle.close()
    assert process.returncode == 0 and err == ""
