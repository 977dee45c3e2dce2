"""System calls that a box may make: a list of those allowed, with the reason of each, and the filter made of it.

Every other call is refused, so a call that a later kernel brings is refused until it is listed. System V and POSIX
queues, semaphores and shared memory, `memfd_create`, and descriptors sent over sockets (`sendmsg`) are not listed: what
they hold lies outside of a process's limit of memory or outlives the process. The filter is classic BPF for seccomp
(https://docs.kernel.org/userspace-api/seccomp_filter.html). It needs no library and no privilege. A call of another
architecture's table (i386 by `int 0x80`) ends the process; one of the x32 table has a bit that no listed number has.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# reason: name:number on x86-64,number on aarch64
_REASONS = {
    "memory: allocations, stacks, loaded libraries": """
        brk:12,214 mmap:9,222 munmap:11,215 mprotect:10,226 mremap:25,216 madvise:28,233 msync:26,227""",
    "processes and threads: `threading`, `subprocess`, `os.fork`; their number is limited": """
        clone:56,220 fork:57,- vfork:58,- execve:59,221 exit:60,93 exit_group:231,94 wait4:61,260 waitid:247,95
        futex:202,98 set_tid_address:218,96 set_robust_list:273,99 rseq:334,293 sched_yield:24,124
        sched_getaffinity:204,123 arch_prctl:158,- prctl:157,167""",
    "what a process asks about itself": """
        getpid:39,172 getppid:110,173 gettid:186,178 getpgrp:111,- getpgid:121,155 getsid:124,156 getpriority:140,141
        getrlimit:97,163 prlimit64:302,261 getrusage:98,165 times:100,153 getuid:102,174 geteuid:107,175 getgid:104,176
        getegid:108,177 getgroups:115,158 getresuid:118,148 getresgid:120,150""",
    "what a process asks about the machine: its name, memory, cores": "uname:63,160 sysinfo:99,179 getcpu:309,168",
    "signals within the box, and alarms": """
        rt_sigaction:13,134 rt_sigprocmask:14,135 rt_sigreturn:15,139 rt_sigpending:127,136 rt_sigtimedwait:128,137
        rt_sigsuspend:130,133 sigaltstack:131,132 kill:62,129 tkill:200,130 tgkill:234,131 alarm:37,- setitimer:38,103
        getitimer:36,102 pause:34,- restart_syscall:219,128""",
    "time and randomness": """
        clock_gettime:228,113 clock_getres:229,114 clock_nanosleep:230,115 nanosleep:35,101 gettimeofday:96,169
        time:201,- getrandom:318,278""",
    "open files: reading, writing, their descriptors": """
        read:0,63 write:1,64 readv:19,65 writev:20,66 pread64:17,67 pwrite64:18,68 lseek:8,62 open:2,- openat:257,56
        close:3,57 close_range:436,436 dup:32,23 dup2:33,- dup3:292,24 fcntl:72,25 ioctl:16,29 flock:73,32 fsync:74,82
        fdatasync:75,83 ftruncate:77,46 truncate:76,45 fadvise64:221,223 sendfile:40,71""",
    "questions about files, of every import; `shutil.copy2` lists attributes": """
        stat:4,- fstat:5,80 lstat:6,- newfstatat:262,79 statx:332,291 statfs:137,43 fstatfs:138,44 access:21,-
        faccessat:269,48 faccessat2:439,439 readlink:89,- readlinkat:267,78 getcwd:79,17 chdir:80,49 fchdir:81,50
        getdents64:217,61 listxattr:194,11 llistxattr:195,12 flistxattr:196,13""",
    "changes of the box's own folder": """
        mkdir:83,- mkdirat:258,34 rmdir:84,- unlink:87,- unlinkat:263,35 rename:82,- renameat:264,38 renameat2:316,276
        symlink:88,- symlinkat:266,36 link:86,- linkat:265,37 chmod:90,- fchmod:91,52 fchmodat:268,53 utimensat:280,88
        umask:95,166""",
    "pipes, `select`, `asyncio`": """
        pipe:22,- pipe2:293,59 poll:7,- ppoll:271,73 select:23,- pselect6:270,72 epoll_create1:291,20 epoll_ctl:233,21
        epoll_wait:232,- epoll_pwait:281,22""",
    "pairs of sockets: the link between two boxes, and `asyncio`": """
        socketpair:53,199 sendto:44,206 recvfrom:45,207 shutdown:48,210 getsockopt:55,209 getsockname:51,204
        getpeername:52,205""",
}


class Condition(NamedTuple):
    """Condition on an argument: its `word` (2 a argument, the low one first), masked, has one of these values."""

    word: int
    mask: int
    values: tuple[int, ...]


_ALL = 0xFFFFFFFF
_APART = 0x7E028000  # flags of `clone`: all new namespaces, and a child of the parent
_LOCKS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38)  # F_DUPFD to F_SETLKW, and the locks of open files
CONDITIONS: Mapping[str, tuple[Condition, ...]] = {
    "clone": (Condition(0, _APART, (0,)),),
    "arch_prctl": (
        Condition(0, _ALL, (0x1002, 0x1003)),
    ),  # the base of thread-local storage, at the start of a program
    "prctl": (Condition(0, _ALL, (15, 16)),),  # a thread's name
    "prlimit64": (Condition(0, _ALL, (0,)),),  # limits of the process itself
    "kill": (Condition(0, 0x80000000, (0,)),),  # a process or the own group, not all there are
    "fcntl": (Condition(2, _ALL, (*_LOCKS, 1030, 1032)),),  # no owner to signal, no lease, no larger pipe
    # a terminal's settings and size (`isatty`), bytes to read, blocking, closing at exec
    "ioctl": (Condition(2, _ALL, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)),),
    "socketpair": (Condition(0, _ALL, (1,)), Condition(2, 0xF, (1, 5))),  # Unix; datagrams can be sent to others
    "sendto": (Condition(8, _ALL, (0,)), Condition(9, _ALL, (0,))),  # no address
}

NEWEST = 424  # first number common to both tables; libraries expect kernels without the call
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def _listed(reasons: Mapping[str, str]) -> dict[str, tuple[int | None, int | None]]:
    found: dict[str, tuple[int | None, int | None]] = {}
    for entry in " ".join(reasons.values()).split():
        name, _, numbers = entry.partition(":")
        first, second = (None if one == "-" else int(one) for one in numbers.split(","))
        found[name] = first, second
    return found


ALLOWED = _listed(_REASONS)  # numbers of the allowed calls on x86-64 and aarch64; None: that machine has no such call

_LOAD, _AND, _EQUAL, _FROM, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _END = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_ABSENT = 0x00050000 | errno.ENOSYS
_ARGUMENTS = 16  # bytes before them in what a filter reads: the number, the architecture, the instruction's address
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

type _Code = list[tuple[int, int, int, int]]


class CallFilterError(OSError):
    """The machine has no filters of system calls, or is of an architecture without a table."""


def program(machine: str) -> bytes:
    """Return the filter of "x86_64" or "aarch64" as BPF, 8 bytes an instruction (CallFilterError: another)."""
    if machine not in _MACHINES:
        raise CallFilterError(errno.ENOSYS, f"no filter of system calls for {machine}; expected x86_64 or aarch64")
    architecture, column = _MACHINES[machine]
    numbers = {number: name for name, both in ALLOWED.items() if (number := both[column]) is not None}
    steps: list[tuple[int, _Code]] = []  # each from a number up to the next step's
    for number in sorted({0, NEWEST, *numbers, *(number + 1 for number in numbers)}):
        default = _ABSENT if number >= NEWEST else _REFUSE
        leaf = _leaf(CONDITIONS.get(numbers[number], ())) if number in numbers else [(_RETURN, 0, 0, default)]
        if not steps or steps[-1][1] != leaf:
            steps.append((number, leaf))
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _END), (_LOAD, 0, 0, 0), *_tree(steps)]
    return b"".join(struct.pack("<HBBI", *one) for one in code)


def _tree(steps: list[tuple[int, _Code]]) -> _Code:
    """Return a search by halves: some eight comparisons for a call, which counts when a kernel examines the filter."""
    if len(steps) == 1:
        return steps[0][1]
    middle = len(steps) // 2
    below, above = _tree(steps[:middle]), _tree(steps[middle:])
    return [(_FROM, len(below), 0, steps[middle][0]), *below, *above]


def _leaf(conditions: Iterable[Condition]) -> _Code:
    code: _Code = []
    for word, mask, values in conditions:
        code += [(_LOAD, 0, 0, _ARGUMENTS + 4 * word), (_AND, 0, 0, mask)]
        code += [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
        code.append((_RETURN, 0, 0, _REFUSE))
    return [*code, (_RETURN, 0, 0, _ALLOW)]


class CallFilter:
    """The filter of this machine, made once and loaded in each box.

    Raises:
        CallFilterError: there is none.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        code = program(os.uname().machine)
        self._instructions = ctypes.create_string_buffer(code, len(code))
        self._program = _Program(len(code) // 8, ctypes.addressof(self._instructions))
        if self._set(None) != errno.EFAULT:  # EFAULT: a kernel with filters read the invalid address
            raise CallFilterError(errno.ENOSYS, "no seccomp filters in this kernel")

    def load(self) -> None:
        """Filter the calls of this process and its children, without new privileges (CallFilterError: refused)."""
        if (code := self._set(ctypes.byref(self._program))) != 0:
            raise CallFilterError(code, f"the filter of system calls: {os.strerror(code)}")

    def _set(self, code: object) -> int:
        return 0 if self._libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, code, 0, 0) == 0 else ctypes.get_errno()


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))
