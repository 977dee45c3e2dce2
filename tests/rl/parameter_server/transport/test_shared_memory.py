"""BufferPool between processes: seen by all, read-only for readers, and gone when the last one has gone."""

import dataclasses
import gc
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mesh import UserError
from rl.parameter_server.errors import VersionGone, WeightsError
from rl.parameter_server.transport import shared_memory as shared
from rl.parameter_server.transport.shared_memory import Segment, SegmentGone, host_identity, sweep

ROOT = Path(__file__).parents[4]
# Our own, since every parameter server sweeps the user's: tests that run beside these have some.
FOLDER = shared._folder() / f"axl-tests-{os.getpid()}"


@pytest.fixture(scope="module", autouse=True)
def own_folder() -> Iterator[None]:
    FOLDER.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_SHARED_MEMORY", FOLDER)
        host_identity.cache_clear()
        yield
        gc.collect()
    host_identity.cache_clear()
    shutil.rmtree(FOLDER)


@dataclasses.dataclass
class Other:
    """Another process, which does what it is told, line by line."""

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


LOOP = """
import os
import sys
from pathlib import Path
import numpy as np
from rl.parameter_server.transport import shared_memory
from rl.parameter_server.transport.shared_memory import Segment, host_identity, sweep
shared_memory._SHARED_MEMORY = Path(sys.argv[1])
for line in sys.stdin:
    exec(line)
    sys.stdout.flush()
"""


@pytest.fixture
def start() -> Iterator[Callable[[], Other]]:
    running: list[Other] = []

    def one() -> Other:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", LOOP, str(FOLDER)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        running.append(Other(process))
        return running[-1]

    yield one
    for other in running:
        other.ends()  # not killed: what it has made shall go


def test_what_one_process_writes_another_reads_in_place(start: Callable[[], Other]):
    segment = Segment.create(100_000)
    assert segment.buffer.shape == (100_000,) and segment.buffer.dtype == np.uint8 and not segment.buffer.any()
    assert segment.buffer.ctypes.data % 64 == 0
    other = start()
    assert other.does(f"s = Segment.attach({segment.name!r}, 100_000); print(s.nbytes)") == "100000"
    segment.buffer[:] = np.arange(100_000, dtype=np.uint8)
    assert other.does("print(int(s.buffer.astype(np.int64).sum()))") == str(int(segment.buffer.astype(np.int64).sum()))
    segment.buffer[7] = 77
    assert other.does("print(s.buffer[7], s.buffer.flags.writeable, len(s.buffer))") == "77 False 100000"
    assert other.does("print(host_identity())") == host_identity()


def test_a_segment_is_its_users_only():
    segment = Segment.create(10)
    facts = (FOLDER / segment.name).stat()
    assert (stat.S_IMODE(facts.st_mode), facts.st_uid, facts.st_size) == (0o600, os.geteuid(), 10)


def test_its_pages_are_there_before_they_are_touched():
    segment = Segment.create(1 << 20)
    assert (FOLDER / segment.name).stat().st_blocks * 512 >= 1 << 20


def test_readers_cannot_write():
    segment = Segment.create(10)
    with pytest.raises(ValueError, match="read-only"):
        Segment.attach(segment.name).buffer[0] = 1
    with pytest.raises(ValueError):
        Segment.attach(segment.name).buffer.setflags(write=True)


def test_what_is_written_is_in_the_buffer():
    segment = Segment.create(10_000)
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    segment.write(array, 5000)
    segment.write(b"", 10_000)
    segment.write(b"abc")
    np.testing.assert_array_equal(Segment.attach(segment.name).buffer[5000:9000].view(np.float32), array.reshape(-1))
    assert bytes(segment.buffer[:5]) == b"abc\0\0" and not segment.buffer[9000:].any()


@pytest.mark.parametrize("offset", [-1, 8, 10])
def test_nothing_is_written_beyond_the_end(offset: int):
    segment = Segment.create(10)
    with pytest.raises(ValueError, match="do not fit into axl-.* of 10"):
        segment.write(b"abc", offset)
    with pytest.raises(ValueError, match="do not fit"):
        Segment.attach(segment.name).write(b"abc")
    assert (FOLDER / segment.name).stat().st_size == 10


def test_an_empty_segment():
    segment = Segment.create(0)
    assert segment.buffer.shape == Segment.attach(segment.name, 0).buffer.shape == (0,)


def test_unlink_takes_the_name_and_leaves_the_memory():
    segment = Segment.create(10)
    reader = Segment.attach(segment.name)
    reader.unlink()  # a reader's has no effect: others may still look for it
    Segment.attach(segment.name)
    segment.unlink()
    segment.unlink()
    segment.buffer[3] = 5
    assert reader.buffer[3] == 5
    with pytest.raises(SegmentGone, match="is gone: its maker dropped it or ended") as caught:
        Segment.attach(segment.name)
    assert isinstance(caught.value, VersionGone) and isinstance(caught.value, FileNotFoundError)


