"""Checks of the devices: those of the machine beside those that jax shows, their driver, memory and connections."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench.doctor.checks import Finding
from tools.bench.doctor.host import GIB, installed

Options = Mapping[str, Any]
_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits")
_TPUS = {"0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}  # PCI ids (v4, v5p, v5e, v6e, tpu7x), as jax lists them
_PLUGINS = {"gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "tpu": ("libtpu",)}
_CUDA_13 = 580  # oldest driver (docs.jax.dev/en/latest/installation.html)
_DRIVER = (
    "install NVIDIA's driver (ubuntu-drivers install); in a container docker run --gpus all, in Kubernetes a limit of "
    "nvidia.com/gpu"
)


class Hardware(NamedTuple):
    """The accelerators of the machine, found without jax: "gpu" or "tpu", how many, and what said so.

    `driver` is the version of NVIDIA's, `used` and `memory` are MiB of the first GPU.
    """

    kind: str = ""
    count: int = 0
    why: str = ""
    driver: str = ""
    memory: float = 0
    used: float = 0


@functools.cache
def find_hardware() -> Hardware:
    """Look for GPUs and TPUs: nvidia-smi, the PCI bus, device files, the environment that clouds set."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=False)
        rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 3]
        if done.returncode == 0 and rows:
            name, driver, *sizes = rows[0]
            known = [float(size) for size in sizes if size.isdecimal()]
            return Hardware("gpu", len(rows), f"nvidia-smi: {len(rows)} x {name}", driver, *known)
        why = f"nvidia-smi: {(done.stdout + done.stderr).strip().rpartition('\n')[2]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "no nvidia-smi" if isinstance(error, FileNotFoundError) else f"nvidia-smi: {error}"
    names = ("vendor", "class", "device")
    pci = [[Path(one, name).read_text().strip() for name in names] for one in glob("/sys/bus/pci/devices/*")]
    on_bus = sum(vendor == "0x10de" and kind.startswith("0x03") for vendor, kind, _ in pci)
    if gpus := on_bus or len(glob("/dev/nvidia[0-9]*")):
        return Hardware("gpu", gpus, f"{'PCI bus' if on_bus else '/dev/nvidia*'}, {why}")
    chips = sum(vendor == "0x1ae0" and device in _TPUS for vendor, _, device in pci)
    files = glob("/dev/accel[0-9]*") or (glob("/dev/vfio/[0-9]*") if chips else [])
    said = [name for name in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID") if os.environ.get(name)]
    why = ", ".join([*files, *said]) or "PCI bus"
    return Hardware("tpu", chips or len(files), why) if chips or files or said else Hardware()


def devices(options: Options) -> Finding:
    """Compare the accelerators of the machine with what jax shows: it falls to the CPU without an error."""
    found = find_hardware()  # first: jax takes the memory of GPUs
    import jax

    from mesh.devices import device_name, one_device_per_core

    one_device_per_core()
    chosen = os.environ.get("JAX_PLATFORMS", "")
    try:
        shown = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second for a platform that no plugin has
        do = "unset JAX_PLATFORMS" if chosen and not found.kind else _install(found)
        value = (
            f"jax shows no devices (JAX_PLATFORMS={chosen!r}): {str(error).partition('\n')[0] or 'no such platform'}"
        )
        return Finding("fail", value, do)
    first = shown[0]
    value, figures = f"{len(shown)} x {first.device_kind}", {"devices": device_name(shown), "hardware": found.why}
    if found.kind and first.platform == "cpu":
        return _fallen(found, chosen)._replace(figures=figures)
    if found.kind and not os.environ.get("CUDA_VISIBLE_DEVICES") and len(jax.local_devices()) < found.count:
        do = "another process may hold them, or TPU_VISIBLE_CHIPS or a container hides them"
        return Finding("warn", f"{value}, but the machine has {found.count} ({found.why})", do, figures)
    if first.platform != "cpu":
        plugin = _plugin(found)
        runtime = str(first.client.platform_version).strip().partition("\n")[0]
        value += f", {plugin} {installed(plugin)}, driver {found.driver or 'in it'}; {runtime}"
    return Finding("ok", value + f"; JAX_PLATFORMS={chosen}" * bool(chosen), "", figures)


def _fallen(found: Hardware, chosen: str) -> Finding:
    """Return why jax shows CPUs alone on a machine with an accelerator."""
    there = f"the machine has {found.count or 'some'} {found.kind.upper()}s ({found.why}), "
    if chosen:
        return Finding("warn", f"{there}which JAX_PLATFORMS={chosen!r} leaves unused", "unset JAX_PLATFORMS")
    if found.kind == "gpu" and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding("warn", f"{there}which CUDA_VISIBLE_DEVICES hides", "unset CUDA_VISIBLE_DEVICES")
    if found.kind == "gpu" and not found.driver:
        return Finding("fail", f"{there}a GPU without driver: jax fell to the CPU", _DRIVER)
    plugin = _plugin(found)
    if not plugin:
        return Finding("fail", f"{there}jax without its plugin: it fell to the CPU", _install(found))
    if "13" in plugin and int(found.driver.partition(".")[0]) < _CUDA_13:
        value = f"{there}driver {found.driver} is older than CUDA 13 needs ({_CUDA_13}): jax fell to the CPU"
        return Finding("fail", value, f"update the driver, or {_install(found)}")
    environ = {**os.environ, "JAX_PLATFORMS": "cuda" if found.kind == "gpu" else "tpu"}
    asked = [sys.executable, "-c", "import jax; jax.devices()"]
    done = subprocess.run(asked, env=environ, capture_output=True, text=True, timeout=60, check=False)
    reason = done.stderr.strip().rpartition("\n")[2] or "no reason given"
    return Finding("fail", f"{there}jax fell to the CPU: {reason}", f"resolve that, or {_install(found)}")


def _plugin(found: Hardware) -> str:
    return next((name for name in _PLUGINS.get(found.kind, ()) if installed(name)), "")


def _install(found: Hardware) -> str:
    """Return the line that installs the plugin of an accelerator."""
    old = found.driver and int(found.driver.partition(".")[0]) < _CUDA_13
    extra = "tpu" if found.kind == "tpu" else "cuda12" if old else "cuda13"
    return f'pip install "jax[{extra}]=={installed("jax")}"'


def topology(options: Options) -> Finding:
    """Sum over all devices of this process, and describe how they lie."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    own = jax.local_devices()
    coords = [tuple(device.coords) for device in own if hasattr(device, "coords")]
    value = f"{len(own)} devices of {jax.device_count()}" + (f", chips {coords[0]} to {coords[-1]}" if coords else "")
    mesh = Mesh(own, ("all",))
    given = jnp.ones((len(own), 1 << 20), jnp.float32, device=NamedSharding(mesh, PartitionSpec("all")))
    whole = jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    if not bool(jnp.all(whole(given) == len(own))):
        do = "devices do not exchange what they hold: NCCL_DEBUG=INFO, nvidia-smi topo -m, dmesg"
        return Finding("fail", f"{value}; a sum over them is wrong", do)
    began = time.monotonic()
    jax.block_until_ready(whole(given))
    return Finding("ok", f"{value}; 4 MiB of each summed in {1e3 * (time.monotonic() - began):.2f} ms")


def device_memory(options: Options) -> Finding:
    """Look at the memory that programs can use on a device."""
    import jax

    from axlearn_like.operations.memory import device_memory as bytes_of

    size, found = bytes_of(jax.devices()[0]) or 0, find_hardware()
    value, figures = f"{size / GIB:.1f} GiB a device for programs", {"device_bytes": size}
    if found.used > 1024:
        do = "nvidia-smi lists the processes: wait for them, or take another GPU (CUDA_VISIBLE_DEVICES)"
        return Finding(
            "warn", f"{value}; others use {found.used / 1024:.1f} of {found.memory / 1024:.1f} GiB", do, figures
        )
    return Finding("ok", value, "", figures)


def cache(options: Options) -> Finding:
    """Check that the folder of compiled programs is this user's own."""
    from mesh.programs.compilation import enable_compilation_cache

    return Finding("ok", f"compiled programs in {enable_compilation_cache()}")
