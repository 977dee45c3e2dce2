import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mesh import UserError
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.index_ranges import IndexRange
from rl.parameter_server.store.offload import OffloadStore

type Pieces = list[tuple[str, IndexRange, np.ndarray]]


def _shards(version: int) -> Pieces:
    rng = np.random.default_rng(version)
    kernel = rng.integers(0, 1 << 32, (6, 8), np.uint32).view(np.float32)  # NaN and all
    return [
        ("kernel", ((0, 2), (0, 8)), kernel[:2]),
        ("kernel", ((2, 6), (0, 4)), kernel[2:, :4]),
        ("kernel", ((2, 6), (4, 8)), kernel[2:, 4:]),
        ("bias", ((0, 7),), rng.standard_normal(7).astype(jnp.bfloat16)),
        ("step", (), np.asarray(version, np.int32)),
        ("none", ((0, 0), (0, 3)), np.zeros((0, 3), np.float32)),
    ]


def _same(loaded: Iterator[tuple[str, IndexRange, np.ndarray]], expected: Pieces) -> bool:
    def facts(tensor: str, index_range: IndexRange, array: np.ndarray) -> tuple[object, ...]:
        return tensor, index_range, array.dtype, array.shape, array.tobytes()

    return [facts(*shard) for shard in loaded] == [facts(*shard) for shard in expected]


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/offload" if request.param == "file" else f"memory://{tmp_path.name}"


def test_gives_back_what_was_saved(url: str) -> None:
    offload = OffloadStore(url, keep=2)
    assert offload.versions() == []
    for version in (2, 10):
        expected = _shards(version)
        distinct = {array.tobytes(): array.nbytes for _, _, array in expected}
        assert offload.save(version, f"manifest of\n{version}", iter(expected)) == sum(distinct.values())
    for opened in (offload, OffloadStore(url + "/", keep=1)):
        assert opened.versions() == [2, 10]
        for version in (2, 10):
            manifest, loaded = opened.load(version)
            assert manifest == f"manifest of\n{version}" and _same(loaded, _shards(version))
    with pytest.raises(VersionGone, match=r"no version 1; versions there: 2, 10"):
        offload.load(1)


def test_keeps_the_newest(url: str) -> None:
    offload = OffloadStore(url, keep=2)
    assert offload.retire() == []
    for version in (1, 3, 12, 20):
        offload.save(version, "", _shards(version))
    _, loaded = offload.load(1)
    next(loaded)
    assert offload.retire() == [1, 3] and offload.versions() == [12, 20]
    assert _same(offload.load(12)[1], _shards(12))
    offload.remove(20)
    offload.remove(21)
    assert offload.versions() == [12] and offload.retire() == []


def test_retired_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.parameter_server.store.offload._IN_FLIGHT", 1)
    offload = OffloadStore(str(tmp_path), keep=1)
    offload.save(1, "", _shards(1))
    _, loaded = offload.load(1)
    next(loaded)
    offload.save(2, "", _shards(2))
    offload.retire()
    with pytest.raises(VersionGone, match="version 1, .*retired"):
        list(loaded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v2"]


def test_saving_again_replaces(url: str) -> None:
    offload = OffloadStore(url, keep=2)
    offload.save(1, "old", _shards(7))
    offload.save(1, "new", _shards(8))
    manifest, loaded = offload.load(1)
    assert manifest == "new" and _same(loaded, _shards(8))


def test_many_more_bytes_than_are_written_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.parameter_server.store.offload._IN_FLIGHT", 10_000)
    shards: Pieces = [("w", ((i, i + 1), (0, 999)), np.full((1, 999), i, np.float32)) for i in range(40)]
    shards += [("same", ((i, i + 1), (0, 999)), shards[i][2]) for i in range(40)]
    offload = OffloadStore(url, keep=2)
    assert offload.save(1, "", shards) == 40 * 999 * 4
    assert _same(offload.load(1)[1], shards)


@pytest.mark.parametrize("damage", ["truncated", "one bit", "missing"])
@pytest.mark.parametrize("manifest", [False, True])
def test_damage_is_found_and_named(tmp_path: Path, damage: str, manifest: bool) -> None:
    offload = OffloadStore(f"file://{tmp_path}", keep=2)
    offload.save(5, "text", _shards(5))
    files = sorted((tmp_path / "v5").iterdir(), key=lambda file: (file.name == "manifest", file.stat().st_size))
    file = files[-1 if manifest else -2]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content if damage == "one bit" else content[:-1])
    gone = manifest and damage == "missing"
    with pytest.raises(
        VersionGone if gone else WeightsError, match="version 5" if gone else f"v5/{file.name}"
    ) as caught:
        list(offload.load(5)[1])
    assert str(tmp_path) in str(caught.value)
    assert offload.versions() == ([] if gone else [5])


def test_a_failing_iterator_leaves_nothing(tmp_path: Path) -> None:
    def shards() -> Iterator[tuple[str, IndexRange, np.ndarray]]:
        yield from _shards(1)[:3]
        raise WeightsError("the version was dropped")

    offload = OffloadStore(str(tmp_path), keep=1)
    with pytest.raises(WeightsError, match="was dropped"):
        offload.save(1, "", shards())
    assert offload.versions() == [] and list(tmp_path.iterdir()) == []


