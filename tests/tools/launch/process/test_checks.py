"""Versions and clock of a machine are compared with what they should be, and said in a line."""

import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

from tools.launch.process.checks import clock_lines, version_lines


def test_libraries_of_other_versions_are_named(tmp_path: Path):
    pins = tmp_path / "constraints.txt"
    assert list(version_lines(pins)) == []
    pins.write_text(f"# pins\njax=={version('jax')}\nflax==0.1\nlibtpu-not-here==1\nother==2\n")
    assert list(version_lines(pins)) == [f"flax {version('flax')} is installed here; the code was tested with 0.1"]


@pytest.fixture
def metadata() -> Iterator[tuple[str, list[float]]]:
    """A metadata server with a clock of its own."""
    ahead = [0.0]

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() + ahead[0], usegmt=True)

        def do_GET(self) -> None:  # noqa: N802
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}", ahead
    server.shutdown()
    server.server_close()


def test_a_clock_that_is_wrong_is_said(metadata: tuple[str, list[float]]):
    address, ahead = metadata
    assert list(clock_lines({"GCE_METADATA_HOST": address})) == []
    for seconds, said in ((60.0, "60 s behind the platform's"), (-90.0, "s ahead of the platform's")):
        ahead[0] = seconds
        (line,) = clock_lines({"GCE_METADATA_HOST": address})
        assert said in line
    assert list(clock_lines({"GCE_METADATA_HOST": "127.0.0.1:1"})) == [], "there is none"
