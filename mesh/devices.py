"""Devices of this machine: their names in mesh rules, how many a CPU shows, and processes that must not open any."""

# jax's own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import platform as system
import re
import subprocess
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.extend.backend import register_backend_factory

from mesh.errors import MachineError, UserError, install_hint
from mesh.host_memory import keep_freed_memory
from mesh.mesh import PlaceholderDevice

# TPUs report generation and variant; cloud consoles and everybody else say v5p and v5e.
_SOLD_AS = {"tpu-v5": "tpu-v5p", "tpu-v5-lite": "tpu-v5e", "tpu-v6-lite": "tpu-v6e"}
_VECTORS = re.compile(r"sse4|avx|fma|f16c|amx|asimd|sve|sme|i8mm|bf16")
_WHY = "`axl doctor --only devices` says why, and JAX_PLATFORMS=cpu computes on the CPU"
_ISA_FLAGS = re.compile(r"--xla_cpu\w*(?:isa|fast_math|vector_width)\w*=\S+")


def device_name(devices: Sequence[Any] | None = None) -> str:
    """Return `<kind>-<count>`, lower case without blanks: "cpu-1", "tpu-v5p-256", "gpu-nvidia-h200-8"."""
    shown: Sequence[Any] = jax.devices() if devices is None else devices
    first: Any = shown[0]
    kind: str = first.device_kind.lower().replace(" ", "-")
    if not kind.startswith(first.platform):
        kind = f"{first.platform}-{kind}"
    return f"{_SOLD_AS.get(kind, kind)}-{len(shown)}"


@functools.cache
def processor() -> dict[str, str]:
    """Return what the system says of this machine's first processor, by field; empty where it says nothing."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().partition("\n\n")[0].splitlines() if path.is_file() else []
    return {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}


def compilers() -> dict[str, str]:
    """Return what decides the bits of results beside the program: where runs differ, the first suspects."""
    return {"hardware": hardware_class(), "xla_flags": os.environ.get("XLA_FLAGS", "")}


@functools.cache
def hardware_class() -> str:
    """Name what the bits of a computation depend on: kind of devices, versions of jax and jaxlib.

    For CPUs the processor's model, its vector instructions, and the compiler's flags about them, too. Two machines of
    one class have the same bits; of two classes they may differ by rounding.
    """
    kind = [jax.devices()[0].device_kind]
    if jax.default_backend() == "cpu":
        known = processor()
        names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
        vectors = [flag for flag in known.get("flags", known.get("Features", "")).split() if _VECTORS.match(flag)]
        flags = _ISA_FLAGS.findall(os.environ.get("XLA_FLAGS", ""))
        kind += [system.machine(), *(known[name] for name in names if name in known), *sorted(vectors), *flags]
    return f"{' '.join(kind)}, jax {jax.__version__}, jaxlib {importlib.metadata.version('jaxlib')}"


def platform() -> str:
    """Return the platform of the mesh in force, which may be described only: where a traced function will run."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


@contextmanager
def forbid_devices(who: str) -> Generator[None]:
    """Make every first use of a backend in this process an error: the devices are for other processes."""

    def refuse() -> NoReturn:
        raise RuntimeError(f"{who} must not open devices, which belong to the processes of the roles")

    before = jax.config.jax_platforms
    register_backend_factory("forbidden", refuse)
    jax.config.update("jax_platforms", "forbidden")
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)


def find_devices() -> list[PlaceholderDevice]:
    """Describe the devices of this machine, with one for each core of a CPU, without opening them in this process.

    Raises:
        UserError: jax cannot open those that JAX_PLATFORMS names, or that it finds.
    """
    check_platforms()
    if _only_cpus():
        return [PlaceholderDevice() for _ in range(_cpu_devices())]
    return [PlaceholderDevice(*one) for one in _listed_by_subprocess()]


