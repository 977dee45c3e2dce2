"""Recipes: each is an experiment that composes on each of its machines, and experiments without a rule are fitted."""

from typing import Any

import pytest

from axlearn_like.config import from_text, to_text
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.learner import BFloat16State
from experiments import registry
from experiments.recipes.apply import apply_fit
from experiments.recipes.recipes import recipes
from mesh.errors import UserError
from rl.fleet.devices import parse_devices
from tests.golden.recipes import COMMAND, PAGE, WAY, peak_share, stored, tables
from tools.experiment import load_experiment
from tools.fleet import load_placed


def named(devices: str) -> Any:
    return lambda: parse_devices(devices, "devices").name


@pytest.mark.slow
def test_the_page_has_the_tables_of_what_fits_and_of_what_was_compiled():
    for table in tables().values():
        assert table in PAGE.read_text(), f"`{COMMAND}` writes it"


@pytest.mark.parametrize("name", stored())
def test_what_was_compiled_is_what_is_proposed_and_fits(name: str):
    row = stored()[name]
    found = recipes()[row["name"]].fit(row["machine"])
    again = f"compile it again: axl recipes {row['name']} --machine {row['machine']} --check full --json"
    assert {field: getattr(found, field) for field in WAY} == {field: row[field] for field in WAY}, again
    assert all(one["fits"] for one in row["compiled"].values())
    little = 0.03 * found.machine.memory / sum(found.holds.values())  # what a small share of the memory may be off by
    assert 0.55 < peak_share(row) < 1 + max(0.08, little)


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_composes_and_its_text_is_it(name: str):
    cfg: Any = registry.get(name)
    recipe = recipes()[name]
    found = recipe.fit(recipe.machines[-1])
    apply_fit(found, cfg)
    assert to_text(from_text(to_text(cfg))) == to_text(cfg)
    model = cfg.policy if recipe.job == "rl" else cfg.model
    assert (":LoRA\n" in to_text(model)) == (found.method == "lora")
    assert any(isinstance(one, BFloat16State.Config) for one in cfg.learner.state_storage) == (
        found.method == "bfloat16 moments"
    )


def test_a_recipe_is_an_experiment_on_the_devices_of_its_run():
    cfg: Any = load_experiment("llama31_8b_sft", device=named("v5e:2x4"))
    assert cfg.mesh == {"fsdp": 8} and cfg.input.batch_size == 64 and cfg.microbatches == 2
    assert isinstance(cfg.model.block.attention, LoRA.Config) and cfg.start_from.conversions
    assert cfg.learner.schedule.peak_lr == pytest.approx(1e-4)
    full: Any = load_experiment("llama31_8b_sft", ["num_steps=7"], device=named("h100:8"))
    assert not isinstance(full.model.block.attention, LoRA.Config) and full.num_steps == 7
    placed = load_placed("qwen3_8b_rl", (), None, (), "trainer=h100:4,workers=4 x h100:1").cfg
    assert placed.trainer.mesh == {"fsdp": 4} and placed.engine.max_num_seqs == 64 and placed.workers == 4
    together: Any = load_placed("qwen3_8b_rl", (), None, (), "trainer=v5e:2x4,workers=trainer").cfg
    assert together.engine.mesh == {"tensor": 8} and together.trainer.packing.rows == 4


def test_an_experiment_without_a_rule_for_its_devices_has_one_computed_from_its_edited_batch():
    spread: Any = load_experiment("llama31_8b", device=named("v6e:16x16"))
    assert spread.mesh == {"data": 2, "fsdp": 64, "tensor": 2} and spread.compiler_options
    larger: Any = load_experiment("llama31_8b", ["input.batch_size=256"], device=named("v6e:16x16"))
    assert larger.mesh == {"data": 4, "fsdp": 64} and larger.input.batch_size == 256
    as_before: Any = load_experiment("llama31_8b", device=named("v6e:4x4"))
    assert as_before.mesh == {"fsdp": -1}
    with pytest.raises(UserError, match=r"no mesh rule for 'tpu-v5e-8'.*full needs parameters 4.0.*What would: lora"):
        load_experiment("llama31_8b", device=named("v5e:2x4"))
    lora: Any = load_experiment("llama31_8b", device=named("v5e:2x4"), applied=["low_rank"])
    assert lora.mesh == {"fsdp": 8} and isinstance(lora.model.block.attention, LoRA.Config)


def test_chips_that_no_mesh_uses_are_refused_with_a_mesh_unless_they_may_idle():
    fleet = "trainer=v5e:2x2,workers=v5e:2x4"
    with pytest.raises(
        UserError, match=r"engine.mesh=\{\} uses 1 of the 8 devices.*4 times as many workers of 2 devices"
    ):
        load_placed("qwen25_1_5b_rl", (), None, (), fleet)
    assert load_placed("qwen25_1_5b_rl", ["fleet.allow_idle=True"], None, (), fleet).cfg.fleet.allow_idle
    with pytest.raises(UserError, match=r"expected engine.mesh=\{'tensor': 2\}, or --allow-idle"):
        load_placed("qwen25_1_5b_rl", (), None, (), "trainer=v5e:2x2,workers=2 x h100:2")
    assert load_placed("qwen25_1_5b_rl", ["engine.mesh={'tensor': 2}"], None, (), "trainer=v5e:2x2,workers=2 x h100:2")


def test_an_unknown_name_is_refused_with_the_nearest_recipe():
    with pytest.raises(UserError, match="llama31_8b_sft"):
        registry.check_name("lama31_8b_sft")
