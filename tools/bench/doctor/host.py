"""Checks of the machine around the devices, without jax: versions, memory, limits, clock, disk, a bucket; and Ray."""

import contextlib
import ctypes
import os
import platform
import re
import resource
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from mesh.errors import install_hint
from tools.bench.doctor.checks import Finding

Options = Mapping[str, Any]
PROJECT, GIB = "axlearn-like", float(1 << 30)
_PLUGINS = re.compile(r"jax-\w+-(plugin|pjrt)|libtpu|jaxlib")  # must fit jax to the last number
_SHOWN = ("jax", "jaxlib", "flax", "optax", "numpy", "ray", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


def installed(package: str) -> str | None:
    """Return the version of a package; None: it is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)


def shown_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter most."""
    found = {name: version for name in (PROJECT, *_SHOWN) if (version := installed(name)) is not None}
    return {"python": platform.python_version(), **found}


def versions(options: Options) -> Finding:
    """Compare Python and installed packages with the ranges of this project, and plugins of jax with those of jax."""
    wrong = {}
    for one, optional in _requirements():
        version = platform.python_version() if one.name == "python" else installed(one.name)
        if version is None and not optional:
            wrong[f"{one.name}{one.specifier}"] = f"{one.name} is missing"
        elif version is not None and not one.specifier.contains(version, prereleases=True):
            wrong[f"{one.name}{one.specifier}"] = f"{one.name} {version} is not {one.specifier}"
    if wrong:
        return Finding("fail", "; ".join(wrong.values()), "pip install " + " ".join(f"'{text}'" for text in wrong))
    return Finding("ok", ", ".join(f"{name} {version}" for name, version in shown_versions().items()))


def _requirements() -> Iterator[tuple[Requirement, bool]]:
    """Yield the requirements that hold here, and whether they are of an extra."""
    yield Requirement(f"python{metadata.metadata(PROJECT)['Requires-Python']}"), False
    for project in (PROJECT, "jax"):
        for one in map(Requirement, (metadata.requires(project) or []) if installed(project) else []):
            extras = re.findall(r'extra == "([^"]+)"', str(one.marker)) or [""]
            if project == "jax" and (not _PLUGINS.fullmatch(one.name) or {"ci", "minimum-jaxlib"} & set(extras)):
                continue
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras):
                yield one, extras != [""]


def host_memory(options: Options) -> Finding:
    """Look at the memory of the machine, and at the limit of its container."""
    free = total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError):
        free = 1024 * int(re.findall(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[0])
    value = f"{total / GIB:.1f} GiB"
    for names in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            most, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in names)
            if most < total:
                value, free = f"a container's {most / GIB:.1f} GiB of {value}", min(free, most - used)
    status = "fail" if free < GIB else "warn" if free < 4 * GIB else "ok"
    do = "close what is not needed, or raise the container's limit (docker run --memory): the demo takes 3 GiB"
    return Finding(status, f"{free / GIB:.1f} GiB free of {value}", do * (status != "ok"), {"free": free})


def shared_memory(options: Options) -> Finding:
    """Look at /dev/shm, where Ray keeps objects; weights between processes do not need it."""
    if not os.path.isdir("/dev/shm"):
        return Finding("skip", "this system has no /dev/shm")
    found = shutil.disk_usage("/dev/shm")
    value, enough = f"{found.free / GIB:.2f} GiB free of {found.total / GIB:.2f} GiB in /dev/shm", found.free >= 1 << 28
    do = "docker run --shm-size=2g; in Kubernetes an emptyDir of medium Memory at /dev/shm"
    return Finding("ok", value) if enough else Finding("warn", value, do)


def open_files(options: Options) -> Finding:
    """Look at the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft:,}, at most {hard:,}" if hard > 0 else f"{soft:,}"
    if soft < 0 or soft >= 4096:
        return Finding("ok", value)
    do = "ulimit -n 65536, in the shell that starts the run"
    if 0 < hard < 4096:
        do = "docker run --ulimit nofile=65536:65536, or a line in /etc/security/limits.conf and a new login"
    return Finding("fail" if soft < 256 else "warn", value, do)


def clock(options: Options) -> Finding:
    """Compare the clock with the date of the installation, and ask the kernel whether it is synchronised."""
    behind = Path(__file__).stat().st_mtime - time.time()
    value = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    do = "timedatectl set-ntp true, or start chronyd: buckets refuse other times, and hosts are compared by theirs"
    if behind > 60:
        return Finding("fail", f"{value} lies before this installation, by {behind / 3600:.1f} h", do)
    with contextlib.suppress(OSError, AttributeError):  # Linux alone; 5 is TIME_ERROR (man 2 adjtimex)
        if ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) == 5:
            return Finding("warn", f"{value}; the kernel says that it is not synchronised", do)
    return Finding("ok", value)


def disk(options: Options) -> Finding:
    """Write, sync and read a file where runs will live."""
    wanted = Path(str(options["run_dir"])).expanduser().absolute()
    folder = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    block, count, free = os.urandom(1 << 20), 64, shutil.disk_usage(folder).free
    do = "make room, or look at a folder of another disk: axl doctor --run-dir FOLDER (ulimit -f limits files, too)"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.monotonic()
            file.writelines([block] * count)
            file.flush()
            os.fsync(file.fileno())
            speed = count * len(block) / (time.monotonic() - began)
            file.seek(0)
            same = all(file.read(len(block)) == block for _ in range(count))
    except OSError as error:
        return Finding("fail", f"cannot write {count} MiB in {folder}: {error.strerror}", do)
    value = f"{free / GIB:.1f} GiB free in {folder}, {speed / 1e6:,.0f} MB/s written"
    if not same:
        return Finding("fail", f"{value}; what was read is not what was written", "use another disk")
    figures = {"free": free, "bytes_per_second": speed}
    if free >= 5 * GIB and speed < 30e6:
        do = "checkpoints take long: a local disk for --run-dir"
    slow = free < 5 * GIB or speed < 30e6
    return Finding("warn" if slow else "ok", value, do * slow, figures)


def bucket(options: Options) -> Finding:
    """Write, read and remove an object of our own below a URL."""
    from mesh.files.bucket import Bucket, bucket_url

    url, name, content = bucket_url(options["bucket"]), f"axl-doctor-{secrets.token_hex(8)}", os.urandom(1 << 20)
    if url is None:
        return Finding("fail", f"--bucket={options['bucket']!r} is no URL", "--bucket gs://NAME/FOLDER")
    store, began = Bucket(url, "--bucket"), time.monotonic()
    store.write(name, content)
    same = store.read(name) == content
    store.remove([name])
    value = f"1 MiB written, read and removed in {url} in {time.monotonic() - began:.2f} s"
    return Finding("ok", value) if same else Finding("fail", f"{url} gave back another content", "use another bucket")


def ray(options: Options) -> Finding:
    """Start Ray on loopback, as a run does, and run a task."""
    if find_spec("ray") is None:
        return Finding("skip", "Ray is not installed; --runtime inprocess needs none", install_hint("rl"))
    from rl.runtime.ray.session import ray_session

    with ray_session():
        import ray

        other = ray.get(ray.remote(lambda: os.getpid()).remote(), timeout=40)
    return Finding("ok", f"ray {ray.__version__} started, ran a task in process {other} and stopped")
