"""The compiled experiments are those stored: a changed rule, remat or layer shows as lines.

In `make test` some experiments of reduced sizes; with --full all of them, and those of full size.
"""

import difflib
import traceback

import pytest

from experiments.registry import entries, get
from mesh.topology import prepare_compiler
from tests.elsewhere import elsewhere
from tests.golden.compiles import CASES, COMMAND, DIRECTORY, Case, compiled_text, stored_versions, versions
from tests.tpu_compiler import needs_tpu_compiler

SMALL = [case for case in CASES if case.small]
FULL = [case for case in CASES if not case.small]
TIMEOUT = 900
# One of RL in every run. The others are the same code at other sizes, or take half a minute, such as experts.
EVERY_RUN = ("qwen25_0_5b_rl",)


@pytest.fixture(scope="module")
def small_texts(request: pytest.FixtureRequest) -> dict[str, str]:
    """The compilations by name; all in one process, which imports and starts the compiler once."""
    all_of_them = request.config.getoption("--full")
    chosen = [case for case in SMALL if (all_of_them or case.experiment in EVERY_RUN) and not _otherwise(case)]
    return elsewhere(compile_cases, [case.name for case in chosen], timeout=TIMEOUT)


@needs_tpu_compiler
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.experiment in EVERY_RUN else [pytest.mark.full])
        for case in SMALL
    ],
)
def test_a_small_experiment_compiles_to_what_is_stored(case, small_texts):
    compare(case, small_texts)


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.name)
def test_an_experiment_compiles_to_what_is_stored(case):
    compare(case, {} if _otherwise(case) else elsewhere(compile_cases, [case.name], timeout=TIMEOUT))


def test_every_experiment_with_a_rule_for_tpus_is_compiled_small():
    ruled = {name for name in entries() if any("tpu" in pattern for pattern, _ in getattr(get(name), "mesh_rules", ()))}
    assert ruled and ruled <= {case.experiment for case in SMALL}


def test_nothing_is_stored_of_cases_that_are_gone():
    assert {path.name for path in DIRECTORY.glob("*.txt")} == {f"{case.name}.txt" for case in CASES}


def compare(case: Case, texts: dict[str, str]) -> None:
    if reason := _otherwise(case):
        pytest.skip(reason)
    stored = (DIRECTORY / f"{case.name}.txt").read_text()
    lines = difflib.unified_diff(stored.splitlines(), texts[case.name].splitlines(), "stored", "now", lineterm="", n=0)
    difference = "\n".join(lines)
    assert not difference, f"`{COMMAND} {case.name}`, if this is meant:\n{difference}"


def _otherwise(case: Case) -> str:
    """Why it cannot be compared: the compiler decides much of what is stored."""
    path = DIRECTORY / f"{case.name}.txt"
    assert path.exists(), f"no {path.name}; `{COMMAND} {case.name}` writes it"
    stored = stored_versions(path.read_text())
    if stored == versions():
        return ""
    return f"{path.name} was {stored}; here it would be {versions()}: `{COMMAND}` writes what to compare with"


def compile_cases(chosen: list[str]) -> dict[str, str]:
    """Text by name; what went wrong in its place, so that one does not hide the others."""
    prepare_compiler()
    texts = {}
    for case in CASES:
        if case.name in chosen:
            try:
                texts[case.name] = compiled_text(case)
            except Exception:
                texts[case.name] = traceback.format_exc(limit=-3)
    return texts
