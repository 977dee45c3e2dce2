"""Names of devices as mesh rules match them."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from mesh import UserError
from mesh.devices import configure_cpu_devices, device_name, find_devices, idle_accelerator, unopened


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


@pytest.mark.parametrize("named", ["tpu", "cuda,cpu"])
def test_accelerators_without_a_plugin_are_refused_and_not_taken_for_a_cpu(named: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", named)
    monkeypatch.setattr("mesh.devices._has_plugins", lambda: False)
    with pytest.raises(UserError, match=rf"JAX_PLATFORMS={named}, and jax has no plugin .*{named[:3]}"):
        find_devices()


def test_devices_that_a_plugin_cannot_open_are_one_message_and_a_bug_is_none():
    failed = RuntimeError("Unable to initialize backend 'tpu': INTERNAL: no libtpu.so\nand more")
    assert re.search("backend 'tpu': INTERNAL: no libtpu.so; `axl doctor", unopened(failed) or "")
    assert unopened(RuntimeError("Unable to initialize backend 'forbidden': the driver must not")) is None
    assert unopened(RuntimeError("something else")) is None


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--xla_force_host_platform_device_count=3"])
def test_devices_are_described_as_a_process_sees_them_that_opens_them(flags: str):
    code = (
        "import jax; from mesh.devices import find_devices as f, one_device_per_core as g; found = f(); g();"
        "print([(d.platform, d.device_kind) for d in found] == [(d.platform, d.device_kind) for d in jax.devices()])"
    )
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "True\n"


@pytest.mark.slow
def test_a_process_that_must_not_open_devices_fails_when_it_does():
    code = (
        "import jax; from mesh.devices import find_devices, forbid_devices\n"
        "with forbid_devices('the tester'):\n"
        "    jax.eval_shape(lambda: jax.numpy.zeros(3)); print(len(find_devices())); jax.numpy.zeros(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and int(done.stdout) >= 1
    assert "the tester must not open devices, which belong to the processes of the roles" in done.stderr


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"dev/nvidia0": ""}, "has an NVIDIA GPU, and jax has no plugin for it: .*cuda"),
        (
            {"sys/bus/pci/devices/0000:01/vendor": "0x10de", "sys/bus/pci/devices/0000:01/class": "0x030200"},
            "has an NVIDIA GPU without a driver",
        ),
        ({"sys/bus/pci/devices/0000:01/vendor": "0x10de", "sys/bus/pci/devices/0000:01/class": "0x040300"}, None),
        ({"sys/bus/pci/devices/0000:01/vendor": "0x8086", "sys/bus/pci/devices/0000:01/class": "0x030000"}, None),
        ({"dev/nvidiactl": ""}, None),
        (
            {"sys/bus/pci/devices/0000:05/vendor": "0x1ae0", "sys/bus/pci/devices/0000:05/device": "0x0063"},
            r"has a TPU, and jax has no plugin for it: .*\[rl,tpu\]",
        ),
        ({"sys/bus/pci/devices/0000:05/vendor": "0x1ae0", "sys/bus/pci/devices/0000:05/device": "0x0042"}, None),
    ],
)
def test_an_accelerator_that_jax_does_not_use_is_told_of(
    files: dict[str, str], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    found = idle_accelerator(tmp_path)
    assert found is None if message is None else found is not None and re.search(message, found)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert idle_accelerator(tmp_path) is None, "the CPU on purpose"
