"""Mesh rules of experiments: the arithmetic that is common, and each experiment on each kind of devices, described."""

import math
from functools import cache
from typing import Any

import jax
import pytest
from flax import nnx

from axlearn_like.config import ConfigBase, ConfigError, with_mesh_rules
from axlearn_like.remat import find_remat
from experiments.recipes.device_rules import (
    H100,
    OFFLOAD_OPTIONS,
    TPU7X,
    TPU_OPTIONS,
    V4,
    V5E,
    V5P,
    V6E,
    Fit,
    compiler_options,
    packed_rl_rules,
    pretraining_rules,
)
from experiments.registry import entries, get
from mesh.mesh import make_mesh
from rl.fleet.devices import RoleDevices, parse_devices

TPUS = {
    "v4": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"),
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}
KINDS = {
    "v4": [f"v4:{shape}" for shape in TPUS["v4"]],
    "v5e": [f"v5e:{shape}" for shape in TPUS["v5e"]],
    "v5p": [f"v5p:{shape}" for shape in TPUS["v4"]],
    "v6e": [f"v6e:{shape}" for shape in TPUS["v5e"]],
    "tpu7x": [f"tpu7x:{shape}" for shape in TPUS["v4"][:-1]],
    "h100": [f"h100:{count}" for count in (1, 2, 4, 8, 16, 32, 64, 128, 256)],
    "h200": [f"h200:{count}" for count in (1, 2, 4, 8, 16, 32, 64, 128, 256)],
    "cpu": ["cpu:1", "cpu:2", "cpu:8"],
}
# Too little memory on a device for a row: of 36,864 tokens, which no devices share; on v5e, of a large model.
LEFT_OUT = {("qwq_32b_rl", kind) for kind in ("v4", "v5e", "v6e", "h100", "h200")}
LEFT_OUT |= {("llama2_70b", "v5e"), ("qwen3_30b_a3b", "v5e")}
# They run on one device of any kind, and as they are on as many as divide 32 rows; nothing depends on the kind.
FOR_ANY_DEVICE = {
    "demo",
    "demo_sft",
    "demo_moe_sft",
    "demo_dpo",
    "demo_ipo",
    "demo_kto",
    "demo_orpo",
    "demo_simpo",
    "calculator_rl",
    "text_to_sql",
    "text_to_sql_sft",
}
FOR_ANY_DEVICE |= {
    "demo_teacher",
    "demo_distillation",
    "demo_distilled_sft",
    "demo_expert_iteration",
    "demo_ppo",
    "grpo_bench",
    "reward_model",
    "small_llama",
    "small_chat",
}
STATE_BYTES = 16  # of a parameter: itself, its gradient and two moments, in float32


@cache
def experiment(name: str) -> Any:
    return get(name)


@cache
def devices(text: str) -> RoleDevices:
    return parse_devices(text, "devices")


def ruled(cfg: ConfigBase[Any], text: str) -> Any | None:
    """The experiment on these devices; None: it has no rule for them."""
    try:
        return with_mesh_rules(cfg, devices(text).name)
    except ConfigError as error:
        assert "has no mesh rule for" in str(error)
        return None


def check_sizes(cfg: Any, text: str) -> None:
    """The mesh has these devices, rows divide over it; nothing is traced."""
    given = getattr(cfg, "trainer", cfg)
    if given is cfg:
        cfg.check_sizes(devices(text).described)
    else:
        complete = cfg.build().trainer_cfg
        complete.check_rows(make_mesh(complete.mesh, devices(text).described))
    find_remat((cfg.model if given is cfg else cfg.policy).remat)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(entries()) - FOR_ANY_DEVICE))
def test_an_experiment_fits_each_kind_of_devices_or_is_refused(name: str):
    """Every slice larger than the smallest that has a rule has one, too, and sizes divide."""
    cfg = experiment(name)
    for kind, texts in KINDS.items():
        found = [ruled(cfg, text) for text in texts]
        if (name, kind) in LEFT_OUT:
            assert not any(found), kind
            continue
        first = next((index for index, one in enumerate(found) if one is not None), None)
        assert first is not None, f"{name} has no rule for any {kind}"
        for one, text in zip(found[first:], texts[first:], strict=True):
            if one is None:
                assert_too_many_for_the_rows(cfg, text)
            else:
                check_sizes(one, text)


def assert_too_many_for_the_rows(cfg: Any, text: str) -> None:
    """Rules end where a slice is larger than the batch has rows, or than is worth while for a small model."""
    rows = cfg.input.batch_size if hasattr(cfg, "input") else 64
    assert len(devices(text).described) > rows, f"{text} is left out between slices that have rules"


