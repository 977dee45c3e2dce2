"""A benchmark that Ctrl-C ends, as a real process: what is done is shown and kept, what is missing is named."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh.errors import UserError
from tools.bench.harness.sections import find_sections
from tools.cli import main
from tools.commands.bench.group import find_benchmark

BENCHMARK = """
import sys
from tools.bench.harness.circumstances import machine
from tools.bench.harness.interleave import measure
from tools.bench.harness.processes import Command, worker_environ
from tools.bench.harness.sections import run_sections
from tools.commands.bench.options import progress, report

worker = '''
import itertools
from tools.bench.harness.protocol import StepServer
server = StepServer("tiny 1.0", parameters=7)
server.begin()
for index in itertools.count():
    server.record(new_tokens=index, reward=0.0)
    with server.generation():
        pass
    if not server.step_done():
        break
'''
command = Command((sys.executable, "-c", worker), worker_environ(PYTHONPATH={root!r}))
with progress() as say:
    tell = lambda line: print(line, file=sys.stderr, flush=True)
    found, missing = run_sections(
        {{
            "first": lambda: {{"figure": 1.5, "of": {{"part": 2}}, "list": [1, 2]}},
            "steps": lambda: measure({{"one": command, "two": command}}, 10**6, tell),
            "last": dict,
        }},
        say,
    )
steps = {{name: [step["new_tokens"] for step in one.steps] for name, one in found.get("steps", {{}}).items()}}
result = {{"bench": "test", "missing": missing, "steps": steps, "found": sorted(found), "machine": machine()}}
report(result, True, failed=True)
"""


def interrupted(after: str) -> tuple[int, Any, str]:
    """Run the benchmark and interrupt it behind the line that begins so: status, result, what it showed until then."""
    command = [sys.executable, "-c", BENCHMARK.format(root=str(Path(__file__).parents[4]))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        shown = ""
        for line in process.stderr:
            shown += line
            if line.startswith(after):
                process.send_signal(signal.SIGINT)
                break
        out, rest = process.communicate(timeout=60)
    return process.returncode, json.loads(out.splitlines()[-1]), shown + rest


@pytest.mark.slow
def test_ctrl_c_leaves_whole_rounds_and_names_what_is_missing():
    status, result, shown = interrupted("round 6 of")
    assert status == 130 and result["missing"] == ["steps", "last"] and result["found"] == ["first", "steps"]
    one, two = result["steps"]["one"], result["steps"]["two"]
    assert one == two and one[:3] == [4, 5, 6]  # the first three steps warmed up
    assert "first: done in 0 s\n  figure = 1.5\n  of.part = 2\n" in shown and "[1, 2]" not in shown
    assert "of steps; missing: steps, last" in shown


@pytest.mark.slow
def test_ctrl_c_before_a_counted_round_leaves_the_sections_before():
    status, result, _ = interrupted("one: starting")
    assert status == 130 and result["missing"] == ["steps", "last"] and result["found"] == ["first"]


def test_sections_are_found_by_name_in_the_order_of_the_benchmark():
    known = {"a": 1.0, "b": 2.0}
    assert find_sections(["b", "a"], known) == ["a", "b"] == find_sections([], known)
    with pytest.raises(UserError, match="no 'bb'; did you mean 'b'.*expected some of a, b"):
        find_sections(["bb"], known)


@pytest.mark.parametrize("bench", ["grpo_step", "policies", "weights"])
def test_help_has_the_seconds_of_each_section(bench: str, capfd: pytest.CaptureFixture[str]):
    assert main(["bench", bench, "--help"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    for name, seconds in find_benchmark(bench).SECTIONS.items():
        assert f"{name} ({seconds:g} s)" in shown
    assert main(["bench", bench, "--sections", "none"]) == 2
    assert "--sections: there is no 'none'" in capfd.readouterr().err
