"""Rules that travel with a config: which applies, in what order with other edits, and how they are written down."""

import pytest

from axlearn_like.config import ConfigError, from_text, get_path, has_mesh_rules, to_text, with_mesh_rules
from tests.axlearn_like.tiny import tiny_trainer
from tools.experiment import load_experiment

RULES = (
    ("tpu-v5p-.*", {"mesh": {"fsdp": -1}, "microbatches": 2}),
    ("tpu-.*", {"learner.clip_norm": 0.5}),
    (".*", {}),
)


def ruled():
    """An experiment, to be found by name."""
    return tiny_trainer(3, mesh_rules=RULES)


def unruled():
    return tiny_trainer(3)


def test_the_first_rule_that_fits_counts_and_the_original_stays():
    cfg = ruled()
    changed = with_mesh_rules(cfg, "tpu-v5p-256")
    assert (changed.mesh, changed.microbatches, changed.learner.clip_norm) == ({"fsdp": -1}, 2, cfg.learner.clip_norm)
    assert with_mesh_rules(cfg, "tpu-v6e-8").learner.clip_norm == 0.5
    assert with_mesh_rules(cfg, "cpu-1") == cfg and cfg.microbatches == 1


def test_rules_survive_being_written_down():
    assert from_text(to_text(ruled())) == ruled()


def test_devices_are_asked_for_only_where_there_are_rules_and_edits_come_last():
    name = f"{__name__}:ruled"
    edited = load_experiment(name, ["microbatches=4"], device=lambda: "tpu-v5p-8")
    assert get_path(edited, "microbatches") == 4
    assert get_path(load_experiment(name, device=lambda: "tpu-v5p-8"), "microbatches") == 2
    assert not has_mesh_rules(tiny_trainer(3))
    load_experiment(f"{__name__}:unruled", device=lambda: pytest.fail("asked"))


def test_no_rule_for_a_device_names_the_rules():
    cfg = tiny_trainer(3, mesh_rules=RULES[:1])
    with pytest.raises(ConfigError, match=r"no mesh rule for 'gpu-8'; its rules: 'tpu-v5p-\.\*'"):
        with_mesh_rules(cfg, "gpu-8")
