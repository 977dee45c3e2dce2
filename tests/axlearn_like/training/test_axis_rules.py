"""Axis rules of a trainer's config change where arrays lie (that no number changes: ../test_sharding.py)."""

from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

from axlearn_like.config import ConfigError, from_text, get_path, to_text, with_mesh_rules
from mesh import make_mesh
from tests.axlearn_like.tiny import tiny_trainer

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
RULES = {"embed": ("data", "fsdp"), "hidden": None}


def test_a_changed_rule_changes_the_sharding():
    mesh = make_mesh(MESH, jax.devices()[:1] * 8)  # nothing is put on it

    def specs(**changes: Any) -> list[PartitionSpec]:
        cfg = tiny_trainer(1, mesh=MESH, **changes)
        block = cfg.program(mesh).state["params"]["layers"]
        leaves = block["feed_forward"]["down_fd"], block["attention"]["k_dkh"]
        return [leaf.sharding.spec for leaf in leaves]

    assert specs() == [PartitionSpec(None, "tensor", "fsdp"), PartitionSpec(None, "fsdp", "tensor", None)]
    data = ("data", "fsdp")
    assert specs(axis_rules=RULES) == [PartitionSpec(None, None, data), PartitionSpec(None, data, "tensor", None)]


def test_mesh_rules_change_axis_rules():
    cfg = tiny_trainer(1, mesh_rules=(("tpu-v5p-.*", {"axis_rules": RULES}), (".*", {})))
    assert get_path(with_mesh_rules(cfg, "tpu-v5p-8"), "axis_rules") == RULES
    assert with_mesh_rules(cfg, "cpu-1").axis_rules == {}
    assert from_text(to_text(tiny_trainer(1, axis_rules=RULES))) == tiny_trainer(1, axis_rules=RULES)


def test_an_unknown_axis_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"^Trainer.axis_rules: axis_rules.embed: the mesh has no axis 'dat'; did you mean 'data'"
    ):
        tiny_trainer(1, axis_rules={"embed": "dat"}).build()