@pytest.mark.parametrize("name", sorted(FOR_ANY_DEVICE))
def test_what_needs_no_rule_runs_on_one_device_of_any_kind(name: str):
    for texts in KINDS.values():
        assert (on_it := ruled(experiment(name), texts[0])) is not None
        check_sizes(on_it, texts[0])


@cache
def parameters(name: str) -> int:
    cfg = experiment(name)
    model = getattr(cfg, "model", None) or cfg.policy
    state = jax.eval_shape(lambda: nnx.state(model.build(rngs=nnx.Rngs(0)), nnx.Param))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(entries()) - FOR_ANY_DEVICE))
def test_parameters_gradients_and_moments_fit_wherever_there_is_a_rule(name: str):
    """Nothing else is checked for GPUs; at least 15 per cent of the memory is left."""
    for kind, texts in KINDS.items():
        for text in texts:
            if kind == "cpu" or (on_it := ruled(experiment(name), text)) is None:
                continue
            there = devices(text)
            mesh = make_mesh(getattr(on_it, "trainer", on_it).mesh, there.described).shape
            shards = mesh["fsdp"] * mesh["expert"] * mesh["tensor"]
            assert there.memory is not None
            share = STATE_BYTES * parameters(name) / shards / there.memory
            assert share < 0.85, f"{name} on {text}: parameters, gradients and moments are {share:.0%} of the memory"


def test_larger_slices_have_as_many_rows_on_a_device_at_a_time():
    rules = dict(pretraining_rules(256, Fit((V5E,), 16, "context", rows=2)))
    assert rules["tpu-v5e-16"] == {
        "mesh": {"fsdp": -1},
        "microbatches": 8,
        "model.remat": "context",
        "compiler_options": TPU_OPTIONS,
    }
    assert rules["tpu-v5e-64"]["microbatches"] == 2
    assert rules["tpu-v5e-(128|256)"] == rules["tpu-v5e-16"] | {
        "mesh": {"data": -1, "fsdp": 64},
        "microbatches": 1,
    }
    assert list(rules) == ["tpu-v5e-16", "tpu-v5e-32", "tpu-v5e-64", "tpu-v5e-(128|256)", "cpu-.*"]


def test_devices_that_share_rows_count_as_one_and_experts_do_not():
    tensor = dict(pretraining_rules(64, Fit((V4, V5E), 64, "everything", rows=2, axes={"tensor": 4}, largest=64)))
    [(pattern, edits), _] = tensor.items()
    assert pattern == "(tpu-v4|tpu-v5e)-64"
    assert (edits["mesh"], edits["microbatches"]) == ({"fsdp": -1, "tensor": 4}, 2)
    expert = dict(pretraining_rules(256, Fit((H100,), 64, "everything", axes={"expert": 8}, largest=64)))
    [(pattern, edits), _] = expert.items()
    assert edits == {"mesh": {"fsdp": -1, "expert": 8}, "microbatches": 4, "model.remat": "everything"}


def test_kinds_with_other_options_of_the_compiler_have_rules_of_their_own():
    rules = dict(pretraining_rules(64, Fit((V5P, TPU7X), 16, "context", largest=16)))
    assert list(rules) == ["tpu-v5p-16", "tpu7x-16", "cpu-.*"]
    assert rules["tpu-v5p-16"] == rules["tpu7x-16"] | {"compiler_options": TPU_OPTIONS | OFFLOAD_OPTIONS}
    assert rules["tpu7x-16"]["compiler_options"] == TPU_OPTIONS
    assert compiler_options(V6E) == TPU_OPTIONS | OFFLOAD_OPTIONS
    assert compiler_options(V4) == compiler_options(V5E) == TPU_OPTIONS
    assert not compiler_options(H100)


def test_slices_that_rows_do_not_divide_over_have_no_rule():
    rules = dict(pretraining_rules(128, Fit((V5E,), 64, "everything")))
    assert list(rules) == ["tpu-v5e-64", "tpu-v5e-128", "cpu-.*"]


def test_packed_rows_are_a_number_a_device_whatever_the_slice():
    rules = dict(packed_rl_rules(Fit((V4, V5E), 1, "context", rows=2, largest=128)))
    small = {"trainer.mesh": {"fsdp": -1}, "trainer.packing.rows": 2, "policy.remat": "context"}
    assert rules["(tpu-v4|tpu-v5e)-(1|2|4|8|16|32|64)"] == small | {"trainer.compiler_options": TPU_OPTIONS}
    assert rules["(tpu-v4|tpu-v5e)-128"]["trainer.mesh"] == {"data": -1, "fsdp": 64}
