"""A run shows the thinnest numerical bounds, and fails where one has no margin; beside each other and in workers."""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.bounds import Bounds
def pytest_configure(config):
    config.addinivalue_line("markers", "numerics: bounds")
    config.pluginmanager.register(Bounds())
"""
TESTS = """
import numpy as np, pytest
from tests.bounds import within

@pytest.mark.numerics
@pytest.mark.parametrize("share", [0.1, SHARE])
def test_by_hand(share):
    assert within([0.0, -share * 1e-6], 1e-6)

@pytest.mark.numerics
def test_arrays_and_scalars():
    np.testing.assert_allclose([1.0, np.inf, 2.0], [1.0, np.inf, 2.0 + 5e-7], rtol=0, atol=1e-5)
    assert {"x": 3.02} == {"x": pytest.approx(3.0, abs=0.1)}
    assert 4.0 != pytest.approx(3.0)

def test_unmarked():
    assert within(0.9, 1.0)
"""


def run(folder: Path, share: float, *options: str, ci: str = "") -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_made.py").write_text(TESTS.replace("SHARE", str(share)))
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "CI": ci}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True)
    return done.returncode, done.stdout.decode()


def test_a_run_fails_whose_tests_pass_by_less_than_a_factor_of_three(tmp_path: Path):
    status, shown = run(tmp_path, 0.5, "-n", "2")
    assert status == 1 and "4 passed" in shown and "1 above 0.33" in shown
    lines = [line for line in shown.splitlines() if "of its bound" in line]
    assert [float(line.split()[0]) for line in lines] == [0.5, 0.2, 0.05, 0.5]
    assert "of its bound" in shown.splitlines()[-2] and "above 0.33" in shown.splitlines()[-1], "the last lines"
    assert "test_made.py:8" in lines[0] and "test_by_hand[0.5]" in lines[0] and "unmarked" not in shown


def test_a_run_with_margins_passes(tmp_path: Path):
    status, shown = run(tmp_path, 0.3, "-p", "no:xdist")
    assert status == 0 and "0.300 of its bound" in shown and "above" not in shown


def test_ci_takes_another_processor_for_no_fault(tmp_path: Path):
    assert run(tmp_path, 0.5, "-p", "no:xdist", ci="true")[0] == 0
    status, shown = run(tmp_path, 0.8, "-p", "no:xdist", ci="true")
    assert status == 1 and "1 above 0.67" in shown


def test_tests_that_compare_within_a_bound_are_marked():
    """A file that does and has no mark at all would be left out, by this plugin and by `make test-isa`."""
    unmarked = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if ("assert_allclose" in text or "within(" in text) and "pytest.mark.numerics" not in text:
            calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            names = [one.id if isinstance(one, ast.Name) else getattr(one, "attr", "") for one in calls]
            methods = "from tests.bounds import" not in text  # `within` of something else
            if "assert_allclose" in names or ("within" in names and not methods):
                unmarked.append(str(path.relative_to(ROOT)))
    assert not unmarked, "expected pytestmark = pytest.mark.numerics, or the mark at single tests"
