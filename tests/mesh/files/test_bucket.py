"""Files of buckets against a server of their protocol, which fails when asked to."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mesh.files import bucket as module
from mesh.files.bucket import Bucket, BucketError, bucket_url
from tests.bucket_server import BucketServer, Fault, bucket_server, cut, reset, slow, status


async def _no_pause(_: float) -> None:
    """Take the place of the pauses between gcsfs's repetitions."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    import gcsfs.retry

    monkeypatch.setattr(gcsfs.retry, "asyncio", SimpleNamespace(sleep=_no_pause))
    monkeypatch.setattr(module, "_TIMEOUT", 2.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    with bucket_server(monkeypatch) as found:
        yield found


def _files(tmp_path: Path, **contents: bytes) -> dict[str, Path]:
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {name: tmp_path / name for name in contents}


@pytest.mark.slow
def test_files_go_there_and_come_back(server: BucketServer, tmp_path: Path):
    there = Bucket("gs://bucket/some/run", "--run-dir")
    assert there.files() == {}
    large = bytes(range(256)) * 30_000  # more than one request
    there.put(_files(tmp_path, small=b"hello", large=large, empty=b""))
    there.write("inner/late", b"1")
    there.copy("inner/late", "inner/twin")
    found = there.files()
    assert {name: size for name, (size, _) in found.items()} == {
        "small": 5,
        "large": len(large),
        "empty": 0,
        "inner/late": 1,
        "inner/twin": 1,
    }
    there.write("inner/late", b"2")
    assert there.files()["inner/late"][1] != found["inner/late"][1], "the mark changes with the content"
    sizes = {name: size for name, (size, _) in found.items()}
    there.get({name: tmp_path / "back" / name for name in found}, sizes)
    assert (tmp_path / "back/large").read_bytes() == large
    assert (tmp_path / "back/inner/late").read_bytes() == b"2"
    assert Bucket("gs://bucket/some/run/small", "x").files()["."][0] == 5
    there.remove(["small", "not there"])
    assert "small" not in there.files()


def test_only_the_first_of_two_creates_a_file(server: BucketServer):
    there = Bucket("gs://bucket/run", "x")
    assert there.create("owner/1", b"first")
    assert not there.create("owner/1", b"second")
    assert there.read("owner/1") == b"first"
    assert any("ifGenerationMatch=0" in line for line in server.requests), "the server decides"


def test_a_create_whose_answer_was_lost_has_succeeded(server: BucketServer):
    there = Bucket("gs://bucket/run", "x")

    def lose(request: object) -> bool:
        Bucket("gs://bucket/run", "x").write("owner/1", b"mine")  # the first request has arrived
        return reset(request)  # pyright: ignore[reportArgumentType]

    server.fail("POST /upload", lose)
    assert there.create("owner/1", b"mine")


@pytest.mark.parametrize("fault", [status(503), status(429), status(500), reset, slow(4.0)])
def test_what_may_pass_is_tried_again(fault: Fault, server: BucketServer, tmp_path: Path):
    there = Bucket("gs://bucket/run", "x")
    server.fail("POST /upload", fault, fault)
    there.put(_files(tmp_path, a=b"x" * 5000))
    server.fail("alt=media", fault, *([cut] if fault is reset else []))
    there.get({"a": tmp_path / "back"}, {"a": 5000})
    assert (tmp_path / "back").read_bytes() == b"x" * 5000
    assert not server.faults


def test_a_bucket_that_never_answers_is_one_message_within_bounds(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_FIRST", 3.0)
    server.fail("GET", *[status(503)] * 1000)
    began = time.monotonic()
    with pytest.raises(BucketError, match=r"^--run-dir: could not list gs://bucket/run: scripted, 503$"):
        Bucket("gs://bucket/run", "--run-dir").files()
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("code", "message"), [(401, "Anonymous caller"), (403, "no storage.objects.list access")])
def test_lost_credentials_are_said_at_once(code: int, message: str, server: BucketServer):
    there = Bucket("gs://bucket/run", "--run-dir")
    there.write("a", b"1")
    server.fail("POST /upload", *[status(code, message)] * 100)
    before = len(server.requests)
    with pytest.raises(BucketError, match=r"no right to write gs://bucket/run/a \(.*gcloud auth application-default"):
        there.write("a", b"2")
    assert len(server.requests) - before == 1, "no repetition mends it"
    server.faults.clear()
    assert there.read("a") == b"1"


def test_names_that_lead_elsewhere_are_refused(server: BucketServer):
    Bucket("gs://bucket/run", "x").write("a/../../../home", b"")
    with pytest.raises(BucketError, match=r"holds 'a/../../../home'; expected the name of a file within it"):
        Bucket("gs://bucket/run", "x").files()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://no-such-bucket/run", r"\(404\): expected a bucket gs://no-such-bucket that exists"),
        ("gss://bucket/run", r"no library serves gss://; did you mean 'gs'\?"),
        ("s3://bucket/run", r"s3:// needs a library that is not installed: Install s3fs"),
        ("gs://", r"expected gs://BUCKET/PATH"),
        ("ftp://", r"expected ftp://BUCKET/PATH"),
        ("ftp://host/run", r"ftp:// needs host beside a URL; expected gs://"),
    ],
)
def test_bad_urls_are_refused_by_name_alone(url: str, says: str, server: BucketServer, monkeypatch: pytest.MonkeyPatch):
    ignored: list[object] = []  # errors of what a library left half made
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    with pytest.raises(BucketError, match=says):
        Bucket(url, "--run-dir").files()
    gc.collect()
    assert not ignored


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("gs://bucket/run/", "gs://bucket/run"),
        (Path("gs://bucket/run"), "gs://bucket/run"),
        ("./gs:/bucket", None),
        ("file:///tmp/x", None),
        ("C:", None),
        ("mine.py:function", None),
        ("runs/a://b", None),
    ],
)
def test_urls_are_told_from_paths(path: str | Path, url: str | None):
    assert bucket_url(path) == url
