"""Run directories in buckets: working folders, their copies, owners, and what faults do to them."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.run import mirror, object_store
from axlearn_like.run.directory import RunDirectory, RunDirectoryError
from axlearn_like.run.object_store import fetched, fetched_pattern
from mesh.errors import UserError
from mesh.files import bucket as bucket_module
from mesh.files.bucket import Bucket
from tests.axlearn_like.tiny import ROOT, tiny_trainer
from tests.bucket_server import BucketServer, bucket_server, slow, status

URL = "gs://bucket/runs/one"


@pytest.fixture(scope="module")
def running() -> Iterator[BucketServer]:
    with pytest.MonkeyPatch.context() as patch, bucket_server(patch) as found:
        yield found


@pytest.fixture
def server(running: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BucketServer:
    """The server with an empty bucket, seen from a machine with an empty home."""
    running.faults.clear()
    rest = Bucket("gs://bucket", "x")
    rest.remove(rest.files())
    monkeypatch.setattr(mirror, "_POLL", 0.05)
    monkeypatch.setattr(bucket_module, "_PATIENCE", 1.0)
    elsewhere(monkeypatch, tmp_path / "home")
    return running


def elsewhere(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Be another machine, with another home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))


def step(run: RunDirectory, number: int, content: str = "", folder: str = "rl") -> Path:
    """Make a finished checkpoint, as Orbax does: renamed when it is whole."""
    target = run.checkpoints / folder / str(number)
    made = target.with_name(f"{number}.orbax-checkpoint-tmp-1")
    (made / "params").mkdir(parents=True)
    (made / "params" / "data").write_text(content or f"weights {number}")
    made.rename(target)
    return target


def wait_for(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def names() -> set[str]:
    return set(Bucket(URL, "x").files())


@pytest.mark.slow
def test_another_machine_goes_on_with_what_is_in_the_bucket(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with RunDirectory.open(URL, "num_steps: 5") as run:
        assert run.where.startswith(f"{URL} (working folder {tmp_path}/home/")
        for number in (1, 2):
            with open(run.metrics_path, "a") as file:
                file.write(f'{{"step": {number}}}\n')
            step(run, number)
            wait_for(lambda number=number: f"checkpoints/rl/{number}/COMPLETE" in names())
            assert Bucket(URL, "x").read("metrics.jsonl").count(b"\n") == number, "rows come before their checkpoint"
        os.link(run.checkpoints / "rl/1/params/data", tmp_path / "first")
        (run.checkpoints / "rl" / "3.orbax-checkpoint-tmp-9").mkdir()
        (run.path / "launch").write_text("of this machine")
        os.mkfifo(run.path / "pipe")
    assert not any(re.search("tmp|launch|lock|pipe|outgoing", name) for name in names())
    elsewhere(monkeypatch, tmp_path / "other")
    with RunDirectory.open(Path(URL), "num_steps: 6") as run:
        assert run.path.is_relative_to(tmp_path / "other")
        assert run.metrics_path.read_text() == '{"step": 1}\n{"step": 2}\n'
        assert [path.name for path in (run.checkpoints / "rl").iterdir()] == ["2"], "the newest is enough"
        assert (run.checkpoints / "rl/2/params/data").read_text() == "weights 2"
    assert b"num_steps: 6" in Bucket(URL, "x").read("config.txt")
    with pytest.raises(RunDirectoryError, match="holds a run of another config"):
        RunDirectory.open(URL, "num_steps: 6\nseed: 2")


def test_what_is_deleted_here_is_deleted_there_but_never_the_last_good_one(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    import shutil

    with RunDirectory.open(URL, "a: 1") as run:
        for number in (1, 2, 3):
            step(run, number)
        (run.path / "report.json").write_text("{}")
    elsewhere(monkeypatch, tmp_path / "other")
    complete = lambda: {n.split("/")[2] for n in names() if n.endswith("COMPLETE") and "/best/" not in n}  # noqa: E731
    with RunDirectory.open(URL, "a: 1") as run:
        (run.path / "report.json").unlink()
        step(run, 4)
        wait_for(lambda: complete() == {"3", "4"})
        best = run.checkpoints / "rl" / "best"
        shutil.copytree(run.checkpoints / "rl" / "3", best / "3", copy_function=os.link)
        before = len(server.requests)
        (best / "best.json").write_text('{"steps": {"3": 0.5}}')
        wait_for(lambda: "checkpoints/rl/best/3/COMPLETE" in names())
        copied = [line for line in server.requests[before:] if "/rewriteTo/" in line or "/copyTo/" in line]
        assert copied, ("no bytes again", server.requests[before:])
        shutil.rmtree(run.checkpoints / "rl" / "3")
    assert complete() == {"4"} and "report.json" not in names()
    assert {"checkpoints/rl/best/3/params/data", "checkpoints/rl/best/best.json"} <= names()


def test_a_checkpoint_that_may_be_deleted_meanwhile_is_not_copied(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
):
    linked, made = mirror.link_tree, list[str]()

    def link(source: Path, target: Path) -> None:
        if source.name == "2" and not made:
            made.append(str(step(run, 3)))  # the newer one is finished, and deletion of this one begins
            (source / "params" / "data").unlink()
        linked(source, target)

    monkeypatch.setattr(mirror, "link_tree", link)
    with RunDirectory.open(URL, "a: 1") as run:
        step(run, 2)
        wait_for(lambda: "checkpoints/rl/3/COMPLETE" in names())
        (run.checkpoints / "rl" / "2" / "params").rmdir()
        (run.checkpoints / "rl" / "2").rmdir()
    assert not any(name.startswith("checkpoints/rl/2") for name in names())


def test_a_checkpoint_that_a_kill_cut_off_is_none(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with RunDirectory.open(URL, "a: 1") as run:
        step(run, 1)
    Bucket(URL, "x").write("checkpoints/rl/2/params/data", b"half")
    elsewhere(monkeypatch, tmp_path / "other")
    with RunDirectory.open(URL, "a: 1") as run:
        assert [path.name for path in (run.checkpoints / "rl").iterdir()] == ["1"]
        step(run, 2, "whole")
    assert Bucket(URL, "x").read("checkpoints/rl/2/params/data") == b"whole"


def test_a_run_has_one_owner(server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with RunDirectory.open(URL, "a: 1") as run:
        assert run.path
        with pytest.raises(RunDirectoryError, match=rf"{URL} is in use by process {os.getpid()} on .* since 20.*wait"):
            RunDirectory.open(URL, "a: 1")


def owner(**changes: Any) -> bytes:
    now = time.time()
    return json.dumps({"pid": 7, "host": "tpu-1", "boot": "x", "since": now, "beat": now, "id": "o"} | changes).encode()


def test_a_machine_that_is_gone_is_replaced_after_a_while(server: BucketServer):
    there = Bucket(URL, "x")
    there.write("owner/000001.json", owner())
    with pytest.raises(
        RunDirectoryError, match=r"by process 7 on tpu-1 since .*the same command takes over in [89]\d s"
    ):
        RunDirectory.open(URL, "a: 1")
    there.write("owner/000001.json", owner(beat=time.time() - 91))
    with RunDirectory.open(URL, "a: 1"):
        assert {"owner/000001.json", "owner/000002.json"} <= names()


def test_of_two_machines_that_come_at_once_one_gets_the_run(server: BucketServer, monkeypatch: pytest.MonkeyPatch):
    create = Bucket.create

    def late(self: Bucket, name: str, content: bytes) -> bool:
        self.write(name, owner())  # the other was faster
        return create(self, name, content)

    monkeypatch.setattr(Bucket, "create", late)
    with pytest.raises(RunDirectoryError, match="has just been taken by another machine; run the same command again"):
        RunDirectory.open(URL, "a: 1")


def test_an_owner_that_has_been_replaced_writes_no_more(server: BucketServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mirror, "_BEAT", 0.05)
    run = RunDirectory.open(URL, "a: 1")
    Bucket(URL, "x").write("owner/000002.json", owner(host="tpu-2"))
    wait_for(run.is_cut_off)
    step(run, 1)
    with pytest.raises(UserError, match=r"was taken over by process 7 on tpu-2.*all files are in"):
        run.close()
    assert not any("checkpoints" in name for name in names())


def test_a_folder_that_another_machine_has_overtaken_is_set_aside(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for home, number in (("home", 1), ("other", 2)):
        elsewhere(monkeypatch, tmp_path / home)
        with RunDirectory.open(URL, "a: 1") as run:
            step(run, number)
    elsewhere(monkeypatch, tmp_path / "home")
    with RunDirectory.open(URL, "a: 1") as run:
        assert [path.name for path in (run.checkpoints / "rl").iterdir()] == ["2"]
    aside = re.search(r"its own working folder is now (\S+)", capsys.readouterr().err)
    assert aside and (Path(aside[1]) / "checkpoints/rl/1/params/data").exists(), "nothing is deleted"


def test_lost_credentials_end_the_run_and_nothing_is_lost(server: BucketServer):
    run = RunDirectory.open(URL, "a: 1")
    server.fail("POST /upload", *[status(401, "Anonymous caller")] * 100)
    step(run, 1)
    wait_for(run.is_cut_off)
    with pytest.raises(UserError, match=r"no right to write .*\(Anonymous caller, 401\).* all files are in .*goes on"):
        run.close()
    server.faults.clear()
    with RunDirectory.open(URL, "a: 1") as run:  # this machine's own folder, not what the bucket has
        assert (run.checkpoints / "rl/1").is_dir()
    assert "checkpoints/rl/1/COMPLETE" in names()


def test_faults_that_pass_cost_nothing(server: BucketServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bucket_module, "_PATIENCE", 60.0)
    with RunDirectory.open(URL, "a: 1") as run:
        server.fail("/upload", status(503), slow(0.5), status(429))
        server.fail("GET", status(503))
        step(run, 1, "x" * 100_000)
    assert not server.faults
    assert Bucket(URL, "x").read("checkpoints/rl/1/params/data") == b"x" * 100_000


def test_a_refused_command_leaves_the_bucket_as_it_was(server: BucketServer):
    with pytest.raises(UserError, match="no right"), RunDirectory.open(URL, "a: 1"):
        raise UserError("no right")
    assert all(name.startswith("owner/") for name in names())
    with RunDirectory.open(URL, "a: 2"):
        pass


def test_data_are_fetched_once_and_again_when_they_change(server: BucketServer, capsys: pytest.CaptureFixture[str]):
    there = Bucket("gs://bucket/data", "x")
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        there.write(name, name.encode())
    pattern = "gs://bucket/data/*.jsonl"
    assert {Path(path).name for path in map(str, Path(fetched_pattern(pattern, "files")).parent.iterdir())} == {
        "a.jsonl",
        "b.jsonl",
    }
    assert "fetching 0.0 MB in 2 files from gs://bucket/data" in capsys.readouterr().err
    fetched_pattern(pattern, "files")
    assert not capsys.readouterr().err
    there.write("a.jsonl", b"other")
    there.remove(["b.jsonl"])
    folder = Path(fetched_pattern(pattern, "files")).parent
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a.jsonl": b"other"}
    assert fetched("gs://bucket/data/c.txt", "x").read_bytes() == b"c.txt"
    with pytest.raises(UserError, match="gs://bucket/nothing holds nothing"):
        fetched("gs://bucket/nothing", "x")


def test_what_does_not_fit_on_the_disk_is_refused(server: BucketServer, monkeypatch: pytest.MonkeyPatch):
    from types import SimpleNamespace

    Bucket("gs://bucket/data", "x").write("a", b"12")
    monkeypatch.setattr(object_store.shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(UserError, match="do not fit on the disk"):
        fetched("gs://bucket/data", "x")


def test_versions_of_a_run_are_fetched_by_name(server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with RunDirectory.open(URL, "a: 1") as run:
        for number in (1, 2, 3):
            step(run, number)
        step(run, 1, folder="rl/best")
    for at, (version, found) in enumerate(
        {None: {"3", "best/1"}, "best": {"best/1"}, "2": {"2"}, "none": set()}.items()
    ):
        elsewhere(monkeypatch, tmp_path / str(at))
        folder = fetched(URL, "RUN", version=version)
        steps = folder / "checkpoints" / "rl"
        assert {str(path.parents[1].relative_to(steps)) for path in steps.rglob("data")} == found
        assert (folder / "config.txt").exists()
    elsewhere(monkeypatch, tmp_path / "within")
    assert (fetched(f"{URL}/checkpoints/rl/2", "RUN", version=None) / "params" / "data").exists()


@pytest.mark.full
def test_a_run_killed_in_a_copy_goes_on_elsewhere_and_ends_equal(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    whole = tiny_trainer(12).build().run(tmp_path / "whole", progress=False)
    hold = threading.Event()

    def stuck(request: Any) -> bool:
        hold.wait(60)
        return False

    code = "import sys; from tests.axlearn_like.tiny import tiny_trainer; from axlearn_like.run import mirror; "
    code += "mirror._POLL = 0.05; tiny_trainer(12).build().run(sys.argv[1], progress=False)"
    environment = {**os.environ, "TINY_STEP": "8", "TINY_SIGNAL": "0", "TINY_AWAIT": str(tmp_path / "go on")}
    with subprocess.Popen([sys.executable, "-c", code, URL], cwd=ROOT, env=environment) as process:
        wait_for_long(lambda: "checkpoints/4/COMPLETE" in names())
        server.fail("uploadType", *[stuck] * 1000)
        before = len(server.requests)
        (tmp_path / "go on").touch()
        wait_for_long(lambda: any("uploadType" in line for line in server.requests[before:]))
        process.send_signal(signal.SIGKILL)
    server.faults.clear()
    hold.set()
    elsewhere(monkeypatch, tmp_path / "other")
    resumed = tiny_trainer(12).build().run(URL, progress=False)
    assert (resumed["step"], resumed["loss"]) == (12, whole["loss"])
    rows = [json.loads(line) for line in Bucket(URL, "x").read("metrics.jsonl").splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    expected = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]
    begins = [json.loads(line) for line in Bucket(URL, "x").read("events.jsonl").splitlines()]
    assert [row["step"] for row in begins if row["event"] == "train_begin"] == [0, 4]


def wait_for_long(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)
