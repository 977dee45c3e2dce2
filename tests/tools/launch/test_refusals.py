"""Mistakes with `axl launch`: one message that names the thing, status 2, and nothing is written."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from axlearn_like.config import ConfigError
from tools import cli
from tools.launch.launch import Kubernetes, Launch, TpuApi
from tools.launch.plan import plan_launch

RL = ["qwen25_0_5b_rl", "--tpu", "v6e:2x2"]
WORKERS = ["--workers", "2", "--worker-tpu", "v6e:1x1"]
REFERENCE = ["--reference-tpu", "v6e:1x1"]
COMPARED = [  # with a reference policy
    *("--set", "trainer.reference=axlearn_like.training.alignment.reference:FrozenCopy"),
    *("--set", "objective.regulariser=rl.objective.regulariser:ReferenceKL"),
    *("--set", "objective.regulariser.coef=0.1"),
]
TRAIN = ["llama2_7b", "--tpu", "v5p:2x2x4"]

CASES = {
    "no such topology": (["llama2_7b", "--tpu", "v5p:4x4x5"], "no TPU topology 'v5p:4x4x5'; the nearest: v5p:4x4x4"),
    "no such generation": (["llama2_7b", "--tpu", "v5q:4x4x4"], "no devices 'v5q'; did you mean 'v5"),
    "no such machine": (["llama2_7b", "--tpu", "v4:1x1x1"], "devices: --tpu=v4:1x1x1: no machine type has 1 chips"),
    "no such machine of GPUs": (
        ["llama2_7b", "--gpu", "h100:3"],
        "no machine type has 3 GPUs; there are a3-highgpu-1g",
    ),
    "no such GPU": (["llama2_7b", "--gpu", "h999:8"], "devices: --gpu='h999:8': there are no devices 'h999'"),
    "parts of machines": (["llama2_7b", "--gpu", "h100:12"], "expected up to 8, a host's, or a multiple of it"),
    "share of a GPU": (
        ["demo_sft", "--gpu", "h100:0.5"],
        "--gpu=h100:0.5: expected whole GPUs of a machine, such as h100:8",
    ),
    "GPUs without a name": (["demo_sft", "--gpu", "gpu:8"], "devices: expected GPUs of a model with --on gke"),
    "GPUs of a queue": (
        ["demo_sft", "--gpu", "h100:8", "--on", "queued-resource", "--storage", "gs://b"],
        "h100:8: the Cloud TPU API does not sell h100",
    ),
    "no rule": (["llama2_70b", "--tpu", "v6e:2x2"], "llama2_70b has no mesh rule for 'tpu-v6e-4'"),
    "mesh that does not divide": ([*TRAIN, "--set", "mesh={'fsdp': 12}"], "12.*16"),
    "does not fit": (
        ["qwen25_1_5b_rl", "--tpu", "v6e:2x2", *WORKERS, "--set", "engine.pages=10000000"],
        r"nothing is written:\n  worker: what it holds needs weights .* = .* GiB, and a device of v6e:1x1 has 32.00",
    ),
    "no device": (["llama2_7b"], "expected --tpu KIND:SHAPE"),
    "no workers": (
        RL,
        r"workers: expected --workers N --worker-tpu KIND:SHAPE or --worker-gpu KIND:NUMBER for an RL experiment",
    ),
    "workers alone": (
        [*RL, "--workers", "2"],
        "workers: expected --workers together with --worker-tpu or --worker-gpu",
    ),
    "reference without machines": (
        [*RL, *WORKERS, *COMPARED, "--set", "fleet.reference=v6e:1x1"],
        "fleet.reference: expected None, and --reference-tpu KIND:SHAPE or .*, got 'v6e:1x1'",
    ),
    "reference on others": (
        [*RL, *WORKERS, *COMPARED, *REFERENCE, "--set", "fleet.reference=cpu:1"],
        "fleet.reference: expected v6e:1x1, as the submission asks for, got 'cpu:1'",
    ),
    "no reference policy": (
        [*RL, *WORKERS, *REFERENCE],
        r"fleet.reference: expected None, for there is no reference policy; or set trainer.reference=FrozenCopy",
    ),
    "reference of no RL": ([*TRAIN, *REFERENCE], "reference_devices: expected None: llama2_7b is no RL experiment"),
    "reference of a command": ([*REFERENCE, "--", "eval", "demo"], "reference_devices: expected None with a command"),
    "terms of no reference": (
        [*RL, *WORKERS, "--reference-capacity", "spot"],
        "reference_capacity: expected None without --reference-tpu KIND:SHAPE or .*, got 'spot'",
    ),
    "no such slice of a reference": (
        [*RL, *WORKERS, "--reference-tpu", "v6e:2x3"],
        "reference_devices: --reference-tpu='v6e:2x3': no TPU topology 'v6e:2x3'; the nearest: v6e:2x4",
    ),
    "workers of no RL": ([*TRAIN, *WORKERS], "workers: expected 0: llama2_7b is no RL experiment"),
    "capacity": ([*TRAIN, "--capacity", "spto"], "--capacity='spto': expected .*did you mean 'spot'"),
    "reservation": ([*TRAIN, "--capacity", "reserved"], "expected reserved:NAME"),
    "name of spot": ([*TRAIN, "--capacity", "spot:x"], "spot takes no name"),
    "name": ([*TRAIN, "--name", "My_run"], "--name='My_run': expected a DNS label"),
    "long name": (
        [*TRAIN, "--name", "a" * 50],
        r"the Pod a+-trainer-node-0-3-xxxxx would have 73 .*expected a name of at most 40",
    ),
    "storage": ([*TRAIN, "--storage", "s3://b"], "expected gs://BUCKET"),
    "folder on a cluster": ([*TRAIN, "--storage", "dir:runs"], "storage: expected gs:// or pvc:"),
    "bucket on this machine": (
        [*TRAIN, "--on", "local", "--storage", "gs://bucket"],
        "storage: expected dir:PATH with --on local",
    ),
    "port": ([*TRAIN, "--set", "launch.port=70000"], "port: expected 1 to 65535"),
    "slices": ([*TRAIN, "--slices", "0"], "slices: expected 1 or more, got 0"),
    "secret": ([*TRAIN, "--set", "launch.env={'HF_TOKEN': 'x'}"], r"env: expected no secrets \(HF_TOKEN\)"),
    "field": ([*TRAIN, "--set", "launch.kubernetes.namespce=x"], "did you mean 'namespace'"),
    "experiment": (["lama2_7b", "--tpu", "v5p:4x4x4"], "did you mean 'llama2_7b'"),
    "target": (
        [*TRAIN, "--on", "gce"],
        "--on gce: Compute Engine is not supported: --on gke has GPUs and every kind of TPU",
    ),
    "KubeRay": ([*RL, *WORKERS, "--on", "ray"], "--on gke starts the Ray cluster of a run by itself"),
    "queued RL": ([*RL, *WORKERS, "--on", "queued-resource"], "is an RL experiment.*use --on gke"),
    "no project": (
        [*TRAIN, "--on", "queued-resource", "--storage", "gs://b"],
        "tpu_api.project: expected the name of a project",
    ),
    "unknown target": ([*TRAIN, "--on", "gek"], "no such target"),
    "nothing to run": (["--tpu", "v6e:1x1"], "expected EXPERIMENT, or -- and another command"),
    "both": ([*TRAIN, "--", "eval", "demo"], "expected EXPERIMENT, or -- and another command"),
    "no such command": (["--", "evl", "demo"], "axl has no command 'evl'; did you mean 'eval'"),
    "half a command": (["--", "convert"], "axl launch -- convert: expected a command of `axl convert`"),
    "no such subcommand": (["--", "convert", "imprt", "a", "b"], "axl convert has no command 'imprt'; did you mean"),
    "option of a command": (["--", "eval", "demo", "--sampels", "8"], "axl eval: No such option.*--samples"),
    "argument of a command": (["--", "convert", "import", "hf"], "axl convert import: expected TARGET"),
    "too many arguments": (["--", "eval", "demo", "other"], "axl eval: unexpected argument 'other'"),
    "command that runs experiments": (["--", "train", "demo_sft"], "there is `axl launch EXPERIMENT"),
    "hosts of a command": (["--tpu", "v6e:4x4", "--", "eval", "demo"], "`axl eval` is one process, .* have 4 hosts"),
    "slices of a command": (["--tpu", "v6e:1x1", "--slices", "2", "--", "eval", "demo"], "slices: expected 1 with a"),
    "edits of a command": (["--set", "a=1", "--", "eval", "demo"], "sets: expected none with a command"),
    "file of a command": (["--", "eval", "demo", "--verifier", "mine.py:f"], "no file mine.py here, to send along"),
    "queue without TPU": (
        ["--on", "queued-resource", "--storage", "gs://b", "--", "eval", "demo"],
        "devices: expected --tpu KIND:SHAPE with --on queued-resource",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_and_nothing_is_written(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments, message = CASES[case]
    assert cli.main(["launch", "--dry-run", str(tmp_path / "out"), *arguments]) == 2
    shown = capsys.readouterr().err
    assert re.search(message, shown, re.DOTALL), shown
    assert not (tmp_path / "out").exists()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "newline in a name": ({"env": {"A\nB": "x"}}, r"Launch.env: variable 'A\\nB': .*did you mean 'A_B'\?"),
    "NUL in a name": ({"env": {"A\0": "x"}}, r"Launch.env: variable 'A\\x00': .*did you mean 'A_'\?"),
    "space in a name": ({"env": {"my name": "x"}}, "did you mean 'my_name'"),
    "digit first": ({"env": {"1A": "x"}}, "no digit first; did you mean '_1A'"),
    "no name": ({"env": {"": "x"}}, "Launch.env: variable '': expected letters"),
    "= in a name": ({"secret_env": {"A=B": "s/k"}}, "Launch.secret_env: variable 'A=B': .*did you mean 'A_B'"),
    "NUL in a value": ({"env": {"A": "x\0y"}}, r"Launch.env: 'x\\x00y': expected a text of Unicode without NUL"),
    "bytes in a value": ({"env": {"A": "\udc80"}}, "Launch.env: .*expected a text of Unicode"),
    "NUL in setup": ({"setup": "a\0"}, "Launch.setup: .*without NUL"),
    "bytes in a command": (
        {"experiment": None, "devices": None, "command": ("eval", "\udcff")},
        "Launch.command: .*Unicode",
    ),
    "image with spaces": ({"image": "my image"}, "Launch.image: 'my image': .*did you mean 'myimage'"),
    "image in capitals": ({"image": "Python:3.12"}, "Launch.image: .*did you mean 'python:3.12'"),
    "image by address": ({"image": "https://gcr.io/a/b:1"}, "did you mean 'gcr.io/a/b:1'"),
    "image with a newline": ({"image": "a:1\n"}, "did you mean 'a:1'"),
    "no image": ({"image": ""}, "Launch.image: '': expected HOST/PATH:TAG"),
    "twice": ({"env": {"A": "1"}, "secret_env": {"A": "s/k"}}, "Launch.secret_env: expected other variables .* not A"),
    "Secret": ({"secret_env": {"A": "a..b/k"}}, "Launch.secret_env: 'a..b/k': expected SECRET/KEY for A"),
    "key of a Secret": ({"secret_env": {"A": "a/é"}}, "Launch.secret_env: 'a/é': expected SECRET/KEY for A"),
    "name": ({"name": "My Run"}, "Launch.name: --name='My Run': .*did you mean 'my-run'"),
    "long name": ({"name": "a" * 64}, "Launch.name: .*did you mean 'a{63}'"),
    "namespace": ({"kubernetes": Kubernetes.Config(namespace="Lab")}, "kubernetes.namespace: .*did you mean 'lab'"),
    "policy": (
        {"kubernetes": Kubernetes.Config(placement_policies={"tpu7x:2x2x2": "a b"})},
        "placement_policies: tpu7x:2x2x2='a b': expected the value of a label.*did you mean 'a-b'",
    ),
    "claim": ({"storage": "pvc:my_claim"}, "Launch.storage: .*'my_claim': .*did you mean 'my-claim'"),
    "folder": ({"storage": "pvc:axl/ä"}, "expected gs://BUCKET"),
    "folder of a shell": ({"storage": "gs://bucket/$(id)"}, "expected gs://BUCKET"),
    "colon": ({"on": "local", "storage": "dir:/tmp/a:b"}, "expected a path without ':'"),
    "project": ({"tpu_api": TpuApi.Config(project="a b/../c")}, "tpu_api.project: expected the id of a project"),
    "zone": ({"tpu_api": TpuApi.Config(zone="us-east5-a?x=1")}, "tpu_api.zone: expected a zone"),
    "network": ({"tpu_api": TpuApi.Config(network="a\nb")}, "tpu_api.network: expected the name of a network"),
    "account": ({"tpu_api": TpuApi.Config(service_account="x")}, "tpu_api.service_account: expected an address"),
    "wait": ({"tpu_api": TpuApi.Config(wait_hours=float("inf"))}, "wait_hours: expected more than 0, or None"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_kubernetes_would_refuse_is_refused_by_the_config(case: str):
    fields, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        Launch.Config(**{"experiment": "demo", "devices": "v6e:1x1", **fields}).check()


@pytest.mark.parametrize("image", ["python:3.12", "gcr.io/a/b", "localhost:5000/x:Tag_1", f"a/b@sha256:{'0' * 64}"])
def test_names_that_kubernetes_takes_are_taken(image: str):
    env = {"a.b-c_D": "any\n$(text)", "_": ""}
    Launch.Config(experiment="demo", devices="v6e:1x1", image=image, env=env, secret_env={"A": "a.b/K_.-1"}).check()


@pytest.mark.slow
def test_a_function_may_return_the_submission_and_options_replace_its_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from tools.launch.launch import Launch\n\n"
        "def mine():\n    return Launch.Config(experiment='demo_sft', devices='v6e:2x2', name='mine')\n"
    )
    out = tmp_path / "out"
    options = ["--queue", "research", "--capacity", "spot", "--set", "launch.kubernetes.namespace=lab", "--json"]
    assert cli.main(["launch", f"{mine}:mine", *options, "--set", "num_steps=7", "--dry-run", str(out)]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (plan["name"], plan["command"], plan["chips"], plan["roles"]["trainer"]["capacity"]) == (
        *("mine", "train", 4, "spot"),
    )
    text = (out / "launch.txt").read_text()
    assert "kubernetes.queue: 'research'" in text and "kubernetes.namespace: 'lab'" in text
    assert "num_steps: 7\n" in (out / "config.txt").read_text()
    (jobset,) = yaml.safe_load_all((out / "trainer.yaml").read_text())
    assert jobset["metadata"]["namespace"] == "lab"


SUBMITTED = {
    "no credentials": ([*TRAIN], "no credentials for a cluster: there is no .*get-credentials"),
    "laptop": (TRAIN[:2] + ["v5p:4x4x8", "--on", "local"], "would start 32 processes on this machine, and at most 16"),
}


@pytest.mark.parametrize("case", SUBMITTED)
def test_a_submission_is_refused_before_anything_is_created(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    arguments, message = SUBMITTED[case]
    assert cli.main(["launch", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("subcommand", ["status", "logs", "stop", "add-worker"])
def test_a_run_that_was_not_launched_is_named(subcommand: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["launch", subcommand, str(tmp_path / "none")]) == 2
    assert f"no run was launched in {tmp_path / 'none'}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "thesis.txt").write_text("mine")
    assert cli.main(["launch", *TRAIN, "--dry-run", str(tmp_path)]) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_a_recipe_is_planned_as_it_fits_its_devices():
    """Whole on each of eight chips it would need 120 GiB of 16."""
    rows = "tools.bench.doctor.supervised:RandomRows"
    sets = (f"input.source={rows}", "input.source.vocab_size=128256", "input.source.length=512", "input.source.rows=64")
    plan = plan_launch(
        Launch.Config(experiment="llama31_8b_sft", devices="v5e:2x4", storage="gs://b/c", sets=(*sets, "evaluators=()"))
    )
    assert not plan.refusals and plan.roles[0].mesh == {"fsdp": 8}
