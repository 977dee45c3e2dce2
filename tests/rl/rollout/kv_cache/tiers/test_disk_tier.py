import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh import UserError
from rl.rollout.kv_cache.tiers.disk_tier import DiskTier
from rl.rollout.kv_cache.tiers.page_form import StoredPage

LIMIT = 1000


def stored(seed: int, size: int) -> StoredPage:
    return StoredPage.of(bytes((seed * 31 + i) % 251 for i in range(size)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 400), st.booleans()), max_size=60))
def test_what_is_there_is_whole_and_within_the_limit(tmp_path_factory: pytest.TempPathFactory, steps):
    """The newest pages are there as long as together they take less than the limit less one page."""
    tier = DiskTier(str(tmp_path_factory.mktemp("disk")), LIMIT)
    written: dict[bytes, StoredPage] = {}
    forgotten: set[bytes] = set()  # takes room in the ring until it is overwritten
    for number, (seed, size, forget) in enumerate(steps):
        digest = number.to_bytes(2, "big")
        page = written[digest] = stored(seed, size)
        assert tier.write(digest, page)
        assert tier.used <= LIMIT and os.fstat(tier.descriptor).st_size <= LIMIT
        room = LIMIT - 400
        for newest in reversed(written):
            room -= len(written[newest].blob)
            if room < 0:
                break
            assert (newest in tier) == (newest not in forgotten)
        if forget:
            tier.forget(digest)
            forgotten.add(digest)
    assert tier.used == sum(len(page.blob) for digest, page in written.items() if digest in tier)
    for digest, page in written.items():
        found = tier.read(digest)
        assert (found is None) == (digest not in tier)
        assert found is None or (found.intact and found.blob == page.blob)
    tier.clear()
    assert len(tier) == tier.used == os.fstat(tier.descriptor).st_size == 0
    assert tier.write(b"again", stored(1, 10)) and tier.read(b"again") == stored(1, 10)


def test_a_page_beyond_the_limit_is_refused(tmp_path: Path):
    tier = DiskTier(str(tmp_path), 100)
    assert not tier.write(b"a", stored(1, 101))
    assert b"a" not in tier and tier.read(b"a") is None


def test_a_full_disk_takes_no_page_and_keeps_the_others(tmp_path: Path):
    """The limit on the size of files stands for a full disk: writes beyond it fail, some after a part."""
    tier = DiskTier(str(tmp_path), 1 << 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert tier.write(b"a", stored(1, 3000))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
        assert not tier.write(b"b", stored(2, 3000))  # 2,000 bytes fit
        assert not tier.write(b"c", stored(3, 9000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(tier) == 1 and tier.read(b"a") == stored(1, 3000)
    assert tier.write(b"b", stored(2, 3000)) and tier.read(b"b") == stored(2, 3000)


def test_a_damaged_or_cut_file_is_found_by_the_checksum(tmp_path: Path):
    tier = DiskTier(str(tmp_path), LIMIT)
    for n in range(3):
        tier.write(bytes([n]), stored(n, 100))
    os.pwrite(tier.descriptor, b"\xff", 150)
    os.ftruncate(tier.descriptor, 250)
    intact = [page.intact for n in range(3) if (page := tier.read(bytes([n]))) is not None]
    assert intact == [True, False, False]


@pytest.mark.parametrize("how", ["missing", "a file"])
def test_a_folder_that_is_none_is_named(tmp_path: Path, how: str):
    path = tmp_path / "x"
    if how == "a file":
        path.write_text("")
    with pytest.raises(UserError, match=r"RolloutEngine.tiers.disk='.*x': no file can be made there"):
        DiskTier(str(path), LIMIT)


CHILD = """
import os, sys
from rl.rollout.kv_cache.tiers.disk_tier import DiskTier
from rl.rollout.kv_cache.tiers.page_form import StoredPage
tier = DiskTier(sys.argv[1], 1 << 20)
assert tier.write(b"a", StoredPage.of(bytes(1000)))
print(os.fstat(tier.descriptor).st_size, flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "1000\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
