"""Names of devices as mesh rules match them."""

import os
import subprocess
import sys
from typing import NamedTuple

import jax
import pytest

from mesh import UserError
from mesh.devices import configure_cpu_devices, device_name


class Described(NamedTuple):
    """Attributes of a device: all that its name depends on, for machines that are not at hand."""

    platform: str
    device_kind: str


@pytest.mark.parametrize(
    ("platform", "kind", "count", "name"),
    [
        ("tpu", "TPU v4", 8, "tpu-v4-8"),
        ("tpu", "TPU v5 lite", 4, "tpu-v5e-4"),
        ("tpu", "TPU v5", 256, "tpu-v5p-256"),
        ("tpu", "TPU v5p", 256, "tpu-v5p-256"),
        ("tpu", "TPU v6 lite", 16, "tpu-v6e-16"),
        ("tpu", "TPU7x", 2, "tpu7x-2"),
        ("gpu", "NVIDIA H200", 8, "gpu-nvidia-h200-8"),
        ("cpu", "cpu", 3, "cpu-3"),
    ],
)
def test_kind_and_count(platform, kind, count, name):
    assert device_name([Described(platform, kind)] * count) == name  # pyright: ignore[reportArgumentType]


def test_the_devices_of_this_process():
    devices = jax.devices()
    assert device_name() == device_name(devices)
    assert device_name(devices).startswith(devices[0].platform)
    assert device_name(devices).endswith(f"-{len(devices)}")


def test_a_mesh_that_does_not_divide_over_processes_is_refused():
    with pytest.raises(UserError, match="mesh={'fsdp': 3} has 3 devices, which do not divide over 2 processes"):
        configure_cpu_devices({"fsdp": 3}, 2)
    with pytest.raises(UserError, match="mesh={} has 1 devices"):
        configure_cpu_devices({}, 2)


@pytest.mark.parametrize("flags", ["", "--xla_force_host_platform_device_count=3"])
def test_devices_are_described_as_a_process_sees_them_that_opens_them(flags: str):
    code = (
        "import jax; from mesh.devices import find_devices as f, one_device_per_core as g; found = f(); g();"
        "print([(d.platform, d.device_kind) for d in found] == [(d.platform, d.device_kind) for d in jax.devices()])"
    )
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "True\n"


def test_a_process_that_must_not_open_devices_fails_when_it_does():
    code = (
        "import jax; from mesh.devices import find_devices, forbid_devices\n"
        "with forbid_devices('the tester'):\n"
        "    jax.eval_shape(lambda: jax.numpy.zeros(3)); print(len(find_devices())); jax.numpy.zeros(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and int(done.stdout) >= 1
    assert "the tester must not open devices, which belong to the processes of the roles" in done.stderr
