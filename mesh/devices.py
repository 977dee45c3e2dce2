"""Names of devices in mesh rules, and how many devices a CPU shows."""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mesh.errors import UserError

# TPUs report generation and variant; cloud consoles and everybody else say v5p and v5e.
_SOLD_AS = {"tpu-v5": "tpu-v5p", "tpu-v5-lite": "tpu-v5e", "tpu-v6-lite": "tpu-v6e"}


def device_name(devices: Sequence[Any] | None = None) -> str:
    """Return `<kind>-<count>`, lower case without blanks: "cpu-1", "tpu-v5p-256", "gpu-nvidia-h200-8"."""
    shown: Sequence[Any] = jax.devices() if devices is None else devices
    first: Any = shown[0]
    kind: str = first.device_kind.lower().replace(" ", "-")
    if not kind.startswith(first.platform):
        kind = f"{first.platform}-{kind}"
    return f"{_SOLD_AS.get(kind, kind)}-{len(shown)}"


def platform() -> str:
    """Return the platform of the mesh in force, which may be described only: where a traced function will run."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_name_in_subprocess() -> str:
    """Return `device_name()` of this machine, asked of a subprocess, so that this process does not take the devices."""
    code = "from mesh.devices import device_name, one_device_per_core as f; f(); print(device_name())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the devices of this machine could not be listed: {done.stderr[-1000:]}")
    return done.stdout.split()[-1]


def one_device_per_core(limit: int = 8) -> None:
    """Let JAX's CPU backend show one device for each core, before it is first used; accelerators are not touched.

    XLA runs the small operations of a small model on one core. Data parallelism over "devices" that are cores uses the
    others too. The number is a power of two, so that batches divide.
    """
    cores = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, limit)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 1 << (cores.bit_length() - 1))


def configure_cpu_devices(mesh: Mapping[str, int], processes: int) -> None:
    """Let JAX's CPU backend show this process's part of a mesh, before it is first used.

    One process shows a device for each core (`one_device_per_core`), and so does one of several if the mesh has an axis
    of size -1.

    Raises:
        UserError: the mesh does not divide over the processes.
    """
    if processes == 1 or -1 in mesh.values():
        return one_device_per_core()
    total = math.prod(mesh.values())
    if total % processes:
        raise UserError(f"mesh={dict(mesh)} has {total} devices, which do not divide over {processes} processes")
    jax.config.update("jax_num_cpu_devices", total // processes)  # goes before what XLA_FLAGS say
