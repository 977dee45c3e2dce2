"""An experiment that is accepted runs as it is; one that cannot work is refused before anything starts."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import ConfigError, set_path
from axlearn_like.kernels.attention.context_parallel.ring import Ring
from axlearn_like.training.alignment.reference import FrozenCopy
from experiments.text_to_sql.verifier import SqlVerifier
from mesh import UserError
from mesh.mesh import PlaceholderDevice
from rl.experiment import RLExperiment
from rl.objective import PRESETS, Objective, SuccessNormalisedAdvantage, TurnAdvantage
from rl.objective.presets import dapo, dr_grpo, grpo, maxrl, reinforce
from rl.rollout.agent_loops.demonstrations import GroupDemonstrations
from rl.training.packing import Packing
from rl.training.updates import Updates
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import Scorer
from rl.verification.verifiers.by_task import ByTask
from rl.verification.verifiers.reward import Reward
from rl.verification.verifiers.terms import Format, Length, Verified
from tests.rl.tiny import tiny_experiment, tiny_tasks
from tests.rl.training.test_trainer import Roles, host

REQUIRED: dict[str, Any] = dict.fromkeys(
    ("dr_grpo", "luffy"), {"max_length": 6}
)  # max_new_tokens of the tiny experiment


def two_updates(path: Path, objective: Objective.Config) -> Roles:
    given = GroupDemonstrations.Config() if objective.build().mixes else None
    roles = Roles.make(path, tiny_experiment(evaluation=None, objective=objective, demonstrations=given))
    roles.experiment.cfg.check("inprocess")
    for rewards in ([1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]):
        roles.submit(rewards, lengths=[4, 6, 2, 5])
        assert roles.trainer.run_once()
        roles.trainer.settle()
    return roles


@pytest.mark.numerics
@pytest.mark.full
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_updates_as_it_is_returned(tmp_path: Path, name: str):
    roles = two_updates(tmp_path / "r", PRESETS[name](**REQUIRED.get(name, {})))
    first, second = roles.rows()
    for row in (first, second):
        assert row["updates"] == 1 and row["update_norm"] > 0
        assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))
    if name != "scale_rl":  # whose ratio is to the made-up behaviour policy
        assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-6) and first["kl_old_new"] == 0


@pytest.mark.full
def test_recompute_with_one_update_is_current_to_the_bit(tmp_path: Path):
    one = two_updates(tmp_path / "a", grpo().set(old_policy="recompute"))
    other = two_updates(tmp_path / "b", grpo().set(old_policy="current"))
    assert host(one.trainer.state) == host(other.trainer.state) and one.rows() == other.rows()


# ---- refusals


def refused(cfg: RLExperiment.Config, path: str, *words: str, devices: Any = None) -> None:
    with pytest.raises(UserError) as raised:
        cfg.check("inprocess", devices=devices)
    assert isinstance(raised.value, ConfigError) and raised.value.path == f"RLExperiment.{path}"
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("preset", [grpo, dapo], ids=lambda preset: preset.__name__)
def test_a_comparison_within_groups_of_one_is_refused(preset: Callable[[], Objective.Config]):
    cfg = tiny_experiment(evaluation=None, samples_per_prompt=1, objective=preset())
    refused(cfg, "samples_per_prompt", "expected 2 or more", "GroupAdvantage", "BatchAdvantage", "got 1")
    tiny_experiment(evaluation=None, samples_per_prompt=1, objective=reinforce()).check("inprocess")


def test_lengths_of_the_objective_must_be_those_of_the_experiment():
    short = tiny_experiment(objective=dr_grpo(max_length=5))
    refused(short, "objective.aggregation.max_length", "max_new_tokens=6 or more", "got 5")
    tiny_experiment(objective=dr_grpo(max_length=6)).check("inprocess")
    never = tiny_experiment(objective=dapo(max_length=10, buffer=4))
    refused(
        never,
        "objective.reward_shaping.max_length",
        "less than buffer + max_new_tokens=10",
        "would never act",
        "got 10",
    )
    tiny_experiment(objective=dapo(max_length=6, buffer=4)).check("inprocess")


NEGATIVE = ("penalty", "terms.1.weight", "scorers.chain_sum.penalty", "terms.0.verifier.penalty")


def scorers(path: str, tasks: Any) -> tuple[Scorer.Config, Scorer.Config]:
    """Scorers that differ in the field at `path`, by which only the first one's rewards may be negative."""
    sql = [SqlVerifier.Config(mixture=tasks, penalty=penalty) for penalty in (0.5, 0.0)]
    if path == "penalty":
        return sql[0], sql[1]
    if path.startswith("scorers"):
        costly, free = (ByTask.Config(mixture=tasks, scorers={"chain_sum": one}, other=sql[1]) for one in sql)
        return costly, free
    first = [Format.Config(pattern="a"), *(Verified.Config(verifier=one) for one in sql)]
    lengths = [Length.Config(most=6, weight=weight) for weight in (-0.1, 0.1)]
    terms = ((first[0], lengths[0]), (first[0], lengths[1])) if "weight" in path else ((first[1],), (first[2],))
    costly, free = (Reward.Config(mixture=tasks, terms=one) for one in terms)
    return costly, free


