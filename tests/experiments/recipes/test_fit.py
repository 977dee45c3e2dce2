"""The computation of what fits: properties over models, machines and batches, and refusals that propose."""

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.recipes.fit import Fit, fit
from experiments.recipes.machines import find_machine
from experiments.recipes.sizes import METHODS, model_sizes
from mesh.errors import UserError
from models.catalog import published_model
from rl.fleet.fleet import Fleet

MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B", "Llama-3.1-70B", "Gemma-3-1B")
MACHINES = ("v5e:1x1", "v5e:2x4", "v6e:2x4", "v6e:16x16", "v5p:2x2x1", "v5p:4x4x4", "tpu7x:2x2x1", "h100:1", "h200:8")
LENGTHS: Any = {"prompt_tokens": 512, "answer_tokens": 1024}


def found_or_none(*what: Any, **sizes: int) -> Fit | None:
    try:
        return fit(*what, **{**LENGTHS, **sizes})
    except UserError:
        return None


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(MODELS),
    job=st.sampled_from(("sft", "rl")),
    machine=st.sampled_from(MACHINES),
    rows=st.sampled_from((1, 8, 24, 64, 256, 1024)),
    answer=st.sampled_from((256, 1024, 8192)),
)
def test_a_fit_divides_uses_every_device_and_has_room(name: str, job: str, machine: str, rows: int, answer: int):
    there = find_machine(machine)
    found = found_or_none(published_model(name), job, there, rows=rows, answer_tokens=answer)
    if found is None:
        return
    engines, sizes = found.engines, found.mesh
    own = 0 if engines is None or engines.devices == "trainer" else engines.workers * math.prod(engines.mesh.values())
    assert math.prod(sizes.values()) + own == there.count
    groups = math.prod(size for axis, size in sizes.items() if axis in ("data", "fsdp"))
    assert rows % groups == 0
    if job == "sft":
        assert found.rows_at_once * groups * found.accumulation == rows
    assert sum(found.holds.values()) <= there.memory
    assert engines is None or sum(engines.holds.values()) <= there.memory
    assert found.method in METHODS and found.seconds is not None and found.seconds > 0


@pytest.mark.parametrize("name", MODELS)
def test_what_fits_a_slice_fits_a_larger_one_of_its_kind_with_no_worse_a_method(name: str):
    before: Fit | None = None
    for shape in ("1x1", "2x2", "2x4", "4x4", "8x8"):
        found = found_or_none(published_model(name), "sft", f"v6e:{shape}", rows=256)
        if before is not None:
            assert found is not None, shape
            assert METHODS.index(found.method) <= METHODS.index(before.method)
            assert found.seconds is not None and before.seconds is not None and found.seconds < before.seconds
        before = found
    assert before is not None


@pytest.mark.parametrize("machine", ["v5e:2x4", "v6e:2x4", "h100:8"])
def test_the_8b_models_are_trained_on_eight_devices(machine: str):
    sft = fit(published_model("Llama-3.1-8B"), "sft", machine, rows=128, **LENGTHS)
    rl = fit(published_model("Qwen3-8B"), "rl", machine, rows=256, **LENGTHS)
    assert sft.method == rl.method == ("lora" if machine == "v5e:2x4" else "full")
    assert rl.fleet is not None


def test_a_batch_smaller_than_the_slice_is_spread_over_devices_that_share_rows():
    found = fit(published_model("Llama-3.1-8B"), "sft", "v6e:16x16", rows=128, **LENGTHS)
    assert found.mesh == {"data": 2, "fsdp": 64, "tensor": 2}
    with pytest.raises(UserError, match=r"100 rows do not divide over 64 devices. What would: a batch of 128 rows"):
        fit(published_model("Gemma-3-1B"), "rl", "v5p:4x4x8", rows=100, **LENGTHS)


