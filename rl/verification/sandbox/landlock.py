"""Isolation without namespaces, by Landlock: a process reads the files that it is shown, writes none, signals none.

For machines that grant no namespaces (most containers), Linux 6.12 or newer; as root, whose boxes have user ids of
their own, 6.2. What Landlock does not govern, the filter of calls refuses: sockets, queues, shared memory, sessions.
Names and sizes of other files can be asked for (`stat`), their content cannot. See
https://docs.kernel.org/userspace-api/landlock.html.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

from rl.verification.sandbox.isolation import DEVICES, SYSTEM, IsolationError, checked

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, of x86-64 and aarch64 alike
_VERSION, _BENEATH = 1, 1
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_RIGHTS = {3: 15, 4: 15}  # version -> number of file rights; 16 since the fifth
_ROOT_NEEDS, _OTHERS_NEED = 3, 6  # truncation of files; signals, which user ids keep apart otherwise

_libc = ctypes.CDLL(None, use_errno=True)


def rules(visible: Iterable[str], *, own_user: bool) -> int:
    """Return a descriptor of rules that show these files and folders and those of the system.

    Args:
        visible: paths to read.
        own_user: the processes to restrict have a user id that no other process has.

    Raises:
        IsolationError: the kernel has no Landlock, or too old a one.
    """
    version, needed = _libc.syscall(_CREATE, None, 0, _VERSION), _ROOT_NEEDS if own_user else _OTHERS_NEED
    if version < needed:
        have = "none" if version < 1 else str(version)
        raise IsolationError(errno.ENOSYS, f"no Landlock of version {needed} in this kernel (it has {have})")
    files, network, scopes = (1 << _RIGHTS.get(version, 16)) - 1, 3 if version >= 4 else 0, 3 if version >= 6 else 0
    attributes = struct.pack("<QQQ", files, network, scopes)
    descriptor = checked("Landlock", _libc.syscall(_CREATE, attributes, len(attributes), 0))
    for path in filter(os.path.exists, {*SYSTEM, *visible}):
        _allow(descriptor, path, _EXECUTE | _READ | _LIST)
    for path in DEVICES:
        _allow(descriptor, path, _READ | _WRITE)
    return descriptor


def restrict(descriptor: int) -> None:
    """Restrict this process and its children from now on; it must have given up the chance to gain privileges."""
    checked("Landlock", _libc.syscall(_RESTRICT, descriptor, 0))


def _allow(descriptor: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        folder = stat.S_ISDIR(os.fstat(place).st_mode)
        rule = struct.pack("<Qi", rights if folder else rights & ~_LIST, place)
        checked(f"Landlock, {path}", _libc.syscall(_ADD, descriptor, _BENEATH, rule, 0))
    finally:
        os.close(place)
