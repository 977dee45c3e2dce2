"""Files that `axl launch` writes: stored texts, the cluster's schemas, what each role needs to start and restart."""

import copy
import difflib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from axlearn_like.config import from_text, to_text
from tests.golden.launch.manifests import CASES, DIGEST, DIRECTORY, golden_text
from tests.tools.launch.crd import errors, load_schema
from tools.launch.kubernetes.jobset import jobsets
from tools.launch.launch import Launch
from tools.launch.plan import LaunchPlan, plan_launch
from tools.launch.submission import render

Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def plans() -> dict[str, LaunchPlan]:
    return {name: plan_launch(cfg.clone()) for name, cfg in CASES.items()}


@pytest.fixture(scope="module")
def rl(plans: dict[str, LaunchPlan]) -> dict[str, list[Manifest]]:
    return jobsets(CASES["qwen25_0_5b_rl.gke"], plans["qwen25_0_5b_rl.gke"], DIGEST)


@pytest.fixture(scope="module")
def training(plans: dict[str, LaunchPlan]) -> Manifest:
    ((found,),) = jobsets(CASES["llama2_7b.gke"], plans["llama2_7b.gke"], DIGEST).values()
    return found


def job(jobset: Manifest) -> Manifest:
    (one,) = jobset["spec"]["replicatedJobs"]
    return one["template"]["spec"]


def pod(jobset: Manifest) -> Manifest:
    return job(jobset)["template"]["spec"]


def container(jobset: Manifest) -> Manifest:
    (one,) = pod(jobset)["containers"]
    return one


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_what_is_stored(name: str, plans: dict[str, LaunchPlan]):
    now, path = golden_text(CASES[name], plans[name]), DIRECTORY / f"{name}.txt"
    assert path.exists(), f"no {path.name}; `python -m tests.golden.launch.manifests` writes it"
    difference = list(difflib.unified_diff(path.read_text().splitlines(), now.splitlines(), lineterm="", n=0))
    assert not difference, "`python -m tests.golden.launch.manifests`, if this is meant:\n" + "\n".join(difference)


@pytest.mark.parametrize("name", CASES)
def test_a_submission_is_a_config_like_any_other(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AXL_CODE", "tools")  # trusted, as `--code tools` does
    assert to_text(from_text(to_text(CASES[name]))) == to_text(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, cfg in CASES.items() if cfg.on == "gke"])
def test_a_cluster_accepts_the_manifests_and_no_field_is_unknown(
    name: str, plans: dict[str, LaunchPlan], shared_data: Path
):
    schema = load_schema(shared_data / "schemas" / "jobset.x-k8s.io_jobsets.yaml.gz")
    files = render(CASES[name], plans[name], DIGEST)
    found = [one for file, text in files.items() if file.endswith(".yaml") for one in yaml.safe_load_all(text)]
    assert [errors(schema, one) for one in found] == [[]] * sum(role.count for role in plans[name].roles)
    wrong = copy.deepcopy(found[-1])
    pod(wrong)["nodeSelctor"] = pod(wrong).pop("nodeSelector", {})
    wrong["spec"]["failurePolicy"]["rules"][0]["action"] = "Restart"
    first, second = errors(schema, wrong)
    assert "'Restart' is not one of" in first and "'nodeSelctor' was unexpected" in second


def test_slices_of_one_program_are_exclusive_and_restart_together(training: Manifest):
    (one,) = training["spec"]["replicatedJobs"]
    assert (one["replicas"], job(training)["parallelism"], job(training)["completions"]) == (2, 16, 16)
    exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert training["metadata"]["annotations"][exclusive] == "cloud.google.com/gke-nodepool"
    assert training["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert pod(training)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
        "node.kubernetes.io/instance-type": "ct5p-hightpu-4t",
        "cloud.google.com/reservation-name": "mine",
    }
    assert container(training)["resources"]["limits"] == {"google.com/tpu": "4"}
    assert pod(training)["hostNetwork"] is True
    ((csi,),) = ([v["csi"] for v in pod(training)["volumes"] if "csi" in v],)
    assert csi["volumeAttributes"]["bucketName"] == "bucket"


