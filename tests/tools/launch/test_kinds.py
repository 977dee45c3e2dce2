"""A kind of TPU that nobody here has heard of: planned, placed and asked for by what the config says of it."""

import pytest

from axlearn_like.config import ConfigBase
from experiments import registry
from mesh import UserError
from rl.experiment import RLExperiment
from rl.fleet.fleet import Fleet
from tools.launch.kubernetes.jobset import jobsets
from tools.launch.launch import Kubernetes, Launch
from tools.launch.plan import LaunchPlan, Role, plan_launch
from tools.launch.queued.request import only_role

KIND: dict[str, str | int | float | bool] = {
    "memory": 64,
    "devices": 2,
    "label": "tpu-v9x-slice",
    "machine": "ct9x-standard-{chips}t",
    "placement": True,
}


def test_a_run_on_it_is_planned_and_its_machines_are_asked_for():
    cfg = Launch.Config(
        experiment="demo",
        sets=("trainer.mesh={'data': 16}", "trainer.row_multiple=16", "prompts_per_step=16", "fleet.allow_idle=True"),
        devices="v9x:2x2x2",
        workers=2,
        worker_devices="v9x:1x1x1",
        kinds={"v9x": KIND},
        kubernetes=Kubernetes.Config(placement_policies={"v9x:2x2x2": "mine"}),
    )
    plan = plan_launch(cfg)
    assert plan.fleet is not None and not plan.refusals
    fleet = Fleet.Config().edited(plan.fleet).build()  # as the head reads it
    assert (fleet.trainer.name, fleet.trainer.hosts, fleet.worker.name) == ("tpu-v9x-16", 2, "tpu-v9x-2")
    assert fleet.trainer.memory == 32 << 30
    made = {role: all_[0]["spec"]["replicatedJobs"][0] for role, all_ in jobsets(cfg, plan, "").items()}
    found = {role: one["template"]["spec"] for role, one in made.items()}
    selectors = {role: one["template"]["spec"].get("nodeSelector", {}) for role, one in found.items()}
    assert selectors["trainer"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v9x-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x2",
        "node.kubernetes.io/instance-type": "ct9x-standard-4t",
        "cloud.google.com/placement-policy-name": "mine",
    }
    assert selectors["worker"]["node.kubernetes.io/instance-type"] == "ct9x-standard-1t"
    assert found["trainer"]["completions"] == 2
    (container,) = found["worker"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": "1"}
    cfg.kubernetes.placement_policies = {}
    with pytest.raises(UserError, match="placement_policies: expected the name of the workload policy for v9x:2x2x2"):
        plan_launch(cfg)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"devices: --tpu='v9x:2x2': no TPU generation 'v9x' .*another is described"),
        ({"devices": "v9x[memory=64]:2x2"}, "expected v9x:2x2, and launch.kinds describes v9x"),
        ({"kinds": {"v9x": {}}}, "kinds: TPU generation 'v9x': expected memory=NUMBER"),
        ({"kinds": {"v9x": {"memory": 64}}}, "kinds: v9x: expected 'label', the value of the node label"),
        ({"kinds": {"v9x": {**KIND, "lable": "x"}}}, "kinds: v9x: no fact 'lable'; did you mean 'label'"),
        ({"kinds": {"v9x": {**KIND, "machine": 4}}}, "expected machine to be a str, got 4"),
        ({"kinds": {"v9x": {**KIND, "host": 3}}}, r"devices: .*no TPU topology .*4 chips are no machines of 3"),
        ({"kinds": {"v5p": KIND}}, "kinds: TPU generation 'v5p' is in the table"),
    ],
)
def test_what_is_said_of_it_is_checked(changes: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        cfg = Launch.Config(**{"experiment": "demo_sft", "devices": "v9x:2x2", **changes})
        plan_launch(cfg)


def test_the_api_that_gets_no_new_kinds_is_not_asked_for_it():
    cfg = Launch.Config(experiment="x", on="queued-resource", devices="v9x:2x2", storage="gs://b", kinds={"v9x": KIND})
    role = Role("trainer", 1, cfg.terms("trainer"), cfg.slices_of("trainer"))
    plan = LaunchPlan("x", "train", None, (), None, (role,), (), 0.0)
    with pytest.raises(UserError, match="the Cloud TPU API does not sell v9x; there are .* or --on gke"):
        only_role(cfg, plan)


_made: list[str] = []


def counted() -> ConfigBase:
    """The demo, whose function says how often it was called."""
    _made.append("demo")
    return registry.get("demo")


@pytest.mark.parametrize("capacity", ["on-demand", "spot"])
def test_the_experiment_of_a_plan_is_made_once(capacity: str):
    _made.clear()
    cfg = Launch.Config(
        experiment=f"{__name__}:counted", devices="v5e:1x1", workers=1, worker_devices="v5e:1x1", capacity=capacity
    )
    plan = plan_launch(cfg)
    assert _made == ["demo"]
    assert plan.sets == (("timeouts.grace=12",) if capacity == "spot" else ())
    assert isinstance(plan.experiment, RLExperiment.Config)
    assert plan.experiment.timeouts.grace == (12 if capacity == "spot" else 25)
