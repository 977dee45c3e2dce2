"""The plan of a submission."""

import pytest

from axlearn_like.config import ConfigBase
from experiments import registry
from mesh import UserError
from rl.experiment import RLExperiment
from tools.launch.launch import Launch
from tools.launch.plan import plan_launch


def test_a_tpu_whose_machines_have_no_names_here_is_refused():
    cfg = Launch.Config(experiment="demo_sft", devices="v9x[memory=64]:2x2")
    with pytest.raises(UserError, match="expected a TPU whose machines are known here: v4, v5e, v5p, v6e, tpu7x"):
        plan_launch(cfg)


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
