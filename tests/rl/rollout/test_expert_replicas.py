"""Replicas of popular experts in an engine: the bits of one device, busiest devices relieved, a new plan by version."""

from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.layers.moe.experts import BiasedExperts, Experts
from axlearn_like.layers.moe.layer import MoE
from axlearn_like.layers.moe.router import SoftmaxRouter
from axlearn_like.layers.moe.routing import RoutingLayout
from axlearn_like.layers.wrappers.quantised import StoredWeights
from mesh import UserError
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.expert_slots import ExpertSlots
from rl.rollout.request import Request
from tests.elsewhere import elsewhere
from tests.rl.tiny import make_prompt, tiny_params, tiny_policy

pytestmark = pytest.mark.numerics

EXPERTS, TOP_K = 8, 3
MIXTURE = MoE.Config(
    num_experts=EXPERTS,
    router=SoftmaxRouter.Config(top_k=TOP_K),
    experts=Experts.Config(hidden=8),
    record_routing=True,
)
FOUR_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


def config(mesh: dict[str, int], mixture: MoE.Config = MIXTURE, **changes: Any) -> RolloutEngine.Config:
    policy = tiny_policy(num_layers=2)
    policy.block = policy.block.clone(feed_forward=mixture)
    cfg = RolloutEngine.Config(model=policy, stop_tokens=(), max_prompt_tokens=16, max_new_tokens=12, mesh=mesh)
    return cfg.set(max_num_seqs=8, page_size=8, steps_per_dispatch=4, **changes)


def skewed(params: Any, expert: int) -> Any:
    """Parameters whose routers prefer an expert."""

    def one(path: Any, leaf: Any) -> Any:
        if "router" not in jax.tree_util.keystr(path):
            return leaf
        return np.asarray(leaf) * np.where(np.arange(EXPERTS) == expert, 4, 1)

    return jax.tree_util.tree_map_with_path(one, params)


def drawn(mesh: dict[str, int], slots: int = 0) -> dict[str, Any]:
    """Rollouts of three versions, the figures of each, and the slots of the first expert in each plan."""
    engine = config(mesh, replicas=ExpertSlots.Config(slots=slots) if slots else None).build()
    model: Any = engine.cfg.model
    params = tiny_params(model)
    rollouts, figures, replicas, programs = [], [], [], []
    for version, expert in enumerate((0, 0, 5)):
        engine.set_weights(skewed(params, expert), version)
        found = engine.generate([Request(make_prompt(i, 3 + 2 * i), samples=2, seed=version) for i in range(4)])
        rollouts.append([[r.tokens.tolist(), r.logprobs.tolist()] for r in found])
        stats = engine.stats()
        figures.append([stats.get("busiest_to_mean"), stats.get("busiest_to_mean_without")])
        programs.append(stats["compilations"])
        if (held := engine.runner.expert_slots) is not None:
            replicas.append(held.plan.replicas(EXPERTS).tolist())
    return {"rollouts": rollouts, "figures": figures, "replicas": replicas, "programs": programs}


@pytest.mark.full  # tests/axlearn_like/layers/moe/test_slots.py has the same bits in every run
def test_replicas_relieve_the_busiest_device_and_change_no_bit():
    """The first version has a plan of equal loads, the second that of what the first has drawn."""
    alone = drawn({})
    spread = elsewhere(drawn, {"expert": 4}, 1, environ=FOUR_DEVICES)
    assert spread["rollouts"] == alone["rollouts"] and alone["figures"][0] == [None, None]
    (first, _), (second, without), _ = spread["figures"]
    assert second < first and second < without
    assert spread["programs"][0] == spread["programs"][-1], "another plan compiles nothing"
    equal, of_first, of_second = spread["replicas"]
    assert equal != of_first != of_second, "plans follow from what was drawn before"


def test_counts_are_of_experts_by_layer():
    layout = RoutingLayout((0, 2), 3, 4, 2, True)
    mesh = jax.sharding.AbstractMesh((2,), ("expert",))
    slots: Any = ExpertSlots.Config().build(layout=layout, mesh=mesh)
    assert slots.figures() == {} and slots.slots == 6
    slots.count(np.array([[[0, 1], [2, 3]], [[0, 3], [2, 1]]], np.uint8))
    slots.count(np.array([[[0, 2], [2, 3]]], np.uint8))
    plan = slots._next_plan()
    assert plan.replicas(4).tolist()[0][0] == 2 and plan.replicas(4).tolist()[1][2] == 2
    # By layer: 0 three times, 1, 2 and 3 once; 2 three times, 3 twice, 1 once.
    assert slots.figures()["busiest_to_mean_without"] == round(5 / 3, 4)


REFUSED = (
    ({"mixture": MIXTURE.clone(record_routing=False)}, "slots: expected a policy whose mixtures"),
    ({"mesh": {}}, "slots: expected an engine.mesh with an axis expert"),
    ({"weights": StoredWeights.Config()}, "replicas: expected None with weights in another form"),
    ({"mixture": MIXTURE.clone(experts=BiasedExperts.Config(hidden=8))}, "expected plain Experts"),
)


def refusals() -> list[str]:
    found: list[str] = []
    for changes, _ in REFUSED:
        cfg = config(**{"mesh": {"expert": 4}, "replicas": ExpertSlots.Config(), **changes})
        try:
            cfg.build()
        except UserError as error:
            found.append(str(error))
    return found


def test_what_has_no_replicas_is_refused():
    for said, (_, expected) in zip(elsewhere(refusals, environ=FOUR_DEVICES), REFUSED, strict=True):
        assert expected in said