def test_the_name_goes_with_the_last_who_has_it(start: Callable[[], Other]):
    segment = Segment.create(10)
    view, path, other = segment.buffer[2:], FOLDER / segment.name, start()
    assert other.does(f"s = Segment.attach({segment.name!r}); print('has it')") == "has it"
    del segment
    gc.collect()
    view[0] = 9  # the memory lives as long as its views
    assert path.exists() and other.does("print(s.buffer[2])") == "9"
    del view
    gc.collect()
    assert path.exists()
    other.ends()
    assert not path.exists()


def test_a_maker_that_ends_in_the_ordinary_way_leaves_nothing(start: Callable[[], Other]):
    other = start()
    path = FOLDER / other.does("s = Segment.create(10); print(s.name)")
    assert path.exists()
    other.ends()
    assert not path.exists()


def test_a_maker_that_is_killed_is_swept_up_after(start: Callable[[], Other]):
    mine, killed, alive = Segment.create(10), start(), start()
    left = FOLDER / killed.does("s = Segment.create(10); s.buffer[0] = 1; print(s.name)")
    kept = FOLDER / alive.does("s = Segment.create(10); print(s.name)")
    killed.ends(signal.SIGKILL)
    assert left.exists()
    assert left.name in sweep()
    assert not left.exists() and kept.exists() and (FOLDER / mine.name).exists()


def test_what_a_killed_maker_has_left_stays_while_it_is_used(start: Callable[[], Other]):
    """The parameter server goes on giving out what a trainer that is dead has pushed."""
    killed = start()
    name = killed.does("s = Segment.create(10); s.buffer[0] = 1; print(s.name)")
    adopted = Segment.attach(name)
    killed.ends(signal.SIGKILL)
    assert name not in sweep()
    assert Segment.attach(name).buffer[0] == 1
    del adopted
    gc.collect()
    assert name not in sweep() and not (FOLDER / name).exists()  # the last one has taken it along


def test_a_fork_that_ends_takes_nothing_along(start: Callable[[], Other]):
    other = start()
    name = other.does("s = Segment.create(10); print(s.name)")
    fork = "child = os.fork(); child or (globals().pop('s'), os._exit(0)); print(os.waitpid(child, 0)[1])"
    assert other.does(fork) == "0"
    assert name not in sweep()
    assert Segment.attach(name).buffer.size == 10


def test_a_file_that_is_not_a_segment_is_left_alone():
    path = FOLDER / f"axl-{os.getpid()}-not-hexadecimal"
    path.touch()
    try:
        sweep()
        assert path.exists()
    finally:
        path.unlink()


@pytest.mark.parametrize("name", ["", "../etc/passwd", "axl-1-0123456789abcdef/..", "axl-1-0123456789ABCDEF", "other"])
def test_only_names_of_segments_are_opened(name: str):
    with pytest.raises(WeightsError, match="is no name of a shared memory segment"):
        Segment.attach(name)


def test_what_others_may_write_to_is_refused():
    segment = Segment.create(10)
    (FOLDER / segment.name).chmod(0o644)
    with pytest.raises(WeightsError, match="is not a file of mode 0600"):
        Segment.attach(segment.name)


def test_a_connection_is_not_followed(tmp_path: Path):
    segment = Segment.create(10)
    connection = FOLDER / "axl-1-0123456789abcdef"
    connection.symlink_to(FOLDER / segment.name)
    try:
        with pytest.raises(WeightsError, match="cannot be read"):
            Segment.attach(connection.name)
    finally:
        connection.unlink()


def test_another_size_is_refused():
    segment = Segment.create(10)
    with pytest.raises(WeightsError, match="has 10 bytes, expected 11"):
        Segment.attach(segment.name, 11)


def test_too_little_memory_is_known_at_once_and_leaves_nothing():
    before = set(FOLDER.glob(f"axl-{os.getpid()}-*"))
    with pytest.raises(UserError, match=r"cannot set aside 1,152,921,504,606,846,976 bytes .*--shm-size"):
        Segment.create(1 << 60)
    assert set(FOLDER.glob(f"axl-{os.getpid()}-*")) == before


def test_a_container_with_64_mb(tmp_path: Path):
    """A /dev/shm of docker's default size, in a mount namespace of its own."""
    code = (
        "from rl.parameter_server.transport.shared_memory import *\n"
        "from mesh import UserError\n"
        "small = Segment.create(40 << 20)\n"
        "small.buffer[:] = 1\n"
        "try:\n"
        "    Segment.create(100 << 20)\n"
        "except UserError as error:\n"
        "    print(error)\n"
        "small.unlink()\n"
    )
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "--user", "--map-root-user", "sh", "-c", mount, sys.executable, code]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no `unshare` here")
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"mount namespaces are not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "cannot set aside 104,857,600 bytes of shared memory in /dev/shm, of which" in done.stdout
