"""Every family computes what transformers does: tiny models, against tests/models/golden/parity."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from mesh import make_mesh
from mesh.errors import UserError
from mesh.rules import partition
from tests.elsewhere import elsewhere
from tests.golden import parity

# Compiling is all that takes time here, and differences are no larger for it.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "parity.md"
EVERY_RUN = ("gemma2",)  # a pattern of windows, and soft caps


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
    # Something was compared.
    assert min(differences["logits"], differences["gradient"], differences["decode"], differences["engine"]) > 0


def documented() -> dict[str, list[float]]:
    table = PAGE.read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| (.*) \|$", table, re.MULTILINE)
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
        assert len(reference.arrays["generated"]) == parity.PROMPT + 200
    lengths = {name: int(parity.load(name).arrays["positions"].max()) + 1 for name in ("gemma3", "gpt_oss", "qwen2")}
    assert set(lengths.values()) == {64}  # windows are of 8 tokens, YaRN's original length is 16


def test_a_page_that_is_written_again_keeps_what_is_written_by_hand():
    before = PAGE.read_text()
    (tables, by_hand), rows = before.split("<!-- What follows is written by hand. -->"), documented()
    found = {name: dict(zip(parity.MEANINGS, values, strict=True)) for name, values in rows.items()}
    assert parity.page(found, before) == before and "## Adapters in PEFT" in by_hand
    assert parity.page(found).startswith(tables)
    one = {"gpt2": dict.fromkeys(parity.MEANINGS, 0.25)}  # measured alone
    row = re.search(r"^\| gpt2 \| (.*) \|$", before, re.MULTILINE)
    assert row and parity.page(one, before).replace(" | ".join(["2.5e-01"] * 6), row[1]) == before


def test_a_wrong_name_is_answered_with_the_right_one():
    with pytest.raises(UserError, match="no reference 'gemma4'; did you mean 'gemma[23]'"):
        parity.load("gemma4")


MESHES = {
    "fsdp_tensor": {"fsdp": 2, "tensor": 2},
    "sequence": {"data": 2, "sequence": 2},
    "expert": {"expert": 2, "fsdp": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gpt2", "fsdp_tensor"),
        ("llama_biases", "fsdp_tensor"),
        pytest.param("gemma2_own_head", "fsdp_tensor", marks=pytest.mark.full),
        pytest.param("qwen3_moe_dense", "expert", marks=pytest.mark.full),
        pytest.param("gpt_oss", "expert", marks=pytest.mark.full),
        pytest.param("gemma3", "fsdp_tensor", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "sequence", marks=pytest.mark.full),
    ],
)
def test_a_family_trains_on_a_mesh(name: str, shape: str):
    """Traced alone: shardings that do not fit together are an error then."""
    cfg = parity.load(name).cfg.set(remat="everything")
    mesh = make_mesh(MESHES[shape], jax.devices()[:1] * 4).abstract_mesh

    def gradient() -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            graphdef, params = split(cfg.build(rngs=nnx.Rngs(0)))
            tokens = jax.sharding.reshard(jnp.zeros((8, 64), jnp.int32), partition("batch", "length"))
            context = PackedContext(tokens, tokens, "zigzag")
            return jax.grad(lambda p: jnp.sum(bind(graphdef, p)(tokens, context)))(params)

    found = jax.eval_shape(gradient)
    assert all(
        leaf.sharding.spec == like.sharding.spec
        for leaf, like in zip(jax.tree.leaves(found), jax.tree.leaves(_abstract(cfg, mesh)), strict=True)
    )


def _abstract(cfg: Any, mesh: Any) -> Any:
    with jax.sharding.use_abstract_mesh(mesh):
        return split(build_abstract(cfg))[1]
