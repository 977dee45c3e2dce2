"""Processes of checks: crashes, hangs and errors are results, and the next check goes on."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tools.bench.doctor.checks import Check, Finding
from tools.bench.doctor.run import run_checks


def check(name: str, process: str = "host", seconds: float = 60) -> Check:
    return Check(f"tests.tools.bench.doctor.faults:{name}", process, seconds, quick=True)


def run(*names: str, seconds: float = 120.0, **options: Any) -> dict[str, Finding]:
    checks = {f"{number} {name}": check(name) for number, name in enumerate(names)}
    return {name.partition(" ")[2]: found for name, found in run_checks(checks, options, seconds)}


def test_a_crash_is_a_result_and_the_next_checks_go_on() -> None:
    found = run("fine", "killed", "crashed", "left", "raises", "fine", bucket="gs://x")
    assert [one.status for one in found.values()] == ["ok", "fail", "fail", "fail", "fail"]
    assert found["fine"].figures == {"options": {"bucket": "gs://x"}}
    assert found["killed"].value == "its process was killed by SIGKILL" and "memory" in found["killed"].do
    assert found["crashed"].value == "its process was killed by SIGSEGV"
    assert found["left"].value == "its process ended with status 3: a driver says goodbye"
    assert found["raises"].value == "RuntimeError: INTERNAL: something of the driver"
    assert all(one.do for one in found.values() if one.status == "fail")


def test_a_hang_ends_at_its_deadline_with_all_of_its_processes(tmp_path: Path) -> None:
    checks = {"first": check("hangs", seconds=6), "second": check("fine")}
    began = time.monotonic()
    found = dict(run_checks(checks, {"pids": str(tmp_path / "pids")}, 120))
    assert time.monotonic() - began < 60
    assert found["first"].status == "fail" and found["first"].value == "did not end in 6 s"
    assert "axl doctor --only first" in found["first"].do
    assert found["second"].status == "ok"
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        for _ in range(50):
            state = Path(f"/proc/{pid}/stat")
            if not state.exists() or state.read_text().rpartition(") ")[2][0] == "Z":
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"process {pid} lives")


def test_nothing_is_started_when_the_time_of_all_is_over() -> None:
    found = run("fine", seconds=0.0)
    assert found["fine"].status == "skip" and found["fine"].value == "no time left of 0 s"


def test_checks_of_devices_are_skipped_where_there_are_none() -> None:
    checks = {"devices": check("raises", "device"), "attention": check("fine", "device"), "last": check("fine", "ray")}
    found = dict(run_checks(checks, {}, 120))
    assert [one.status for one in found.values()] == ["fail", "skip", "ok"]


def test_checks_of_one_kind_share_a_process_and_others_have_their_own() -> None:
    checks = {"a": check("fine"), "b": check("fine"), "c": check("fine", "device")}
    pids = [one.value for _, one in run_checks(checks, {}, 120)]
    assert pids[0] == pids[1] != pids[2] and f"process {os.getpid()}" not in pids


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken_attention", "values by"),
        ("nan_head", "nan"),
        pytest.param("stuck_training", "does not fall", marks=pytest.mark.full),
    ],
)
def test_a_broken_kernel_is_seen_by_the_real_check(name: str, said: str) -> None:
    found = dict(run_checks({name: check(name, "device", 250)}, {}, 280))[name]
    assert found.status == "fail" and said in found.value and found.do, found
