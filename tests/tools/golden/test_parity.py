"""Every family computes what transformers does: tiny models, against tests/models/golden/parity."""

import re
from pathlib import Path

import pytest

from mesh.errors import UserError
from tests.elsewhere import elsewhere
from tools.golden import parity

# Compiling is all that takes time here, and differences are no larger for it.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "parity.md"
# One of each kind in every run: a pattern of windows, sinks with experts, latent attention behind dense blocks.
EVERY_RUN = ("gemma3", "gpt_oss", "deepseek_v3")


def measure_all(names: list[str]) -> dict[str, dict[str, float]]:
    """Differences by case and property."""
    return {name: parity.measure(parity.load(name)) for name in names}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    names = parity.names() if request.config.getoption("--full") else list(EVERY_RUN)
    return elsewhere(measure_all, names, timeout=500, environ=QUICK)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in EVERY_RUN else [pytest.mark.full]) for one in parity.names()]
)
def test_a_family_computes_what_transformers_does(found: dict[str, dict[str, float]], name: str):
    differences = found[name]
    assert differences.keys() == parity.MEANINGS.keys()
    assert max(differences.values()) < parity.LIMIT, differences
    assert differences["greedy"] == differences["export"] == 0
    assert min(differences["logits"], differences["gradient"]) > 0  # something was compared


def documented() -> dict[str, list[float]]:
    rows = re.findall(r"^\| (\w+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: [float(value) for value in values.split(" | ")] for name, values in rows if name != "family"}


def test_the_page_has_every_family_and_what_is_measured(found: dict[str, dict[str, float]]):
    table = documented()
    assert list(table) == parity.names()
    assert max(max(values) for values in table.values()) < parity.LIMIT
    for name, differences in found.items():
        for value, written in zip(differences.values(), table[name], strict=True):
            assert value <= 10 * written, (name, differences)


def test_the_reference_reaches_beyond_windows_and_original_lengths():
    for name in parity.names():
        reference = parity.load(name)
        assert len(reference.tensors) > 10
        assert len(reference.arrays["generated"]) >= 38
    lengths = {name: int(parity.load(name).arrays["positions"].max()) + 1 for name in ("gemma3", "gpt_oss", "qwen2")}
    assert set(lengths.values()) == {64}  # windows are of 8 tokens, YaRN's original length is 16


def test_a_wrong_name_is_answered_with_the_right_one():
    with pytest.raises(UserError, match="no reference 'gemma4'; did you mean 'gemma[23]'"):
        parity.load("gemma4")