def test_gpus_of_several_machines_have_their_network_and_those_of_one_only_the_driver(plans: dict[str, LaunchPlan]):
    name = "llama2_7b_h100.gke"
    ((mega,),) = jobsets(CASES[name], plans[name], DIGEST).values()
    assert "annotations" not in mega["metadata"], "machines of GPUs are of a pool for many runs"
    (daemon,) = pod(mega)["initContainers"]
    places = {one["name"]: one["hostPath"]["path"] for one in pod(mega)["volumes"] if "hostPath" in one}
    mounted = [*daemon["volumeMounts"], *container(mega)["volumeMounts"]]
    assert set(places) == {one["name"] for one in mounted} - {"runs", "shared-memory"}, "none lacks, none is unused"
    found = job(mega)["template"]["metadata"]["annotations"]
    assert f"devices.gke.io/container.{daemon['name']}" in found and daemon["restartPolicy"] == "Always"
    networks = json.loads(found["networking.gke.io/interfaces"])
    assert [one["network"] for one in networks] == ["default", *(f"vpc{n}" for n in range(1, 9))]
    assert "hostNetwork" not in pod(mega)
    own = CASES[name].clone()
    own.kubernetes.gpu_networks = ("a", "b")
    ((other,),) = jobsets(own, plans[name], DIGEST).values()
    assert '"eth2", "network": "b"' in str(job(other)["template"]["metadata"]["annotations"])
    ultra = jobsets(CASES[f := "qwen25_0_5b_rl_h200.gke"], plans[f], DIGEST)
    (trainer,), worker = ultra["trainer"], ultra["worker"][0]
    values = {one["name"]: one.get("value") for one in container(trainer)["env"]}
    assert values["AXL_NCCL"] == "/usr/local/gib/scripts/set_nccl_env.sh" and "initContainers" not in pod(trainer)
    assert {"/usr/local/gib", "/usr/local/nvidia"} < {one["mountPath"] for one in container(trainer)["volumeMounts"]}
    assert container(worker)["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    values = {one["name"]: one.get("value") for one in container(worker)["env"]}
    assert values["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64" and "AXL_NCCL" not in values
    assert not job(worker)["template"]["metadata"].get("annotations")
    assert pod(worker)["nodeSelector"]["cloud.google.com/gke-accelerator"] == "nvidia-h100-80gb"


def test_exit_status_2_fails_a_run_and_every_other_restarts_it(training: Manifest, rl: dict[str, list[Manifest]]):
    for one in (training, *(jobset for all_ in rl.values() for jobset in all_)):
        (rule,) = one["spec"]["failurePolicy"]["rules"]
        assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
        assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        (failed,) = job(one)["podFailurePolicy"]["rules"]
        assert failed == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
        assert (job(one)["backoffLimit"], pod(one)["restartPolicy"]) == (0, "Never")
        assert one["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_each_worker_is_a_jobset_of_its_own_on_spot_machines(rl: dict[str, list[Manifest]]):
    names = {role: [one["metadata"]["name"] for one in found] for role, found in rl.items()}
    run = "qwen25-0-5b-rl"
    assert names == {
        "head": [f"{run}-head"],
        "trainer": [f"{run}-trainer"],
        "worker": [f"{run}-worker-0", f"{run}-worker-1"],
    }
    assert {one["metadata"]["labels"]["axl/run"] for found in rl.values() for one in found} == {run}
    worker, trainer, head = rl["worker"][0], rl["trainer"][0], rl["head"][0]
    assert pod(worker)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert "cloud.google.com/gke-spot" in {one["key"] for one in pod(worker)["tolerations"]}
    assert pod(worker)["terminationGracePeriodSeconds"] == 15
    assert (pod(worker)["priorityClassName"], pod(trainer).get("priorityClassName")) == ("low", None)
    assert "cloud.google.com/gke-spot" not in pod(trainer)["nodeSelector"]
    assert worker["spec"]["failurePolicy"]["maxRestarts"] > trainer["spec"]["failurePolicy"]["maxRestarts"]
    assert "annotations" not in worker["metadata"]  # many slices of one host may be in a node pool
    assert "nodeSelector" not in pod(head) and "limits" not in container(head)["resources"]


def test_a_reference_role_has_machines_of_its_own_on_the_workers_terms(plans: dict[str, LaunchPlan]):
    name = "qwen25_0_5b_rl_reference.gke"
    cfg, plan = CASES[name].clone(), plans[name]
    assert plan.fleet == "trainer=v6e:2x2,workers=2 x v6e:1x1,reference=v6e:4x4"
    role = plan.roles[-1]
    assert (role.name, role.chips, role.pods, role.capacity.kind, role.mesh) == (
        "reference",
        16,
        4,
        "spot",
        {"fsdp": 16},
    )
    assert list(role.holds) == ["weights"]
    whole = 2 * plan.roles[2].holds["weights"]  # a worker has them in bfloat16 on one device
    assert whole / 16 <= role.holds["weights"] < whole / 15, "float32 over 16 devices, small ones on each"
    assert role.cost == 0.75 * 16 and plan.cost == 2.0 * 4 + 0.5 * 2 + 0.75 * 16
    data = plan.as_dict()
    assert (data["hosts"], data["chips"]) == (1 + 1 + 2 + 4, 4 + 2 + 16)
    made = jobsets(cfg, plan, DIGEST)
    (one,) = made["reference"]
    assert "reference.yaml" in render(cfg, plan, DIGEST)
    assert (one["metadata"]["name"], job(one)["completions"]) == ("qwen25-0-5b-rl-reference", 4)
    assert pod(one)["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert pod(one)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert one["spec"]["failurePolicy"]["maxRestarts"] == cfg.kubernetes.worker_max_restarts
    assert "priorityClassName" not in pod(one), "that of the trainer, which waits for it"
    assert container(one)["args"][-2:] == ["--role", "reference"], "the label by which it finds its machines"
    head = container(made["head"][0])["args"]
    assert head[head.index("--nodes") + 1] == "8"
    assert cfg.clone(reference_capacity="on-demand").terms("reference").kind == "on-demand"
    assert cfg.clone(reference_price=None).price_of("reference") == 0.5


def test_roles_hand_back_within_the_grace_of_spot_machines(plans: dict[str, LaunchPlan], rl: dict[str, list[Manifest]]):
    assert plans["qwen25_0_5b_rl.gke"].experiment.timeouts.grace == 12  # pyright: ignore
    assert "timeouts.grace=12" in container(rl["head"][0])["args"]


def test_all_roles_find_the_head_by_its_stable_name(rl: dict[str, list[Manifest]]):
    head = "qwen25-0-5b-rl-head-node-0-0.qwen25-0-5b-rl-head.default.svc:6379"
    for role in ("trainer", "worker"):
        for one in rl[role]:
            assert head in container(one)["args"]
    fleet = container(rl["head"][0])["args"][-1]
    assert fleet == "trainer=v6e:2x2,workers=2 x v6e:1x1"


def test_secrets_are_references_and_pods_have_no_rights_in_the_cluster(rl: dict[str, list[Manifest]]):
    for one in (jobset for found in rl.values() for jobset in found):
        secret = {v["name"]: v["valueFrom"] for v in container(one)["env"] if re.search("TOKEN|KEY", v["name"])}
        assert secret == {
            "WANDB_API_KEY": {"secretKeyRef": {"name": "wandb", "key": "key"}},
            "RAY_AUTH_TOKEN": {"secretKeyRef": {"name": "qwen25-0-5b-rl-token", "key": "ray"}},
        }
        assert pod(one)["automountServiceAccountToken"] is False and pod(one)["serviceAccountName"] == "axl-run"
        assert "privileged" not in container(one)["securityContext"]


def test_a_command_is_one_process_whose_paths_are_those_of_the_storage(plans: dict[str, LaunchPlan]):
    ((evaluation,),) = jobsets(CASES["eval.gke"], plans["eval.gke"], DIGEST).values()
    arguments = container(evaluation)["args"]
    assert arguments[: arguments.index("--")][-2:] == ["--folder", "/axl/runs"]
    assert arguments[arguments.index("--") + 1 :][:5] == ["python", "-m", "axlearn_like", "eval", "qwen25-0-5b-rl"]
    assert container(evaluation)["resources"]["limits"] == {"google.com/tpu": "4"}
    ((conversion,),) = jobsets(CASES["convert.gke"], plans["convert.gke"], DIGEST).values()
    assert "nodeSelector" not in pod(conversion) and "ports" not in container(conversion)
    assert {"name": "JAX_PLATFORMS", "value": "cpu"} in container(conversion)["env"]


def test_a_price_is_that_of_all_chips(plans: dict[str, LaunchPlan]):
    assert plans["llama2_7b.gke"].cost == pytest.approx(4.2 * 128)
    assert plans["qwen25_0_5b_rl.gke"].cost is None


def test_slices_with_a_workload_policy_select_it(plans: dict[str, LaunchPlan]):
    cfg = Launch.Config(experiment="llama2_7b", devices="tpu7x:2x2x2")
    with pytest.raises(Exception, match="Launch.kubernetes.placement_policies: expected the name of the workload"):
        plan_launch(cfg)
    cfg.kubernetes.placement_policies = {"tpu7x:2x2x2": "mine"}
    (one,) = jobsets(cfg, plan_launch(cfg), DIGEST)["trainer"]
    assert pod(one)["nodeSelector"]["cloud.google.com/placement-policy-name"] == "mine"
