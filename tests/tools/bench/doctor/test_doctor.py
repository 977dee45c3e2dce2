"""`axl doctor` as it is typed: real checks on this machine, and faults of the machine that are really there."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.bucket_server import bucket_server
from tools.bench.doctor.checks import CHECKS, Finding
from tools.bench.doctor.devices import Hardware, _fallen

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["ok", "checks", "machine", "versions", "date"],
    "properties": {
        "ok": {"type": "boolean"},
        "machine": {"type": "object", "required": ["cores", "cpu"]},
        "versions": {"type": "object", "required": ["python", "jax"], "additionalProperties": {"type": "string"}},
        "date": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT"},
        "checks": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "status", "value", "do", "figures", "seconds"],
                "properties": {
                    "name": {"enum": list(CHECKS)},
                    "status": {"enum": ["ok", "warn", "fail", "skip"]},
                    "value": {"type": "string", "minLength": 1},
                    "do": {"type": "string"},
                    "figures": {"type": "object"},
                    "seconds": {"type": "number", "minimum": 0},
                },
            },
        },
    },
}  # fmt: skip


def axl(*arguments: str, prepare: Callable[[], None] | None = None, **environ: str | None) -> Any:
    """Run the command; a variable that is None is not set."""
    here = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}  # left by other tests
    known = {name: value for name, value in {**here, **environ}.items() if value is not None}
    command = [sys.executable, "-m", "axlearn_like", "doctor", *arguments]
    return subprocess.run(command, env=known, capture_output=True, text=True, timeout=280, preexec_fn=prepare)


def doctor(*arguments: str, status: int = 0, **how: Any) -> dict[str, dict[str, Any]]:
    """Return the checks of `--json` by name."""
    done = axl(*arguments, "--json", **how)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout.count("\n") == 1
    said = json.loads(done.stdout)
    jsonschema.validate(said, SCHEMA)
    assert said["ok"] is (status == 0)
    for check in said["checks"]:
        assert check["do"] or check["status"] in ("ok", "skip"), check
    return {check["name"]: check for check in said["checks"]}


@pytest.mark.slow
def test_the_quick_checks_of_this_machine(tmp_path: Path) -> None:
    found = doctor("--quick", "--run-dir", str(tmp_path / "runs" / "mine"))
    assert list(found) == [name for name, check in CHECKS.items() if check.quick and name != "bucket"]
    assert all(check["status"] in ("ok", "warn") for check in found.values()), found
    assert not (tmp_path / "runs").exists()  # looked at, not made
    assert str(tmp_path) in found["disk"]["value"]


@pytest.mark.slow
def test_the_numerics_of_this_machine() -> None:
    found = doctor("--only", "attention,numerics")
    assert list(found) == ["devices", "attention", "numerics"]
    assert all(check["status"] == "ok" for check in found.values()), found


@pytest.mark.full
@pytest.mark.numerics
def test_kernels_and_speed_of_this_machine() -> None:
    found = doctor("--only", "bandwidth,matrix,attention,paged_decode,grouped_products,policy_head,numerics")
    assert list(found)[0] == "devices" and len(found) == 8
    assert all(check["status"] == "ok" for check in found.values()), found
    assert 1e8 < found["bandwidth"]["figures"]["measured"] < 1e13
    assert 0 < found["attention"]["figures"]["gradient 3"] < 0.02
    assert found["numerics"]["figures"]["batch_invariant"] is True


@pytest.mark.full
def test_everything_on_this_machine() -> None:
    found = doctor("--seconds", "270")
    assert all(check["status"] in ("ok", "warn") for check in found.values()), found
    assert found["rl_step"]["figures"]["tokens_per_second"] > 0 < found["sft_step"]["figures"]["tokens_per_second"]


def test_a_table_says_below_a_warning_what_to_do() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    low = axl("--only", "open_files", prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard)))
    assert low.returncode == 0 and "open_files        WARN" in low.stdout
    assert "ulimit -n 65536, in the shell that starts the run" in low.stdout
    assert low.stdout.splitlines()[-1] == "1 checks, failed: 0, warnings: 1"


def test_a_hard_limit_of_open_files_is_another_remedy() -> None:
    found = doctor(
        "--only", "open_files", status=1, prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    )
    assert found["open_files"]["status"] == "fail" and "--ulimit" in found["open_files"]["do"]


def test_a_disk_that_refuses_a_file(tmp_path: Path) -> None:
    size = 8 << 20
    found = doctor(
        *("--only", "disk", "--run-dir", str(tmp_path)),
        status=1,
        prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )
    assert f"cannot write 64 MiB in {tmp_path}: File too large" in found["disk"]["value"]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=16m tmpfs {tmp_path} && exec "$0" "$@"'
    command = [sys.executable, "-m", "axlearn_like", "doctor", "--only", "disk", "--run-dir", str(tmp_path), "--json"]
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, *command], capture_output=True, text=True
    )
    if "Operation not permitted" in done.stderr or "unshare" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.returncode == 1 and "No space left on device" in json.loads(done.stdout)["checks"][0]["value"]


def fake_driver(folder: Path, says: str, status: int = 0) -> str:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.slow
def test_a_gpu_that_jax_does_not_see_without_its_plugin(tmp_path: Path) -> None:
    path = fake_driver(tmp_path, "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4")
    found = doctor("--only", "devices,topology", status=1, PATH=path, JAX_PLATFORMS=None)
    assert found["devices"]["status"] == "fail"
    assert (
        "nvidia-smi: 1 x NVIDIA H100 80GB HBM3), jax without its plugin: it fell to the CPU"
        in found["devices"]["value"]
    )
    assert found["devices"]["do"].startswith('pip install "jax[cuda13]==')
    assert found["topology"]["status"] == "skip"
    old = fake_driver(tmp_path, "NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4")
    found = doctor("--only", "devices", status=1, PATH=old, JAX_PLATFORMS=None)
    assert found["devices"]["do"].startswith('pip install "jax[cuda12]==')


@pytest.mark.slow
def test_a_gpu_that_the_environment_hides_is_a_warning(tmp_path: Path) -> None:
    path = fake_driver(tmp_path, "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4")
    found = doctor("--only", "devices,device_memory", PATH=path, JAX_PLATFORMS="cpu")
    assert found["devices"]["status"] == "warn" and found["devices"]["do"] == "unset JAX_PLATFORMS"
    hidden = doctor("--only", "devices", PATH=path, JAX_PLATFORMS=None, CUDA_VISIBLE_DEVICES="")
    assert hidden["devices"]["do"] == "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.slow
def test_a_gpu_that_others_use(tmp_path: Path) -> None:
    path = fake_driver(tmp_path, "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 40960")
    found = doctor("--only", "device_memory", PATH=path, JAX_PLATFORMS="cpu")
    assert "others use 40.0 of 79.6 GiB" in found["device_memory"]["value"]


@pytest.mark.slow
def test_a_platform_that_is_not_there() -> None:
    found = doctor("--only", "devices,cache", status=1, JAX_PLATFORMS="cuda")
    assert "cuda" in found["devices"]["value"] and "unset JAX_PLATFORMS" in found["devices"]["do"]
    assert found["cache"]["status"] == "skip"


@pytest.mark.slow
def test_a_tpu_that_the_cloud_names_and_jax_does_not_see() -> None:
    found = doctor("--only", "devices", status=1, JAX_PLATFORMS=None, TPU_ACCELERATOR_TYPE="v5litepod-8")
    assert "TPUs (TPU_ACCELERATOR_TYPE)" in found["devices"]["value"]
    assert found["devices"]["do"].startswith('pip install "jax[tpu]==')


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        (Hardware("gpu", 2, "PCI bus, no nvidia-smi"), "the machine has 2 GPUs (PCI bus, no nvidia-smi), a GPU"),
        (Hardware("tpu", 0, "/dev/accel0"), "the machine has some TPUs (/dev/accel0), jax without its plugin"),
    ],
)  # fmt: skip
def test_why_jax_fell_to_the_cpu(hardware: Hardware, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = _fallen(hardware, "")
    assert isinstance(found, Finding) and found.status == "fail" and found.value.startswith(said)
    assert ("docker run --gpus all" if hardware.kind == "gpu" else "jax[tpu]") in found.do


@pytest.mark.slow
def test_others_may_write_the_folder_of_compiled_programs(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    found = doctor("--only", "cache", status=1, AXL_COMPILATION_CACHE=str(tmp_path))
    assert "chmod go-w" in found["cache"]["value"]


def test_versions_out_of_range_name_the_line_that_installs_others(tmp_path: Path) -> None:
    """An older version of a package stands before the installed one, as in a mixed environment."""
    info = tmp_path / "flax-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flax\nVersion: 0.1.0\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from tools.bench.doctor.host import versions; print(*versions({})[:3], sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "fail|flax 0.1.0 is not <0.13,>=0.12.10|pip install 'flax<0.13,>=0.12.10'"


def test_what_is_mistyped() -> None:
    done = axl("--only", "atention")
    assert done.returncode == 2 and "did you mean 'attention'?" in done.stderr
    assert axl("--only", "bucket").returncode == 2


@pytest.mark.slow
def test_ctrl_c_keeps_the_table_so_far(tmp_path: Path) -> None:
    slow = tmp_path / "nvidia-smi"
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexec sleep 25\n")
    slow.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "axlearn_like", "doctor", "--only", "clock,devices", "--json"]
    child = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "asked").exists():
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    said = json.loads(out)
    jsonschema.validate(said, SCHEMA)
    assert child.returncode == 130 and said["ok"] is False
    assert said["checks"][0]["name"] == "clock" and said["checks"][0]["status"] in ("ok", "warn")
    assert (said["checks"][1]["status"], said["checks"][1]["value"]) == ("skip", "interrupted")


@pytest.mark.slow
def test_a_bucket_over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket_server(monkeypatch) as server:
        found = doctor("--only", "bucket", "--bucket", "gs://bucket/runs")
        assert "1 MiB written, read and removed in gs://bucket/runs" in found["bucket"]["value"]
        kinds = [request.partition(" ")[0] for request in server.requests]
        assert "POST" in kinds and kinds[-1] == "DELETE"
        found = doctor("--only", "bucket", "--bucket", "gs://nobody/runs", status=1)
        assert "gs://nobody" in found["bucket"]["value"]
    found = doctor("--only", "bucket", "--bucket", "gss://x/y", status=1)
    assert "no library serves gss://" in found["bucket"]["value"]
