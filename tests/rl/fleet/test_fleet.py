"""An experiment on its fleet: rules match the devices of each role, sizes follow from the hosts."""

from typing import Any

import pytest

from axlearn_like.config import to_text
from mesh import UserError
from rl.fleet.fleet import Fleet, place
from tests.rl.tiny import tiny_experiment

RULES = (
    ("tpu-v5p-64", {"trainer.mesh": {"fsdp": 64}, "trainer.row_multiple": 64}),
    (".*", {"trainer.mesh": {"fsdp": -1}}),
)
ENGINE_RULES = (("tpu-v5e-.*", {"mesh": {"tensor": 2}}), (".*", {}))


def experiment(**fleet: Any):
    cfg = tiny_experiment(mesh_rules=RULES, fleet=Fleet.Config(**fleet))
    cfg.engine.mesh_rules = ENGINE_RULES
    return cfg


def test_each_role_gets_the_rule_of_its_own_devices():
    placed = place(experiment(trainer="v5p:4x4x4", workers="8 x v5e:1x1")).cfg
    assert (placed.trainer.mesh, placed.trainer.row_multiple) == ({"fsdp": 64}, 64)
    assert placed.engine.mesh == {"tensor": 2}
    other = place(experiment(trainer="v5e:2x2", workers="v5p:2x2x1")).cfg
    assert other.trainer.mesh == {"fsdp": -1} and other.engine.mesh == {}


def test_processes_workers_and_the_servers_address_follow_from_the_hosts():
    placed = place(experiment(trainer="2 x v5p:2x2x4", workers="24 x v6e:2x2")).cfg
    assert (placed.trainer.processes, placed.workers) == (8, 24)
    assert placed.parameter_server.host == "0.0.0.0"
    assert place(experiment(trainer="h100:4", workers="5 x h100:1")).cfg.parameter_server.host == "0.0.0.0"
    assert (
        place(experiment(trainer="h100:4", workers="4 x h100:1")).cfg.parameter_server.host == "127.0.0.1"
    )  # one machine
    assert place(experiment(trainer="v5p:2x2x1", workers="v5p:2x2x1")).cfg.parameter_server.host == "0.0.0.0"
    one = place(experiment(trainer="h100:8", workers="here")).cfg
    assert (one.trainer.processes, one.workers) == (1, 2)


def test_on_this_machine_nothing_changes_but_by_rules():
    cfg = tiny_experiment()
    assert to_text(place(cfg).cfg) == to_text(cfg)


def test_a_text_changes_the_roles_that_it_names():
    fleet = Fleet.Config(trainer="v5p:4x4x4")
    assert fleet.edited("workers=64xv5p:2x2x1") == Fleet.Config(trainer="v5p:4x4x4", workers="64xv5p:2x2x1")
    both = fleet.edited("trainer=h100:8, workers=2 x h100:4")
    assert both == Fleet.Config(trainer="h100:8", workers="2 x h100:4")
    with pytest.raises(UserError, match=r"--fleet 'worker=cpu:1': expected .*did you mean 'workers'"):
        fleet.edited("worker=cpu:1")
    with pytest.raises(UserError, match=r"--fleet 'h100:8': expected trainer=DEVICES, workers=N x DEVICES, refer"):
        fleet.edited("h100:8")


def test_verifiers_have_cpus_and_a_reference_devices_of_its_own():
    named = Fleet.Config().edited("trainer=v5p:8x8x8,workers=64xv5p:2x2x2,verifiers=cpu")
    assert named == Fleet.Config(trainer="v5p:8x8x8", workers="64xv5p:2x2x2")
    for devices in ("h100:1", "cpu:4", ""):
        with pytest.raises(UserError, match=rf"'verifiers={devices}': .* expected verifiers=cpu, verifier.processes"):
            named.edited(f"verifiers={devices}")
    edited = named.edited("reference=2 x v5p:2x2x1")
    found = edited.build().reference
    assert found is not None and edited.reference_hosts == found.hosts == 2 and named.reference_hosts == 0
    assert (Fleet.Config(reference="here").reference_hosts, Fleet.Config(reference="cpu:4").here) == (1, True)
    with pytest.raises(UserError, match=r"fleet\.reference='h10:1'.*h100"):
        named.edited("reference=h10:1").build()


def test_a_worker_may_share_the_trainers_devices():
    placed = place(experiment(trainer="v6e:1x1", workers="trainer"))
    assert placed.fleet.together and placed.fleet.worker is placed.fleet.trainer
    assert placed.cfg.workers == 1 and placed.cfg.parameter_server.host == "127.0.0.1"
    assert Fleet.Config(workers="trainer").here and not Fleet.Config(trainer="v6e:1x1", workers="trainer").here
    with pytest.raises(UserError, match=r"fleet.workers='trainer': expected a trainer on one host.* v6e:4x4 has 4"):
        place(experiment(trainer="v6e:4x4", workers="trainer"))