@pytest.mark.parametrize("path", NEGATIVE)
def test_maxrl_with_rewards_that_may_be_negative_is_refused(path: str):
    by_turn = TurnAdvantage.Config(advantage=SuccessNormalisedAdvantage.Config())
    negative, positive = scorers(path, tiny_tasks())
    for objective in (maxrl(), maxrl().set(advantage=by_turn)):
        cfg = tiny_experiment(objective=objective, verifier=InlineVerifier.Config(scorer=negative))
        refused(cfg, f"verifier.scorer.{path}", "no reward is below 0", "MaxRL", "GroupAdvantage.Config()")
        cfg.clone(verifier=InlineVerifier.Config(scorer=positive)).check_fields()
        cfg.clone(objective=grpo()).check_fields()


def test_a_reference_term_without_a_reference_is_refused():
    refused(tiny_experiment(objective=grpo(kl_coef=0.1)), "objective.regulariser", "trainer.reference", "FrozenCopy")


def test_what_needs_complete_rows_is_refused_where_devices_share_them():
    cfg, two = tiny_experiment(), [PlaceholderDevice() for _ in range(2)]
    cfg.trainer.mesh = {"sequence": 2}
    cfg.check("inprocess", devices=two)
    cfg.trainer.packing = Packing.Config(tree=True)
    refused(cfg, "trainer.packing.tree", "False on a mesh with a sequence axis")
    cfg.trainer.mesh = {"sequence": -1}  # known from the devices only
    refused(cfg, "trainer.packing.tree", "False on a mesh with a sequence axis", devices=two)
    cfg.trainer.packing = None
    set_path(cfg, "policy.block.attention.context_parallel", Ring.Config())
    with pytest.raises(ConfigError, match=r"^policy\.block\.attention\.context_parallel: expected AllGather\.Config"):
        cfg.check("inprocess", devices=two)


@pytest.mark.parametrize(
    ("mesh", "expected"), [({"tensor": 3}, "tensor of 1, 2, 4 or 8"), ({"expert": 2}, "no axis expert")]
)
def test_axes_without_an_order_of_sums_are_refused_with_exact_numerics_on_tpus(mesh: dict[str, int], expected: str):
    cfg = tiny_experiment()
    cfg.policy.numerics = "exact"
    cfg.trainer.mesh = mesh
    sizes = cfg.trainer.clone(model=cfg.policy)
    tpus = [PlaceholderDevice("tpu", "TPU v5p") for _ in range(math.prod(mesh.values()))]
    with pytest.raises(ConfigError, match=rf"mesh: expected {expected}.* with policy.numerics"):
        sizes.check_sizes(tpus)


def test_rows_that_do_not_divide_into_the_microbatches_of_a_pipeline_are_refused():
    cfg = tiny_experiment()
    cfg.trainer.mesh = {"pipeline": 2}
    refused(cfg, "trainer.row_multiple", "1 x the pipeline's 8 microbatches", "= 8, got 4", devices=jax.devices() * 2)


def test_policies_that_terms_compare_with_must_be_there_and_be_read():
    unread = tiny_experiment()
    unread.trainer.reference = FrozenCopy.Config()
    refused(unread, "trainer.reference", "no term of the objective compares with a reference")
    moved = tiny_experiment()  # with old_policy="current"
    moved.trainer.updates = Updates.Config(epochs=2)
    refused(moved, "objective.old_policy", "'recompute' or 'behaviour'", "trainer.updates", "got 'current'")
    moved.objective.old_policy = "behaviour"
    moved.check("inprocess")
    moved.trainer.updates = Updates.Config(minibatches=5)
    refused(moved, "trainer.updates.minibatches", "at most prompts_per_step=4", "got 5")
    with pytest.raises(ConfigError, match="stop_kl: expected None with one update"):
        Updates.Config(stop_kl=0.1).build(seed=0)
