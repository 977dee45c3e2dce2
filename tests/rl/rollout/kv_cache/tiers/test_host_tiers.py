import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from axlearn_like.config import ConfigError
from rl.rollout.kv_cache.tiers.host_tiers import HostTiers
from rl.rollout.kv_cache.tiers.page_form import StoredPage
from tests.rl.rollout.kv_cache.tiers.pages import NBYTES, assert_equal, fill, make_tiers, name, page

STORED = NBYTES + 8  # a length for each of two arrays


def test_pages_come_back_from_memory_and_from_the_disk(tmp_path: Path):
    tiers = make_tiers(host_bytes=4 * STORED, disk=str(tmp_path), disk_bytes=20 * STORED)
    assert fill(tiers, range(10)) == list(range(10))
    stats = tiers.stats()
    assert stats["tier_host_bytes"] <= 4 * STORED and stats["tier_disk_bytes"] == 7 * STORED
    names = [name(seed) for seed in range(10)]
    assert tiers.known([*names, name(99), names[0]]) == names
    for seed, found in enumerate(tiers.fetch(names, 16)):
        assert_equal(found, page(seed))
    stats = tiers.stats()
    assert (stats["tier_hits_host"], stats["tier_hits_disk"], stats["tier_returned_bytes"]) == (3, 7, 10 * STORED)
    assert stats["tier_host_bytes"] <= 4 * STORED


def test_a_page_is_taken_once():
    tiers = make_tiers()
    assert fill(tiers, range(3)) == [0, 1, 2]
    assert fill(tiers, range(4)) == [3]


def test_without_a_disk_the_least_recently_used_pages_are_dropped():
    tiers = make_tiers(host_bytes=4 * STORED)
    fill(tiers, range(3))
    tiers.fetch([name(0)], 16)
    fill(tiers, range(3, 5))
    assert [bool(tiers.known([name(seed)])) for seed in range(5)] == [True, False, False, True, True]
    assert tiers.stats()["tier_dropped"] == 2
    assert tiers.fetch([name(0), name(1), name(3)], 16)[0].record is None  # up to the first that is lost
    assert tiers.stats()["tier_hits_host"] == 2


def test_pages_under_way_count_against_the_bound():
    tiers, go = make_tiers(host_bytes=3 * NBYTES), threading.Event()
    names = [name(seed) for seed in range(5)]
    wanted = [one for one in names if tiers.wants(one)]
    assert wanted == names[:3]

    def read() -> list:
        assert go.wait(20)
        return [page(seed) for seed in range(3)]

    tiers.put(wanted, read)
    assert tiers.known(names) == wanted  # found on their way
    go.set()
    assert len(tiers.fetch(wanted[:1], 16)) <= 1
    tiers.settle()
    assert tiers.stats()["tier_host_bytes"] <= 3 * NBYTES and tiers.wants(names[3])


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_damaged_page_is_counted_and_forgotten(tmp_path: Path, place: str):
    tiers = make_tiers(host_bytes=STORED * (8 if place == "memory" else 1), disk=str(tmp_path), disk_bytes=99 * STORED)
    fill(tiers, range(4))
    names = [name(seed) for seed in range(4)]
    if place == "memory":
        held = tiers._memory[names[2]]
        tiers._memory[names[2]] = StoredPage(bytes([held.blob[0] ^ 1]) + bytes(held.blob[1:]), held.checksum)
    else:
        assert tiers._disk is not None
        os.pwrite(tiers._disk.descriptor, b"\x00\xff" * 40, 2 * STORED + 100)
    found = tiers.fetch(names, 16)
    assert len(found) == 2
    assert tiers.stats()["tier_damaged"] == 1
    assert tiers.known(names) == names[:2]
    assert fill(tiers, range(2, 3)) == [2]  # it can be kept again
    assert len(tiers.fetch(names, 16)) == 4


