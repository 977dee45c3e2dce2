"""The lab of transports: its yardsticks and ways run, and say what they took."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tools.bench.transports.receiving import PULLS, measure, read_once
from tools.bench.transports.sending import SENDERS
from tools.bench.transports.yardsticks import Spent, medians, memcpy_gbps, payload, raw_stream_gbps

NBYTES = 3_000_001


@pytest.mark.parametrize("yardstick", [memcpy_gbps, raw_stream_gbps])
def test_a_yardstick_says_what_it_took(yardstick: Callable[..., Spent]):
    spent = yardstick(NBYTES, rounds=2)
    assert spent.nbytes == NBYTES and spent.wall_s > 0 and spent.cpu_s > 0
    assert spent.gbps == pytest.approx(NBYTES / spent.wall_s / 1e9)


def test_medians_are_of_each_figure_by_itself():
    assert medians([Spent(1, 1.0, 9.0), Spent(1, 2.0, 8.0), Spent(1, 5.0, 1.0)]) == Spent(1, 2.0, 8.0)


def test_the_payload_is_the_same_everywhere_and_has_no_two_equal_megabytes():
    whole = payload(40 << 20)
    assert not np.array_equal(whole[: 1 << 20], whole[1 << 20 : 2 << 20])
    assert np.array_equal(whole, payload(40 << 20))


def test_reading_once_sees_every_word():
    memory = payload(1 << 16).copy()
    before = read_once(memory)
    memory[12_345] ^= 4
    assert read_once(memory) == before ^ (4 << (8 * (12_345 % 8)))


@pytest.mark.parametrize("way", ["wire_2", "wire_digests", "shared_memory", "shared_memory_held"])
def test_a_way_moves_the_bytes(way: str):
    step = measure(way, NBYTES, {})
    assert step["wall_s"] > 0 and step["sender_cpu_s"] > 0 and step["receiver_cpu_s"] > 0


def test_senders_and_receivers_are_of_the_same_ways():
    assert set(SENDERS) == set(PULLS)


def test_one_command(checkout: Path):
    command = [sys.executable, "-m", "tools.bench.transports", "--json", "--rounds", "1", "--nbytes", str(NBYTES)]

    def run(ways: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(checkout)}
        return subprocess.run(
            [*command, "--ways", ways],
            cwd=checkout,
            env=environ,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    done = run("raw_stream,wire")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["ways"]) == {"raw_stream", "wire"} and not result["errors"]
    assert result["ways"]["raw_stream"]["cpu_speed_to_raw"] == 1.0
    done = run("wires")
    assert done.returncode == 1 and "there is no way 'wires'; did you mean 'wire'" in done.stderr
