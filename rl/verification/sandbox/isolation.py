"""Isolation of a process by the kernel: namespaces, a root of its own, limits, a filter of system calls.

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
from typing import Any

__all__ = [
    "IsolationError",
    "die_with_parent",
    "drop_privileges",
    "enter_namespaces",
    "limit",
    "make_root",
    "private_tmp",
]

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR = {"rdonly": 1, "nosuid": 2, "nodev": 4}
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2

# Of the machine's files a box sees these alone, and Python's own, read-only.
_SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# What no test of a program needs, and attacks on a kernel begin with.
_REFUSED_CALLS = (
    *("socket", "connect", "bind", "listen", "accept", "accept4", "ptrace", "process_vm_readv", "process_vm_writev"),
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "fsopen", "fsmount", "move_mount", "open_tree"),
    *("mount_setattr", "open_by_handle_at", "name_to_handle_at", "bpf", "perf_event_open", "userfaultfd", "kcmp"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "add_key", "request_key", "keyctl", "init_module"),
    *("finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "quotactl"),
    *("settimeofday", "clock_settime", "acct", "syslog", "sethostname", "setdomainname", "personality", "vhangup"),
)
_NEW_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_MASKED_EQUAL = 7

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
    for path in _outermost([*_SYSTEM, *visible]):
        _show(path, base)
    for path in _DEVICES:
        target = Path(base + path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        _mount(path, str(target), None, _MS_BIND)
    scratch = "/box" if os.path.exists(f"{base}/tmp") else "/tmp"
    os.makedirs(base + scratch)
    os.chdir(base)
    _call("pivot_root", _libc.syscall(_number(_SYS_PIVOT_ROOT), b".", b"."))
    _call("umount", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")
    _set_attributes("/", "rdonly", "nosuid", recursive=False)
    return scratch


def private_tmp(path: str, megabytes: int) -> None:
    """Mount a folder of this size for temporary files, which this process and its children alone see, and go there."""
    os.unshare(os.CLONE_NEWNS)
    os.environ["TMPDIR"] = path
    options = f"size={megabytes}m,nr_inodes={max(64, megabytes * 64)},mode=777"
    _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
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
    }
    for which, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit stands already; macOS knows not all
            resource.setrlimit(which, (most, most))


def drop_privileges(user: int | None) -> None:
    """Give up root, all capabilities, and the chance to gain any by a program. `user`: of root, the id to take."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _call("capset", _libc.syscall(_number(_SYS_CAPSET), header, (ctypes.c_uint32 * 6)()))
    _call("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class CallFilter:
    """A filter of system calls by libseccomp, prepared once and loaded in each box."""

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libseccomp.so.2")
        except OSError:
            self._library = None
            return
        library = self._library
        library.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
        for name in _REFUSED_CALLS:
            if (number := library.seccomp_syscall_resolve_name(name.encode())) >= 0:
                self._refuse(number, errno.EPERM)
        if (clone3 := library.seccomp_syscall_resolve_name(b"clone3")) >= 0:
            self._refuse(clone3, errno.ENOSYS)  # its flags are in memory, unseen; the C library falls back to clone
        clone = library.seccomp_syscall_resolve_name(b"clone")
        for flag in _NEW_NAMESPACES:
            self._refuse(clone, errno.EPERM, _Comparison(0, _MASKED_EQUAL, flag, flag))
        code = self._export()
        self._instructions = ctypes.create_string_buffer(code, len(code))
        self._program = _Program(len(code) // 8, ctypes.addressof(self._instructions))

    @property
    def available(self) -> bool:
        """True if the library is there."""
        return self._library is not None

    def load(self) -> None:
        """Filter the calls of this process and its children from now on, if the library is there."""
        if self._library is not None:
            result = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(self._program), 0, 0)
            _call("the filter of system calls", result)

    def _export(self) -> bytes:
        """Return the filter as instructions, made once: the library would make them again in each box."""
        self._library.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
        with os.fdopen(os.memfd_create("filter"), "rb") as file:
            if (code := self._library.seccomp_export_bpf(self._context, file.fileno())) != 0:
                raise IsolationError(-code, "seccomp_export_bpf failed")
            file.seek(0)
            return file.read()

    def _refuse(self, number: int, error: int, comparison: "_Comparison | None" = None) -> None:
        action, count = ctypes.c_uint32(_ERRNO | error), 0 if comparison is None else 1
        array = None if comparison is None else ctypes.byref(comparison)
        code = self._library.seccomp_rule_add_array(self._context, action, number, count, array)
        if code != 0:
            raise IsolationError(-code, "seccomp_rule_add failed")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


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
    _call(f"mount {target}", _libc.mount(*texts, ctypes.c_ulong(flags), data))


def _set_attributes(path: str, *names: str, recursive: bool) -> None:
    attributes = _Attributes(set=sum(_MOUNT_ATTR[name] for name in names))
    flags = ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = _libc.syscall(_SYS_MOUNT_SETATTR, -100, path.encode(), flags, ctypes.byref(attributes), size)
    _call(f"read-only {path}", result)


def _number(table: dict[str, int]) -> int:
    machine = os.uname().machine
    if machine not in table:
        raise IsolationError(errno.ENOSYS, f"no isolation on {machine}; expected one of {', '.join(table)}")
    return table[machine]


def _call(what: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise IsolationError(code, f"{what}: {os.strerror(code)}")