def test_pages_of_other_weights_are_forgotten_those_under_way_too(tmp_path: Path):
    tiers, go = make_tiers(host_bytes=3 * STORED, disk=str(tmp_path), disk_bytes=9 * STORED), threading.Event()
    fill(tiers, range(5))
    assert tiers.wants(name(7))
    tiers.put([name(7)], lambda: [page(7)] * go.wait(20))
    threading.Timer(0.05, go.set).start()
    tiers.clear()
    tiers.settle()
    assert not any(tiers.known([name(seed)]) for seed in range(8))
    stats = tiers.stats()
    assert stats["tier_host_bytes"] == stats["tier_disk_bytes"] == 0
    assert fill(tiers, range(1)) == [0] and len(tiers.fetch([name(0)], 16)) == 1


def test_a_device_that_fails_loses_the_page_and_nothing_else():
    tiers = make_tiers(host_bytes=4 * STORED)

    def broken() -> list:
        raise RuntimeError("the device is gone")

    assert tiers.wants(name(0))
    tiers.put([name(0)], broken)
    assert tiers.fetch([name(0)], 16) == []
    tiers.settle()
    assert not tiers.known([name(0)]) and fill(tiers, range(3)) == [0, 1, 2]


FULL = """
import resource
import numpy as np
from pathlib import Path
from rl.rollout.kv_cache.tiers.page_form import Page, PageForm
from tests.rl.rollout.kv_cache.tiers.pages import make_tiers, name

tiers = make_tiers(host_bytes=1 << 40)
tiers.form = PageForm((((1 << 20,), np.dtype(np.float32)),), tiers.codec)
tiers.settle()  # the thread runs
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), before[1]))
names = [name(seed) for seed in range(40)]
for seed, one in enumerate(names):
    assert tiers.wants(one)
    tiers.put([one], lambda seed=seed: [Page((np.full(1 << 20, seed, np.float32),))])
    tiers.settle()
under = tiers.fetch(tiers.known(names), 16)
stats = tiers.stats()
resource.setrlimit(resource.RLIMIT_AS, before)
assert stats["tier_spilled"] >= 3 and stats["tier_dropped"] >= 20, stats
assert len(under) < 40 and stats["tier_damaged"] == 0, stats
for seed, page in enumerate(tiers.fetch(tiers.known(names), 16)):
    assert (page.arrays[0] == seed).all()
assert tiers.stats()["tier_hits_host"] >= 3
"""


def test_pages_that_memory_has_no_room_for_are_counted_and_the_others_stay():
    """A limit on the addresses of a process stands for a host without free memory."""
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_costs_more_to_bring_than_to_compute_is_computed():
    tiers = make_tiers()
    fill(tiers, range(2))
    tiers.costs.prefilled(10**9, 1.0)
    tiers.costs.brought("host", 16, 1, 1.0)
    assert tiers.fetch([name(0), name(1)], 16) == []
    assert tiers.stats()["tier_recomputed"] == 2


def test_prefetched_pages_are_in_memory(tmp_path: Path):
    tiers = make_tiers(host_bytes=3 * STORED, disk=str(tmp_path), disk_bytes=9 * STORED)
    fill(tiers, range(6))
    assert tiers._tier(name(0)) == "disk"
    tiers.prefetch([name(0), name(1)])
    tiers.settle()
    assert tiers._tier(name(0)) == tiers._tier(name(1)) == "host"


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"host_bytes": 0}, "host_bytes"), ({"disk_bytes": 0}, "disk_bytes"), ({"codec": "delta"}, "without a base")],
)
def test_bad_fields_are_named(fields: dict, text: str):
    with pytest.raises(ConfigError, match=text):
        HostTiers.Config(**fields).check()


def test_a_codec_that_there_is_not_is_named_with_its_field():
    with pytest.raises(ConfigError, match=r"codec: no tensor codec 'Ecsq'.* did you mean 'ecsq'"):
        HostTiers.Config(codec="Ecsq").check()