def test_what_a_killed_process_was_writing_does_no_harm(tmp_path: Path) -> None:
    offload = OffloadStore(str(tmp_path), keep=1)
    offload.save(1, "", _shards(1))
    for file in list((tmp_path / "v1").iterdir()):
        (tmp_path / "v2").mkdir(exist_ok=True)
        file.with_name(f"{file.name}.__lock").write_bytes(b"x" * 5000)
        (tmp_path / "v2" / f"{file.name}.__lock").write_bytes(b"x" * 5000)
    assert offload.versions() == [1]
    for version in (1, 2):
        offload.save(version, "again", _shards(1))
        manifest, loaded = offload.load(version)
        assert manifest == "again" and _same(loaded, _shards(1))
    offload.retire()
    assert [path.name for path in tmp_path.iterdir()] == ["v2"]


_CHILD = """
import sys, numpy as np
from rl.parameter_server.store.offload import OffloadStore
offload = OffloadStore(sys.argv[1], keep=2)
def shards(version):
    for i in range(16):
        yield "w", ((i, i + 1), (0, 1 << 16)), np.full((1, 1 << 16), version * 100 + i, np.float32)
for version in range(1, 1000):
    print("saving", version, flush=True)
    offload.save(version, str(version), shards(version))
    print("saved", version, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_killed_while_saving(checkout: Path, tmp_path: Path, seed: int) -> None:
    pause = random.Random(seed).uniform(0.0, 0.03)
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path)], cwd=checkout, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        saved: list[int] = []
        for line in child.stdout:
            verb, version = line.split()
            if verb == "saved":
                saved.append(int(version))
            elif version == "3":
                break
        try:
            child.wait(pause)
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
        said = [line.split() for line in child.stdout]
    assert child.returncode == -signal.SIGKILL
    saved += [int(version) for verb, version in said if verb == "saved"]
    offload = OffloadStore(str(tmp_path), keep=1)
    listed = offload.versions()
    assert listed[: len(saved)] == saved and len(listed) - len(saved) <= 1  # killed before it could say so
    for version in listed:
        manifest, loaded = offload.load(version)
        assert manifest == str(version)
        values = [float(array[0, 0]) for _, _, array in loaded]
        assert values == [version * 100 + i for i in range(16)]
    newest = max(listed) + 1  # perhaps half-written: it can be saved again
    offload.save(newest, "", _shards(newest))
    assert _same(offload.load(newest)[1], _shards(newest))
    offload.save(newest + 1, "", [])
    assert offload.retire()[-1] == newest and [path.name for path in tmp_path.iterdir()] == [f"v{newest + 1}"]


@pytest.mark.slow
def test_full_disk(checkout: Path, tmp_path: Path) -> None:
    """A limit on the size of files: writes fail half-way, as on a full disk."""
    script = """
import resource, sys, numpy as np
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.store.offload import OffloadStore
offload = OffloadStore(sys.argv[1], keep=2)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
offload.save(1, "", [("small", ((0, 1000),), np.zeros(1000, np.float32))])
try:
    offload.save(2, "", [("small", ((0, 1000),), np.ones(1000, np.float32)), ("w", ((0, 1 << 16),), np.ones(1 << 16))])
except WeightsError as error:
    print(error)
assert offload.versions() == [1]
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=checkout, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"offload {tmp_path}: cannot write v2/") and "File too large" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    offload = OffloadStore(f"{tmp_path}/file/below", keep=1)
    with pytest.raises(WeightsError, match=f"offload {tmp_path}/file/below: cannot"):
        offload.save(1, "", _shards(1))


def test_a_bucket_out_of_reach() -> None:
    spec = {
        "driver": "s3",
        "bucket": "weights",
        "endpoint": "http://127.0.0.1:1",
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "anonymous"},
        "path": "run",
    }
    offload = OffloadStore(spec, keep=1, retries=0)
    with pytest.raises(WeightsError, match=r"127.0.0.1:1.*cannot list all objects: .*connect"):
        offload.save(1, "", _shards(1))
    with pytest.raises(WeightsError, match="cannot read v1/manifest"):
        offload.load(1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("gcs://bucket/x", "unknown scheme 'gcs'; did you mean 'gs'"),
        (
            "http://host/x",
            r"weights.offload='http://host/x': unknown scheme .*expected file://, gs://, s3://, memory:// or",
        ),
        ("gs:/bucket", "expected file://, gs://"),
        ("file://", "expected file://, gs://"),
        ("", "expected file://, gs://"),
        ("s3://", "expected file://, gs://"),
        ("s3://x", "weights.offload='s3://x' cannot be opened: .*bucket"),
    ],
)
def test_wrong_urls(wrong: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        OffloadStore(wrong, keep=1, setting="weights.offload")


def test_keeps_at_least_one() -> None:
    with pytest.raises(UserError, match="offload: keep=0"):
        OffloadStore("memory://", keep=0)


@pytest.mark.parametrize("url", ["file://run/weights", "file://run/weights//", "run/weights/", "./run/weights"])
def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.chdir(tmp_path)
    offload = OffloadStore(url, keep=1)
    monkeypatch.chdir("/")
    offload.save(1, "", _shards(1))
    assert (tmp_path / "run/weights/v1/manifest").exists() and offload.versions() == [1]
