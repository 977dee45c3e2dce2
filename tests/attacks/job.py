"""Strangers beside a running `axl rl`, on the machine of all its roles: after each attack the next update comes."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from rl.audit.invariants import check_run
from tests.attacks.attack import Attack, check_words
from tests.benches.recovery.run import COMMAND, ROOT, WatchedRun
from tests.chaos.listeners import is_loopback, listeners
from tests.rl.runtime.test_cluster_file import HOSTILE

_GARBAGE = {
    "random bytes": bytes(range(256)) * 256,
    "a request of HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a header of 4 GB": b"AXLW\0\0\0\0\xff\xff\xff\xff" + bytes(64),
    "a preface of HTTP/2 without a token": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + b"\xff" * 60,
}
_JOIN = """
import os, ray
ray.init(address=os.environ["ADDRESS"], namespace="x", log_to_driver=False)
print("JOINED", ray.cluster_resources())
"""


_JOIN_S = 20  # a join of one who knows the token takes 2


class Place:
    """A running job."""

    def __init__(self, run: WatchedRun):
        self.run = run
        self.cluster = json.loads((run.run_dir / "cluster.json").read_text())

    def ports(self) -> list[tuple[str, int]]:
        """Return the addresses on which processes of the job accept connections."""
        found = sorted(listeners(self.run.pid(COMMAND)))
        assert found and all(is_loopback(host) for host, _ in found), found
        return found

    def check(self, what: str) -> str:
        """Expect a further update by the processes that there were."""
        before, began = {role: self.run.pid(role) for role in self.run.roles()}, time.monotonic()
        self.run.wait_for_update(f"an update after {what}")
        assert {role: self.run.pid(role) for role in before} == before, "a role was started again"
        return f"update {self.run.step} after {time.monotonic() - began:.1f} s"


@contextmanager
def place(folder: Path) -> Iterator[Place]:
    """Start a job on Ray with a worker; at the end it saves, and what it did is audited."""
    with WatchedRun(folder / "job", "tests.chaos.experiments:endless", ("--set", "workers=1")) as run:
        run.start()
        run.wait_for("the first update", lambda: run.count("update") > 0, 900.0)
        yield Place(run)
        assert run.stop() == 0, run.said()
        assert [line for finding in check_run(run.run_dir) for line in finding.broken] == []
        assert "Traceback" not in run.said(), run.said()[-2000:]


def _garbage(text: bytes, place: Place) -> str:
    ports = place.ports()
    for address in ports:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as client:
            client.settimeout(0.2)
            client.sendall(text)
            with contextlib.suppress(OSError):
                client.recv(100)
    return f"{len(ports)} ports, {place.check('garbage')}"


def _silent(place: Place) -> str:
    ports = place.ports()
    with ExitStack() as stack:
        for address in ports:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    stack.enter_context(socket.create_connection(address, timeout=5))
        return f"{len(ports)} ports, {place.check('silence')}"


def _join(token: str, place: Place) -> str:
    """Join Ray as a program of another user would, who can read the address alone; Ray tries for minutes."""
    environ = {**os.environ, "ADDRESS": place.cluster["address"], "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    words, said = [sys.executable, "-c", _JOIN], b""
    try:
        done = subprocess.run(words, env=environ, capture_output=True, cwd="/", timeout=_JOIN_S, check=False)
        assert done.returncode != 0, done.stdout
        said, what = done.stdout, "refused"
    except subprocess.TimeoutExpired as error:
        said, what = error.stdout or b"", f"not let in within {_JOIN_S} s"
    assert b"JOINED" not in said
    return f"{what}, {place.check('a stranger')}"


def _cluster(place: Place) -> str:
    """Replace the file by which workers find the job; one that joins must not go elsewhere, nor end the job."""
    path, said = place.run.run_dir / "cluster.json", ""
    kept = path.read_bytes()
    elsewhere = '{"address": "203.0.113.5:6379", "namespace": "x", "token": "theirs"}'
    for text in (elsewhere, HOSTILE[3]):
        path.write_text(text)
        words = [sys.executable, "-m", "tools.cli", "worker", str(place.run.run_dir)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 2, done.stderr
        said = check_words(done.stderr)
    path.write_bytes(kept)
    assert said
    return f"two refusals, {place.check('another cluster file')}"


def _locked(place: Place) -> str:
    """Plant a lock and a memory of another config; commands that come now must leave the job its directory."""
    (place.run.run_dir / ".undo.json").write_text("[" * 100_000)
    words = [sys.executable, "-m", "tools.cli", "rl", "tests.chaos.experiments:endless", "--force"]
    words += ["--run-dir", str(place.run.run_dir), "--set", "workers=1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2 and "in use" in done.stderr, done.stderr
    (place.run.run_dir / ".undo.json").unlink()
    return f"refused, {place.check('a second command')}"


_HOLDS = "the next update comes, by the same processes"
ATTACKS = (
    *(
        Attack(f"`axl rl`: {name}", "bytes to each of its ports", _HOLDS, partial(_garbage, text))
        for name, text in _GARBAGE.items()
    ),
    Attack("`axl rl`: silent connections", "50 to each of its ports", _HOLDS, _silent),
    Attack("`axl rl`: no token", "a program that joins Ray", "it is refused", partial(_join, "")),
    Attack("`axl rl`: another token", "a program that joins Ray", "it is refused", partial(_join, "0" * 64)),
    Attack("`axl worker`: the job's cluster file", "another address", "workers do not go there", _cluster),
    Attack("`axl rl --force`: a running job", "a second command, a memory of another config", "it is refused", _locked),
)
