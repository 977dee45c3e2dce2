"""Mesh rules fit by the compiler's figures: those that are stored, and with --full each compiled again at full size."""

import functools
from typing import Any

import pytest

from axlearn_like.config import ConfigError, with_mesh_rules
from experiments.registry import entries, get
from mesh.generations import GENERATIONS
from mesh.topology import prepare_compiler
from tests.elsewhere import elsewhere
from tests.golden.compiles import versions
from tests.golden.rules import COMMAND, PAGE, Case, cases, compiled_figures, device_name_of, slices, stored, table
from tests.tpu_compiler import needs_tpu_compiler

TIMEOUT = 1800
NOT_FACTS = ("compile_cpu_s", "estimated_step_s", "peak")


@functools.cache
def known() -> dict[str, Case]:
    """All cases by name; to look for them takes more than a second, so not while tests are collected."""
    return {case.name: case for case in cases()}


@pytest.mark.slow
def test_a_case_is_the_smallest_slice_that_has_a_rule():
    assert len(known()) == len(cases())
    for case in known().values():
        generation = case.topology.generation.name
        smaller = [one for one in slices(generation) if one.devices < case.topology.devices]
        for one in smaller:
            with pytest.raises(ConfigError, match="has no mesh rule for"):
                with_mesh_rules(get(case.experiment), device_name_of(one))
        with_mesh_rules(get(case.experiment), device_name_of(case.topology))


def test_what_is_stored_fits_and_is_of_the_rules_as_they_are():
    for name, found in stored().items():
        case = known()[name]
        cfg: Any = with_mesh_rules(get(case.experiment), device_name_of(case.topology))
        trainer = getattr(cfg, "trainer", cfg)
        assert found["fits"] and found["peak"] < found["available"], name
        assert found["topology"] == case.topology.name, f"`{COMMAND} {name}`"
        assert found["microbatches"] == trainer.microbatches, f"`{COMMAND} {name}`"
        assert found["remat"] == (cfg.policy if trainer is not cfg else cfg.model).remat, f"`{COMMAND} {name}`"


def test_the_page_has_the_table_of_what_is_stored():
    assert table(stored()) in PAGE.read_text(), f"`{COMMAND}` writes it"


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("experiment", entries())
def test_a_rule_compiles_on_its_smallest_slice(experiment: str, generation: str):
    case = known().get(f"{experiment}.{generation}")
    if case is None:
        pytest.skip(f"{experiment} has no rule for {generation}")
    found = elsewhere(compile_case, case.name, timeout=TIMEOUT)
    assert found["fits"], f"{case.name}: {found}"
    before = stored().get(case.name)
    if before is not None and before["versions"] == versions():
        facts = [{name: value for name, value in one.items() if name not in NOT_FACTS} for one in (found, before)]
        assert facts[0] == facts[1], f"`{COMMAND} {case.name}`, if this is meant"
        assert found["peak"] == pytest.approx(before["peak"], rel=0.02)


def compile_case(name: str) -> dict[str, object]:
    prepare_compiler()
    return compiled_figures(next(case for case in cases() if case.name == name))
