"""Exact numerics on several TPUs, compiled: sums over devices whose order is ours, and one text for all batches."""

from typing import Any

import jax
import pytest

from mesh.cost.hlo import parse
from mesh.topology import parse_topology, topology_devices
from models.catalog import published_model
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.dispatches import engine_dispatches
from tests.axlearn_like.kernels.mosaic import texts_of, without_batch
from tests.elsewhere import elsewhere
from tests.studies.exact_numerics import compile_programs, reductions
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

PROGRAM = """HloModule made

%adds (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%largest (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %peak = f32[] maximum(%a, %b)
}

ENTRY %main (x: f32[8], y: s32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = s32[8]{0} parameter(1)
  %peaks = f32[8]{0} all-reduce-start(%x), to_apply=%largest
  %words = s32[8]{0} all-reduce(%y), to_apply=%adds
  ROOT %part = f32[8]{0} reduce-scatter(%x), dimensions={0}, to_apply=%adds
}
"""


def test_sums_of_floats_are_told_from_others():
    assert reductions(parse(PROGRAM)) == ["maximum of floats", "add of integers", "add of floats"]


def engine(numerics: Any, model: str, rows: int) -> RolloutEngine.Config:
    policy = published_model(model).clone(numerics=numerics, num_layers=2)
    sizes: dict[str, Any] = {"max_num_seqs": rows, "max_prompt_tokens": 512, "max_new_tokens": 512, "page_size": 64}
    return RolloutEngine.Config(model=policy, stop_tokens=(), mesh={"tensor": 4}, **sizes)


def float_sums(topology: str, model: str) -> list[list[int]]:
    """Return the sums of floats and all sums over devices, with default and with exact numerics."""
    kinds = ("prefill", "decode")
    found = [compile_programs(engine(numerics, model, 64), topology, kinds) for numerics in ("default", "exact")]
    return [[sum(getattr(one, name) for one in each) for name in ("float_sums", "sums")] for each in found]


def kernels(topology: str, model: str, rows: int) -> list[str]:
    """Return the distinct texts of the kernels that add, of decoding so many rows, by their sizes on the chip alone."""
    mesh, dispatches = engine_dispatches(engine("exact", model, rows), topology_devices(parse_topology(topology)))
    plain = next(one for one in dispatches if one.kind == "decode")
    with jax.set_mesh(mesh):
        texts = texts_of(plain.trace().lower().as_text())
    return sorted({without_batch(text) for text in texts if "module @write_pages" not in text})


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_no_order_of_a_sum_over_devices_is_the_compilers(topology: str, model: str):
    default, exact = elsewhere(float_sums, topology, model, environ=TPU_COMPILER, timeout=580)
    assert default[0] > 0 and exact[0] == 0 < exact[1]


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_the_kernels_of_decoding_on_four_chips_are_the_same_for_all_batches(model: str):
    few, many = (elsewhere(kernels, "v6e:2x2", model, rows, environ=TPU_COMPILER) for rows in (8, 64))
    assert few and few == many
