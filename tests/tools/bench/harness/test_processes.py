"""Objects live in processes of their own; a result is shown under its own keys."""

import os

import pytest

from tools.bench.harness.processes import in_process
from tools.bench.harness.show import tables


class Process:
    def __init__(self, start: int):
        self._sum = start

    def add(self, number: int) -> tuple[int, int]:
        self._sum += number
        return self._sum, os.getpid()


def test_an_object_lives_in_a_process_of_its_own() -> None:
    with in_process(Process, start=1) as process:
        assert process.add(2)[0] == 3
        total, pid = process.add(number=4)
        assert total == 7 and pid != os.getpid()
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_records_with_common_keys_are_a_table_and_other_figures_are_listed() -> None:
    result = {
        "bench": "x",
        "ratio": 0.5,
        "long_tail": {"requests": 2560, "ways": {"fifo": {"cpu_s": 1.25}, "steady": {"cpu_s": 2.0, "tokens": None}}},
        "sweep": [{"rows": 1, "ms": {"p50": 3.0}}, {"rows": 2, "ms": {"p50": 4.0}}],
        "seconds": [1.0, 2.0],
        "machine": {"cores": 2},
    }
    assert tables(result) == [
        ("long_tail.ways", ["", "cpu_s", "tokens"], [["fifo", "1.25", ""], ["steady", "2", "-"]]),
        ("sweep", ["", "rows", "ms.p50"], [["0", "1", "3"], ["1", "2", "4"]]),
        ("figures", ("", "value"), [("ratio", "0.5"), ("long_tail.requests", "2,560")]),
    ]
