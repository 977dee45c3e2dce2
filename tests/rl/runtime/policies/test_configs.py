"""Policies of one experiment: what their edits make of its config, and what is refused, by policy and field."""

from collections.abc import Callable
from typing import Any

import pytest

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.pretrained import Pretrained
from axlearn_like.config import ConfigError, from_text, get_path, reach, replace, set_path, to_text
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.layers.wrappers.lora import LoRA
from mesh import UserError
from rl.experiment import RLExperiment
from rl.objective import presets
from rl.runtime.policies.configs import MOST_POLICIES, check_policies, policy_configs, slots_of
from tests.rl.runtime.policies.tiny_policies import tiny_policies, tiny_wholes
from tests.rl.tiny import tiny_experiment, tiny_tasks

TWO: dict[str, dict[str, Any]] = {"b": {"learner.schedule.lr": "3e-4", "num_steps": 2}, "a": {"seed": 1}}


def test_each_policy_is_the_experiment_with_its_edits():
    cfg = tiny_policies(TWO)
    found = policy_configs(cfg)
    assert list(found) == ["a", "b"]  # names in order, as the text of a config knows no other
    alone = cfg.clone(policies={})
    assert to_text(found["a"]) == to_text(alone.clone(seed=1))
    assert (get_path(found["b"], "learner.schedule.lr"), found["b"].num_steps) == (3e-4, 2)
    assert policy_configs(alone) == {}
    assert cfg == tiny_policies(TWO)  # unchanged


def test_edits_may_be_whole_configs_and_survive_the_text_of_the_experiment():
    objective = presets.dapo()
    cfg = tiny_policies({"d": {"objective": objective}, "t=1": {"tasks": tiny_tasks(seed=1)}}, policy_shares={"d": 2})
    again = from_text(to_text(cfg))
    assert again == cfg and isinstance(again, RLExperiment.Config)
    for name, own in policy_configs(again).items():
        assert to_text(own) == to_text(policy_configs(cfg)[name])
    assert policy_configs(cfg)["d"].objective == objective
    assert policy_configs(cfg)["d"].objective is not objective
    policy_configs(cfg)["d"].objective.set(old_policy="current")
    assert policy_configs(cfg)["d"].objective == objective  # values of its own


def test_policies_that_fit_are_checked_each_as_a_run_of_its_own():
    edits = {"small": {"policy.block.attention.rank": 2}, "attention": {}, "hot": {"sampler.temperature": 0.7}}
    cfg = tiny_policies(edits)
    plain = plain_config(get_path(cfg, "policy.block.feed_forward"))
    cfg.policies["attention"] = {"policy.block.feed_forward": plain}
    assert list(check_policies(cfg, "inprocess")) == ["attention", "hot", "small"]
    cfg.policies["hot"] = {"prompts_per_step": 5}
    with pytest.raises(UserError, match=r"groups_per_lease: expected a divisor of prompts_per_step=5"):
        check_policies(cfg, "inprocess")


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"engine.max_num_seqs": 4}, r"policies\['x'\].engine.max_num_seqs: all policies share 'engine'; expected an"),
        ({"max_new_tokens": 4}, r"policies\['x'\].max_new_tokens: all policies share 'max_new_tokens'"),
        ({"policies": {}}, r"policies\['x'\].policies: all policies share"),
        ({"sed": 1}, r"policies\['x'\] has no field 'sed'; did you mean 'seed'"),
        ({"learner.schedule.rate": 1}, r"policies\['x'\].learner.schedule has no field 'rate'"),
        ({"learner.schedule.lr": "fast"}, r"policies\['x'\].learner.schedule.lr.*float"),
        ({"num_steps": -1}, r"policies\['x'\].num_steps: expected 1 or more, got -1"),
        ({"controller.weights": "in_flight"}, r"policies\['x'\].controller.weights: expected 'pinned' or 'newest'"),
        (
            {"policy.dim": 32},
            r"policies\['x'\].policy.dim: expected 16, as in the base that .*, got 32",
        ),
        ({"policy.block.attention.rank": 8}, r"policies\['x'\].policy: rank 8 of .*; expected 4 or less"),
        ({"learner.groups": ()}, r"policies\['x'\].learner.groups: .* is trained, which all policies share"),
        ({"trainer.processes": 2}, r"policies\['x'\].trainer.processes: expected 1"),
    ],
)
def test_what_cannot_be_is_named_by_policy_and_field(edits: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        check_policies(tiny_policies({"fine": {}, "x": edits}), "inprocess")


def test_matrices_beyond_those_of_the_experiment_are_refused():
    cfg = tiny_policies({"fine": {}, "x": {}})
    wrapped = get_path(cfg, "policy.block.feed_forward")
    set_path(cfg, "policy.block.feed_forward", plain_config(wrapped))
    cfg.policies["x"] = {"policy.block.feed_forward": wrapped}
    with pytest.raises(ConfigError, match=r"policies\['x'\].policy: it adapts layers/feed_forward/\w+, which the exp"):
        check_policies(cfg, "inprocess")


def test_policies_without_adapters_are_whole_models_of_one_shape():
    edits = {"follows": {"controller.weights": "in_flight"}, "other": {"start_from": StartFrom.Config(path="there")}}
    found = check_policies(tiny_experiment(policies=edits), "inprocess")
    assert found["other"].start_from is not None and found["follows"].start_from is None
    plain: Any = tiny_experiment().policy
    there, elsewhere = (Pretrained.of(plain, StartFrom.Config(path=path)) for path in ("there", "elsewhere"))
    check_policies(tiny_experiment(policies={"a": {}, "b": {"policy": elsewhere}}).set(policy=there), "inprocess")
    wide = tiny_experiment(policies={"a": {}, "wide": {"policy.dim": 32}})
    with pytest.raises(
        ConfigError, match=r"policies\['wide'\].engine.model.dim: expected 16, as in the engine that all"
    ):
        check_policies(wide, "inprocess")


def test_adapters_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="start_from: all policies share 'start_from'"):
        check_policies(tiny_policies({"a": {"start_from": StartFrom.Config(path="there")}}), "inprocess")
    cfg = tiny_policies({"a": {}})
    replace(cfg, LoRA.Config, lambda lora: lora.set(magnitudes=True))
    with pytest.raises(ConfigError, match="DoRA"):
        check_policies(cfg, "inprocess")