def test_a_refusal_has_the_arithmetic_and_what_would_fit():
    with pytest.raises(UserError) as refused:
        fit(published_model("Llama-3.1-8B"), "sft", "v5e:2x4", rows=128, methods=("full",), **LENGTHS)
    said = str(refused.value)
    assert "full needs parameters 4.0 + moments 8.0 + gradients 8.0" in said
    assert "a device has 16.5 GB" in said
    of = r"\([\d.]+ GB of 16.5 GB of a device"
    assert re.search(rf"would: lora {of}\); v5e:4x4 {of}\)$", said)


def test_a_machine_too_small_is_refused_with_what_the_least_needs_and_a_machine_that_would_do():
    """One change is not enough: all of them together are named, in bytes, or other devices."""
    model, cpu = published_model("Qwen3-8B"), dataclasses.replace(find_machine("cpu:2"), memory=6_000_000_000)
    with pytest.raises(UserError) as refused:
        fit(model, "rl", cpu, rows=128, **LENGTHS)
    ways = str(refused.value).partition("What would: ")[2]
    named = re.match(r"(\S+) \([\d.]+ GB of [\d.]+ GB of a device\); fewer or shorter rows are not enough: ", ways)
    assert named is not None, ways
    assert fit(model, "rl", named[1], rows=128, **LENGTHS).holds
    least = re.search(r"of 2 rows of 192 tokens, lora needs .* = ([\d.]+) GB, and a device has 6.0 GB", ways)
    assert least is not None, ways
    small = dataclasses.replace(cpu, memory=2_500_000_000)
    with pytest.raises(UserError, match=r"What would: lora with 2 rows of 576 tokens \([\d.]+ GB of 2.5 GB"):
        fit(published_model("Qwen3-0.6B"), "rl", small, rows=128, prompt_tokens=512, answer_tokens=4096)


def test_engines_of_a_70b_hold_int8_weights_where_two_versions_of_bfloat16_do_not_fit():
    found = fit(published_model("Llama-3.1-70B"), "rl", "v6e:16x16", rows=1024, **LENGTHS).engines
    assert found is not None and found.int8 and found.devices == "v6e:2x4" and found.mesh == {"tensor": 8}


def test_a_gpu_outside_the_table_is_fitted_by_the_memory_that_it_says(monkeypatch: pytest.MonkeyPatch):
    listed = [("gpu", "NVIDIA GeForce RTX 4090", 18 << 30)] * 2
    monkeypatch.setattr("mesh.devices._listed_by_subprocess", lambda: listed)
    monkeypatch.setattr("mesh.devices._only_cpus", lambda: False)
    found = fit(published_model("Qwen3-0.6B"), "rl", "here", rows=64, **LENGTHS)
    assert found.fleet == "trainer=gpu:1,workers=gpu:1" and found.machine.memory == 18 << 30
    assert "as it says; NVIDIA GeForce RTX 4090 is taken to do 60 TFLOP/s and to read 300 GB/s" in found.why
    assert found.seconds is not None
    with pytest.raises(UserError, match=r"on gpu:2 does not fit: .* What would: (?!.*gpu:4)"):
        fit(published_model("Qwen3-30B-A3B"), "sft", "here", rows=64, **LENGTHS)
    with pytest.raises(
        UserError, match=r"nothing is known of the memory of GPU; expected .*gpu\[memory=24\]:2, `here`"
    ):
        find_machine("gpu:2")
    described = fit(published_model("Qwen3-0.6B"), "rl", "gpu[memory=24]:2", rows=64, **LENGTHS)
    assert described.machine.memory == 0.75 * (24 << 30) and described.fleet == (
        "trainer=gpu[memory=24]:1,workers=gpu[memory=24]:1"
    )
    assert Fleet.Config().edited(described.fleet).build().trainer.memory == 24 << 30


def test_a_base_of_int8_is_named_where_nothing_else_fits():
    model = published_model("Qwen3-8B")
    small = fit(model, "sft", "v6e:1x1", rows=64, **LENGTHS)
    assert small.method == "int8 lora" and small.holds["parameters"] < 4 * model_sizes(model).parameters / 2
    with pytest.raises(UserError, match="int8 lora: not for rl"):
        fit(model, "rl", "v5e:2x4", rows=64, methods=("int8 lora",), **LENGTHS)
