"""Isolation of a process by namespaces: a root, network, queues and pids of its own; limits; no privileges.

Linux 5.12 or newer. As root the namespaces are made at once, and boxes run under a user id that nobody else has; other
users make them inside a user namespace. Everything here is called in processes with a single thread that were started
for the purpose.
"""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR = {"rdonly": 1, "nosuid": 2, "nodev": 4}
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_CAPGET = {"x86_64": 125, "aarch64": 90}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38
_PR_SET_CHILD_SUBREAPER = 36
_CAP_DAC_READ_SEARCH = 1 << 2

# Files of the machine that a box sees, read-only; besides these Python's own alone.
SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


class IsolationError(OSError):
    """The kernel, or a container around this process, does not allow what keeps a box apart."""


def enter_namespaces() -> bool:
    """Put this process into new namespaces of files, network, hosts' names and queues, its children into one of pids.

    Returns:
        True if it is root of the machine still; False if it is in a user namespace, with rights over nothing outside.

    Raises:
        IsolationError: it is not allowed here.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "unshare"):
        raise IsolationError(errno.ENOSYS, "namespaces need Linux")
    flags = os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWPID
    try:
        if os.geteuid() == 0:
            with contextlib.suppress(PermissionError):  # root of a container, without the capability
                os.unshare(flags)
                return True
        user, group = os.geteuid(), os.getegid()
        os.unshare(flags | os.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        return False
    except OSError as error:
        raise IsolationError(error.errno, f"no new namespaces: {error.strerror}") from error


def make_root(base: str, visible: Sequence[str]) -> str:
    """Make `base`, an empty folder, the root: system libraries and the `visible` folders, read-only.

    Returns:
        An empty folder for `private_tmp`: /tmp, unless something visible lies in it.

    Raises:
        IsolationError: it is not allowed here.
    """
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", base, "tmpfs", _MS_NOSUID, "size=1m,mode=755")
    for path in _outermost([*SYSTEM, *visible]):
        _show(path, base)
    for path in DEVICES:
        target = Path(base + path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        _mount(path, str(target), None, _MS_BIND)
    scratch = "/box" if os.path.exists(f"{base}/tmp") else "/tmp"
    os.makedirs(base + scratch)
    os.chdir(base)
    checked("pivot_root", _libc.syscall(_number(_SYS_PIVOT_ROOT), b".", b"."))
    checked("umount", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")
    _set_attributes("/", "rdonly", "nosuid", recursive=False)
    return scratch


def private_tmp(path: str, megabytes: int) -> None:
    """Mount a folder of this size for temporary files, which this process and its children alone see, and go there.

    Queues, semaphores and shared memory of System V and POSIX are apart from now on too. Nothing in the folder can be
    run or loaded.
    """
    os.unshare(os.CLONE_NEWNS | os.CLONE_NEWIPC)
    os.environ["TMPDIR"] = path
    options = f"size={megabytes}m,nr_inodes={max(64, megabytes * 64)},mode=777"
    _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)
    os.chdir(path)


def limit(*, memory_mb: int, cpu_s: int, file_mb: int, processes: int) -> None:
    """Set hard limits; what is left behind by a process that reaches them goes with its namespace."""
    limits = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: file_mb << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if sys.platform == "linux":
        limits[resource.RLIMIT_MSGQUEUE] = 0
    for which, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit stands already; macOS knows not all
            resource.setrlimit(which, (most, most))


def drop_privileges(user: int | None, *, read_all: bool = False) -> None:
    """Give up root, which takes the id `user`, and all capabilities; `read_all`: but for root's right to read."""
    header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    checked("capget", _libc.syscall(_number(_SYS_CAPGET), header, held))
    kept = held[1] & _CAP_DAC_READ_SEARCH if read_all else 0  # capability among those permitted
    if user is not None:
        _libc.prctl(_PR_SET_KEEPCAPS, int(read_all), 0, 0, 0)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    checked("capset", _libc.syscall(_number(_SYS_CAPSET), header, (ctypes.c_uint32 * 6)(kept, kept)))
    checked("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of processes below whose own parents have ended, so that they can be waited for."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tasks_of(user: int) -> int:
    """Return how many processes and threads a user has, as the limit of processes counts them."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # process has ended
            words = Path(f"/proc/{name}/status").read_text().split()
            if int(words[words.index("Uid:") + 1]) == user:
                count += int(words[words.index("Threads:") + 1])
    return count


def die_with_parent() -> bool:
    """Let the kernel kill this process when its parent ends; returns False where there is no such kernel."""
    return sys.platform == "linux" and _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0


def become_first() -> None:
    """Go on in a child, the first process of a new namespace of pids: whatever it starts ends with it.

    This process waits for the child, without descriptors, and ends as it does.
    """
    if (child := os.fork()) != 0:
        os.closerange(3, 1 << 12)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else 1)
    die_with_parent()


class _Attributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace"))


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths that exist, each once, without those below another."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.exists(path)}):
        if not any(path == other or path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def _show(path: str, base: str) -> None:
    """Mount a file or folder, read-only, at its own name below `base`."""
    target = Path(base + path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(path):
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    _mount(os.path.realpath(path), str(target), None, _MS_BIND | _MS_REC)
    _set_attributes(str(target), "rdonly", "nosuid", "nodev", recursive=True)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = (None if text is None else text.encode() for text in (source, target, kind))
    data = None if options is None else options.encode()
    checked(f"mount {target}", _libc.mount(*texts, ctypes.c_ulong(flags), data))


def _set_attributes(path: str, *names: str, recursive: bool) -> None:
    attributes = _Attributes(set=sum(_MOUNT_ATTR[name] for name in names))
    flags = ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = _libc.syscall(_SYS_MOUNT_SETATTR, -100, path.encode(), flags, ctypes.byref(attributes), size)
    checked(f"read-only {path}", result)


def _number(table: dict[str, int]) -> int:
    machine = os.uname().machine
    if machine not in table:
        raise IsolationError(errno.ENOSYS, f"no isolation on {machine}; expected one of {', '.join(table)}")
    return table[machine]


def checked(what: str, result: int) -> int:
    """Return the result of a system call (IsolationError: it has failed)."""
    if result < 0:
        code = ctypes.get_errno()
        raise IsolationError(code, f"{what}: {os.strerror(code)}")
    return result