@pytest.mark.parametrize("name", ["A", "a/b", "..", "", "-a", "a b", "a,b", "a" * 101])
def test_names_that_are_no_folders_are_refused(name: str):
    with pytest.raises(ConfigError, match="expected a name of a-z, 0-9"):
        policy_configs(tiny_policies({name: {}}))


def test_names_and_numbers_of_policies_and_shares():
    assert len(policy_configs(tiny_policies({f"lr=1e-4+seed={n}": {} for n in range(MOST_POLICIES)}))) == MOST_POLICIES
    with pytest.raises(ConfigError, match="policies: there are 257; expected 256 or fewer"):
        policy_configs(tiny_policies({f"p{n}": {} for n in range(MOST_POLICIES + 1)}))
    with pytest.raises(ConfigError, match=r"policy_shares\['math'\]: there is no such policy; did you mean 'maths'"):
        policy_configs(tiny_policies({"maths": {}}, policy_shares={"math": 1.0}))
    for share in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"policy_shares\['a'\]: expected a finite number above 0"):
            policy_configs(tiny_policies({"a": {}}, policy_shares={"a": share}))


@pytest.mark.parametrize(
    ("quotas", "message"),
    [
        ({"math": {}}, r"policy_quotas\['math'\]: there is no such policy; did you mean 'maths'"),
        (
            {"maths": {"tokens_a_second": 1.0}},
            r"policy_quotas\['maths'\]: there is no quota 'tokens_a_second'; did you mean",
        ),
        (
            {"maths": {"tokens_per_second": 0.0}},
            r"policy_quotas\['maths'\].tokens_per_second: expected a finite number",
        ),
    ],
)
def test_quotas_that_cannot_be_are_named(quotas: dict[str, dict[str, float]], message: str):
    with pytest.raises(ConfigError, match=message):
        policy_configs(tiny_policies({"maths": {}}, policy_quotas=quotas))


@pytest.mark.parametrize("make", [tiny_experiment, tiny_policies], ids=["whole", "adapters"])
def test_roles_of_several_processes_and_a_reference_apart_are_refused(make: Callable[..., RLExperiment.Config]):
    for field, value in (("trainer.processes", 2), ("fleet.reference", "cpu:1"), ("fleet.workers", "2x2xv5p:2x2x2")):
        cfg = make(policies={"a": {}})
        set_path(cfg, field, value)
        with pytest.raises(ConfigError, match=f"{field.split('.')[1]}: .*with several policies"):
            check_policies(cfg, "inprocess")


def test_a_warm_start_is_refused():
    cfg = tiny_policies(TWO)
    with pytest.raises(ConfigError, match="warm_start"):
        from experiments.demo.config import demo

        check_policies(cfg.set(warm_start=demo(seed=0).warm_start), "inprocess")


def test_what_an_edit_reaches_outside_of_the_run_is_known_before_it_is_built():
    cfg = tiny_policies({"x": {"start_from.path": "gs://bucket/run"}}, start_from=StartFrom.Config(path="here"))
    assert reach(cfg)["gs://bucket/run"] == "policies"


def test_room_for_policies_that_join_is_of_adapters_and_has_a_limit():
    assert slots_of(tiny_policies({"a": {}, "b": {}})) == 2
    assert slots_of(tiny_policies({"a": {}}, policy_slots=4)) == 4
    for slots in (0, 257):
        with pytest.raises(ConfigError, match=r"policy_slots: expected 1 to 256, or None"):
            policy_configs(tiny_policies({"a": {}}, policy_slots=slots))
    with pytest.raises(ConfigError, match=r"policy_slots: expected None with whole models"):
        check_policies(tiny_wholes({"a": {}}, policy_slots=4), "inprocess")