@functools.cache
def _listed_by_subprocess() -> list[tuple[str, str, int | None]]:
    """Return platform, kind and memory of each device; once in a process, for it takes seconds."""
    code = (
        "import jax, json; from mesh.devices import one_device_per_core as f; f(); "
        "print(json.dumps([(d.platform, d.device_kind, (d.memory_stats() or {}).get('bytes_limit')) "
        "for d in jax.devices()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reasons = re.findall(r"^\w*Error: .+$", done.stderr, re.MULTILINE)
        last = (reasons or done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise MachineError(f"jax cannot open the devices of this machine: {last}; {_WHY}")
    return [tuple(one) for one in json.loads(done.stdout.splitlines()[-1])]


# Devices of TPUs on the PCI bus, from v3 on (jax/_src/hardware_utils.py).
_TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c")


def idle_accelerator(root: Path = Path("/")) -> str | None:
    """Return why jax computes on the CPU of a machine with a GPU or TPU, and what to do; None: no reason was found.

    No device is opened: the driver's files, the PCI bus and jax's plugins are looked at. `root`: of the file system.
    """
    if os.environ.get("JAX_PLATFORMS"):
        return None  # the user has chosen
    if any((root / "dev").glob("nvidia[0-9]*")):
        plugins = importlib.metadata.entry_points(group="jax_plugins")
        if any("cuda" in f"{one.name} {one.value}" for one in plugins):
            return None
        without = "this machine has an NVIDIA GPU, and jax has no plugin for it: it computes on the CPU"
        return f"{without}; {install_hint('rl,cuda')}"
    # Vendors NVIDIA, with the classes of displays and of processors for 3D, and Google, with the TPUs of its devices.
    for device in (root / "sys/bus/pci/devices").glob("*"):
        vendor, kind, model = (_first_word(device / name) for name in ("vendor", "class", "device"))
        if vendor == "0x1ae0" and model in _TPUS and not _has_plugins():
            without = "this machine has a TPU, and jax has no plugin for it: it computes on the CPU"
            return f"{without}; {install_hint('rl,tpu')}"
        if vendor == "0x10de" and kind.startswith(("0x0300", "0x0302")):
            return (
                "this machine has an NVIDIA GPU without a driver, so jax computes on the CPU; install NVIDIA's driver"
            )
    return None


def _first_word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def check_platforms() -> None:
    """Refuse a JAX_PLATFORMS of accelerators where jax has no plugin for any (UserError); no device is opened."""
    named = os.environ.get("JAX_PLATFORMS", "")
    if named.partition(",")[0] not in ("", "cpu") and not _has_plugins():
        extra = "rl,tpu" if "tpu" in named else "rl,cuda"
        raise UserError(f"JAX_PLATFORMS={named}, and jax has no plugin for it here; {install_hint(extra)}, or unset it")


def unopened(error: Exception) -> str | None:
    """Return what to say of jax's error that a platform cannot be opened; None: it is another error."""
    if isinstance(error, AssertionError):  # jax's last step where the plugin of the only platform named has failed
        frames, named = traceback.extract_tb(error.__traceback__), os.environ.get("JAX_PLATFORMS")
        if not (named and frames and frames[-1].filename.endswith("jax/_src/xla_bridge.py")):
            return None
        return f"jax cannot open the devices of this machine: the plugin for JAX_PLATFORMS={named} has failed; {_WHY}"
    found = re.match(r"Unable to initialize backend '(?!forbidden')[^\n]*", str(error))
    return f"jax cannot open the devices of this machine: {found[0]}; {_WHY}" if found else None


def _only_cpus() -> bool:
    named = os.environ.get("JAX_PLATFORMS", "")
    return named == "cpu" or (not named and not _has_plugins())


def _has_plugins() -> bool:
    """Return True if jax may find anything but a CPU here: libtpu, or a plugin for GPUs or others."""
    named = importlib.metadata.entry_points(group="jax_plugins")
    found = [name for name in ("libtpu", "jax_plugins") if importlib.util.find_spec(name) is not None]
    return bool(named or found or os.environ.get("TPU_LIBRARY_PATH"))


def _cpu_devices(limit: int = 8) -> int:
    """Return how many devices the CPU shows: JAX_NUM_CPU_DEVICES, XLA_FLAGS, or the largest power of two of cores."""
    if (given := os.environ.get("JAX_NUM_CPU_DEVICES", "")).isdecimal():
        return int(given)
    forced = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if forced:
        return int(forced[1])
    cores = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, limit)
    return 1 << (cores.bit_length() - 1)


def keep_step_memory() -> None:
    """Let a process that computes on the host's CPU keep the memory that a step frees for the next."""
    if _only_cpus():
        keep_freed_memory()


def one_device_per_core() -> None:
    """Let JAX's CPU backend show one device for each core, before it is first used; accelerators are not touched.

    XLA runs the small operations of a small model on one core. Data parallelism over "devices" that are cores uses the
    others too. The number is a power of two, so that batches divide. What the environment says goes before.
    """
    keep_step_memory()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", _cpu_devices())


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
    keep_step_memory()
    jax.config.update("jax_num_cpu_devices", total // processes)  # goes before what XLA_FLAGS say
