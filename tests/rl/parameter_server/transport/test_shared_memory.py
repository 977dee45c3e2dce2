"""Memory between processes: seen by all, read-only for readers, and gone with the last one that holds it."""

import dataclasses
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mesh import UserError
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.transport import shared_memory
from rl.parameter_server.transport.shared_memory import SegmentGone, SharedSegment, free_memory, host_identity

ROOT = Path(__file__).parents[4]
LOOP = """
import os, sys
import numpy as np
from rl.parameter_server.transport.shared_memory import SharedSegment, host_identity
for line in sys.stdin:
    exec(line)
    sys.stdout.flush()
"""


@dataclasses.dataclass
class Other:
    """Another process, which runs what it is sent, line by line."""

    process: subprocess.Popen[str]

    def does(self, line: str) -> str:
        """Run a line and return what it prints."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def ends(self, how: int | None = None) -> None:
        """The process ends by a signal, or normally."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if how is not None:
            self.process.send_signal(how)
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[[], Other]]:
    running: list[Other] = []

    def one() -> Other:
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", LOOP], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        running.append(Other(process))
        return running[-1]

    yield one
    for other in running:
        other.ends()


@pytest.mark.slow
def test_what_one_process_writes_another_reads_in_place(start: Callable[[], Other]):
    segment = SharedSegment.create(100_000)
    assert segment.buffer.shape == (100_000,) and segment.buffer.dtype == np.uint8 and not segment.buffer.any()
    assert segment.buffer.ctypes.data % 64 == 0
    other = start()
    assert other.does(f"s = SharedSegment.attach({segment.name!r}, 100_000); print(s.nbytes)") == "100000"
    segment.buffer[:] = np.arange(100_000, dtype=np.uint8)
    assert other.does("print(int(s.buffer.astype(np.int64).sum()))") == str(int(segment.buffer.astype(np.int64).sum()))
    segment.buffer[7] = 77
    assert other.does("print(s.buffer[7], s.buffer.flags.writeable, len(s.buffer))") == "77 False 100000"
    assert other.does("print(host_identity())") == host_identity()


def test_its_pages_are_there_before_they_are_touched():
    segment = SharedSegment.create(1 << 20)
    assert os.fstat(segment._file.fileno()).st_blocks * 512 >= 1 << 20


def test_readers_cannot_write():
    segment = SharedSegment.create(10)
    with pytest.raises(ValueError, match="read-only"):
        SharedSegment.attach(segment.name).buffer[0] = 1
    with pytest.raises(ValueError):
        SharedSegment.attach(segment.name).buffer.setflags(write=True)


def test_what_is_written_is_in_the_buffer():
    segment = SharedSegment.create(10_000)
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    segment.write(array, 5000)
    segment.write(b"", 10_000)
    segment.write(b"abc")
    np.testing.assert_array_equal(
        SharedSegment.attach(segment.name).buffer[5000:9000].view(np.float32), array.reshape(-1)
    )
    assert bytes(segment.buffer[:5]) == b"abc\0\0" and not segment.buffer[9000:].any()


@pytest.mark.parametrize("offset", [-1, 8, 10])
def test_nothing_is_written_beyond_the_end(offset: int):
    segment = SharedSegment.create(10)
    with pytest.raises(ValueError, match="do not fit into axl-.* of 10"):
        segment.write(b"abc", offset)
    with pytest.raises(ValueError, match="do not fit"):
        SharedSegment.attach(segment.name).write(b"abc")
    assert os.fstat(segment._file.fileno()).st_size == 10


def test_an_empty_segment():
    segment = SharedSegment.create(0)
    assert segment.buffer.shape == SharedSegment.attach(segment.name, 0).buffer.shape == (0,)


def test_unlink_takes_the_name_and_leaves_the_memory():
    segment = SharedSegment.create(10)
    reader = SharedSegment.attach(segment.name)
    reader.unlink()  # the reader's own name: the maker's stays
    SharedSegment.attach(segment.name)
    segment.unlink()
    segment.unlink()
    segment.buffer[3] = 5
    assert reader.buffer[3] == 5
    with pytest.raises(SegmentGone, match="is gone") as caught:
        SharedSegment.attach(segment.name)
    assert isinstance(caught.value, VersionGone) and isinstance(caught.value, FileNotFoundError)
    with pytest.raises(ValueError):
        segment.write(b"x")


@pytest.mark.slow
def test_the_name_goes_with_the_object_and_the_memory_with_its_last_view(start: Callable[[], Other]):
    segment, other = SharedSegment.create(10), start()
    view, name = segment.buffer[2:], segment.name
    assert other.does(f"s = SharedSegment.attach({name!r}); print('has it')") == "has it"
    held = other.does("print(s.name)")
    del segment
    gc.collect()
    view[0] = 9
    assert other.does("print(s.buffer[2])") == "9"
    with pytest.raises(SegmentGone):
        SharedSegment.attach(name)
    assert SharedSegment.attach(held).buffer[2] == 9
    other.ends()
    with pytest.raises(SegmentGone):
        SharedSegment.attach(held)


