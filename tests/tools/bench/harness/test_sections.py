"""Sections are found by name and measured in processes of their own; a result is shown under its own keys."""

import os

import click
import pytest
from click.testing import CliRunner

from mesh import UserError
from tools.bench.harness.processes import in_process
from tools.bench.harness.sections import find_sections, run_sections
from tools.bench.harness.show import tables
from tools.commands.bench.options import sections_option

KNOWN = ("peers", "prefix", "fill")


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


def test_sections_are_the_default_ones_unless_named_and_run_in_order() -> None:
    assert find_sections("rollout", [], KNOWN, KNOWN[1:]) == ["prefix", "fill"]
    assert find_sections("rollout", ["fill", "peers"], KNOWN, KNOWN[1:]) == ["peers", "fill"]
    with pytest.raises(UserError, match="rollout has no section 'prefixes'.*prefix"):
        find_sections("rollout", ["prefixes"], KNOWN, KNOWN)


def test_section_that_fails_is_an_error_with_its_reason() -> None:
    said: list[str] = []
    parts, errors = run_sections("tools.bench.weights.sections", {"nowhere": "a section without a module"}, said.append)
    assert not parts and "ended with status 1" in errors["nowhere"] and "nowhere" in errors["nowhere"].splitlines()[-1]
    assert len(said) == 2


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


def test_a_list_of_no_sections_is_not_that_of_all() -> None:
    @click.command()
    @sections_option(KNOWN, "peers")
    def command(sections: str) -> None:
        click.echo(f"measured {sections or 'all'}")

    assert CliRunner().invoke(command, []).output == "measured all\n"
    refused = CliRunner().invoke(command, ["--sections", ","])
    assert refused.exit_code == 2 and "expected names of sections" in refused.output
