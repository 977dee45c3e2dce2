"""Bytes by arithmetic beside the compiler's plans."""

import functools
from typing import Any

import pytest

from axlearn_like.config import with_mesh_rules
from experiments.recipes.sizes import TrainingWay, attended_tokens, model_sizes, training_bytes
from experiments.registry import get
from mesh.topology import parse_topology
from tests.golden.rules import device_name_of, stored

get_once = functools.cache(get)


def compiled_way(name: str) -> tuple[Any, TrainingWay, int]:
    """The model of a stored plan of the compiler, how it is trained there, and its peak."""
    found = stored()[name]
    cfg: Any = with_mesh_rules(get_once(name.rpartition(".")[0]), device_name_of(parse_topology(found["topology"])))
    rl, mesh = hasattr(cfg, "policy"), found["mesh"]
    tensor = mesh.get("tensor", 1)
    groups = found["devices"] // tensor
    rows = found["rows"] // groups // found["microbatches"]
    policy = cfg.policy if rl else cfg.model
    sizes = model_sizes(policy)
    others = {"attention_out": sizes.dim, "gate": sizes.hidden, "up": sizes.hidden}
    way = TrainingWay(
        job="rl" if rl else "sft",
        method="bfloat16 moments" if cfg.learner.state_storage else "full",
        shards=mesh.get("fsdp", 1) * tensor * mesh.get("expert", 1),
        tensor=tensor,
        sequence=1,
        tokens=rows * found["length"],
        attended=rows * (attended_tokens(found["length"]) if rl else found["length"]),
        keeps="context" in found["remat"],
        others=sum(numbers for name, numbers in others.items() if name in found["remat"]),
        accumulated=found["microbatches"] > 1,
    )
    return policy, way, found["peak"]


@pytest.mark.parametrize("name", stored())
def test_what_is_computed_is_the_peak_that_the_compiler_plans_or_somewhat_more(name: str):
    model, way, peak = compiled_way(name)
    held = training_bytes(model_sizes(model), way)
    if way.job == "rl":  # moments are no argument of the gradient's program; the plan adds them
        held["moments"] = 0
    assert 0.97 * peak <= sum(held.values()) <= 1.32 * peak, (sum(held.values()) / peak, held)