@pytest.mark.slow
@pytest.mark.parametrize("how", [None, signal.SIGKILL])
def test_nothing_is_left_of_a_process_however_it_ends(start: Callable[[], Other], how: int | None):
    folders = [path for path in (Path("/dev/shm"), Path("/tmp")) if path.is_dir()]
    other = start()
    name = other.does("s = SharedSegment.create(10); s.buffer[0] = 1; print(s.name)")
    assert SharedSegment.attach(name).buffer[0] == 1
    assert not [path for folder in folders for path in folder.glob(f"*{other.process.pid}*") if path.name == name]
    other.ends(how)
    gc.collect()
    with pytest.raises(SegmentGone):
        SharedSegment.attach(name)


def test_what_a_killed_maker_has_left_stays_while_it_is_used(start: Callable[[], Other]):
    """The parameter server goes on giving out what a trainer that is dead has pushed."""
    killed, reader = start(), start()
    adopted = SharedSegment.attach(killed.does("s = SharedSegment.create(10); s.buffer[0] = 1; print(s.name)"))
    killed.ends(signal.SIGKILL)
    assert reader.does(f"s = SharedSegment.attach({adopted.name!r}); print(s.buffer[0])") == "1"


def test_a_fork_that_ends_takes_nothing_along(start: Callable[[], Other]):
    other = start()
    name = other.does("s = SharedSegment.create(10); print(s.name)")
    fork = "child = os.fork(); child or (globals().pop('s'), os._exit(0)); print(os.waitpid(child, 0)[1])"
    assert other.does(fork) == "0"
    assert SharedSegment.attach(name).buffer.size == 10


@pytest.mark.parametrize("name", ["", "../etc/passwd", "axl-1-2", "axl-1-2-3/..", "axl-self-0-1", "other"])
def test_only_names_of_segments_are_opened(name: str):
    with pytest.raises(WeightsError, match="is no name of a shared memory segment"):
        SharedSegment.attach(name)


def test_nothing_but_a_segment_is_opened(tmp_path: Path):
    """Another file of this process, and another segment that has got the number of one that is gone."""
    segment = SharedSegment.create(10)
    with open(tmp_path / "private", "w+") as other:
        name = f"axl-{os.getpid()}-{other.fileno()}-{os.fstat(other.fileno()).st_ino}"
        with pytest.raises(SegmentGone, match="holds something else"):
            SharedSegment.attach(name)
    descriptor, inode = segment.name.split("-")[2:]
    with pytest.raises(SegmentGone, match="holds another one"):
        SharedSegment.attach(f"axl-{os.getpid()}-{descriptor}-{int(inode) + 1}")


def test_what_others_may_read_is_refused():
    segment = SharedSegment.create(10)
    os.fchmod(segment._file.fileno(), 0o644)
    with pytest.raises(WeightsError, match="is not of mode 0600"):
        SharedSegment.attach(segment.name)


def test_another_size_is_refused():
    segment = SharedSegment.create(10)
    with pytest.raises(WeightsError, match="has 10 bytes, expected 11"):
        SharedSegment.attach(segment.name, 11)


def test_too_little_memory_is_known_at_once():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match=r"cannot reserve 1,152,921,504,606,846,976 bytes .* are free"):
        SharedSegment.create(1 << 60)
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer if an earlier test's were collected


def test_the_limit_of_the_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "max").write_text(f"{300 << 20}\n")
    (tmp_path / "current").write_text(f"{100 << 20}\n")
    unlimited = free_memory()

    def path(name: str) -> Path:
        return tmp_path / name.removeprefix("/sys/fs/cgroup/memory.")

    monkeypatch.setattr(shared_memory, "Path", path)
    assert free_memory() == min(unlimited, 200 << 20)
    (tmp_path / "max").write_text("max\n")
    assert free_memory() > 200 << 20


def test_a_container_with_a_small_dev_shm_shares_all_the_same():
    """A /dev/shm of docker's default size, in a mount namespace of its own."""
    code = (
        "from rl.parameter_server.transport.shared_memory import *\n"
        "segment = SharedSegment.create(100 << 20)\n"
        "segment.buffer[-1] = 7\n"
        "print(SharedSegment.attach(segment.name).buffer[-1])\n"
    )
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "--user", "--map-root-user", "sh", "-c", mount, sys.executable, code]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no `unshare` here")
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"mount namespaces are not permitted here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout.strip()) == (0, "7"), done.stderr
