"""The table of system calls and the filter made of it say the same, on both machines; the kernel does as it says."""

import ctypes
import errno
import functools
import os
import struct
import subprocess
import sys
from itertools import product

import pytest

from rl.verification.sandbox.calls import ALLOWED, CONDITIONS, NEWEST, CallFilterError, program

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOW, _REFUSE, _ABSENT, _END = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
_LINES = (  # of findings, each once a way out or a leak
    *(
        "shmget",
        "shmat",
        "msgget",
        "msgsnd",
        "semget",
        "semop",
        "mq_open",
        "mq_timedsend",
        "memfd_create",
        "memfd_secret",
    ),
    *(
        "pidfd_getfd",
        "pidfd_open",
        "inotify_init1",
        "fanotify_init",
        "sendmsg",
        "recvmsg",
        "sendmmsg",
        "io_uring_setup",
    ),
    *("io_uring_enter", "userfaultfd", "keyctl", "add_key", "request_key", "bpf", "perf_event_open", "ptrace", "setns"),
    *(
        "process_vm_writev",
        "process_vm_readv",
        "clone3",
        "unshare",
        "mount",
        "move_mount",
        "open_by_handle_at",
        "seccomp",
    ),
    *("setsid", "setpgid", "mlockall", "socket", "connect", "bind", "personality", "vmsplice", "splice", "pivot_root"),
)


@functools.cache
def _code(machine: str) -> list[tuple[int, int, int, int]]:
    return [*struct.iter_unpack("<HBBI", program(machine))]


def _decide(machine: str, number: int, words: tuple[int, ...] = (0,) * 12, architecture: int | None = None) -> int:
    """Return what the filter says of a call; `words` are the halves of its arguments."""
    data = struct.pack("<IIQ12I", number, architecture or _MACHINES[machine], 0, *words)
    code = _code(machine)
    at, value = 0, 0
    while True:
        kind, yes, no, operand = code[at]
        at += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif kind == 0x54:
            value &= operand
        elif kind in (0x15, 0x35):
            at += yes if (value == operand if kind == 0x15 else value >= operand) else no
        else:
            assert kind == 0x06
            return operand


def _words(name: str) -> tuple[int, ...]:
    """Return arguments that are allowed."""
    values = dict.fromkeys(range(12), 0) | {one.word: one.values[-1] for one in CONDITIONS.get(name, ())}
    return tuple(values.values())


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_what_is_listed_is_allowed_and_nothing_else(machine: str, column: int):
    numbers = {number: name for name, both in ALLOWED.items() if (number := both[column]) is not None}
    for number in range(700):
        if number in numbers:
            assert _decide(machine, number, _words(numbers[number])) == _ALLOW, numbers[number]
        else:
            assert _decide(machine, number) == (_ABSENT if number >= NEWEST else _REFUSE), number
    for number in (0x40000000 | next(iter(numbers)), 0x40000000, 0xFFFFFFFF):  # the x32 table
        assert _decide(machine, number) == _ABSENT
    for other in (0x40000003, 0x40000028, *(set(_MACHINES.values()) - {_MACHINES[machine]})):  # i386, 32-bit Arm
        assert _decide(machine, next(iter(numbers)), architecture=other) == _END


@pytest.mark.parametrize(
    ("machine", "column", "name"), [(*m, n) for m, n in product([("x86_64", 0), ("aarch64", 1)], CONDITIONS)]
)
def test_a_condition_looks_at_each_word_and_at_no_other(machine: str, column: int, name: str):
    number = ALLOWED[name][column]
    if number is None:
        pytest.skip(f"{machine} has no {name}")
    right = _words(name)
    looked = {one.word for one in CONDITIONS[name]}
    for condition in CONDITIONS[name]:
        for value in condition.values:
            assert _decide(machine, number, _with(right, condition.word, value)) == _ALLOW
        for wrong in {0, 2, 0x80000001, 0x10000000, 0x7FFF, 1031} | {1 << bit for bit in range(32)}:
            expected = _ALLOW if wrong & condition.mask in condition.values else _REFUSE
            assert _decide(machine, number, _with(right, condition.word, wrong)) == expected
    for word in set(range(12)) - looked:
        assert _decide(machine, number, _with(right, word, 0xFFFFFFFF)) == _ALLOW


def _with(words: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*words[:place], value, *words[place + 1 :])


def test_numbers_are_those_of_the_kernel():
    """libseccomp has both machines' tables; what attacks began with is in neither list."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp is not installed")
    for column, architecture in enumerate(_MACHINES.values()):
        for name, both in ALLOWED.items():
            found = library.seccomp_syscall_resolve_name_arch(architecture, name.encode())
            assert (found if found >= 0 else None) == both[column], name


def test_what_attacks_begin_with_is_not_listed():
    assert [name for name in _LINES if name in ALLOWED] == []


def test_a_machine_without_a_table_is_refused():
    with pytest.raises(CallFilterError, match="riscv64; expected x86_64 or aarch64"):
        program("riscv64")


def test_the_kernel_refuses_every_number_that_is_not_listed():
    """Each unlisted call is made, with arguments of 0, behind the filter."""
    machine = os.uname().machine
    if not sys.platform.startswith("linux") or machine not in _MACHINES:
        pytest.skip("no filter for this machine")
    listed = {both[[*_MACHINES].index(machine)] for both in ALLOWED.values()}
    listed |= {335, 336}  # for probes: x86-64 answers them itself, with a signal, and filters do not see them
    refused = [number for number in range(600) if number not in listed]
    source = (
        "import ctypes, os\nfrom rl.verification.sandbox.calls import CallFilter\n"
        "libc = ctypes.CDLL(None, use_errno=True)\nlibc.prctl(38, 1, 0, 0, 0)\nCallFilter().load()\n"
        "refused = lambda n: libc.syscall(n, 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() in (1, 38)\n"
        f"wrong = [n for n in {refused} if not refused(n)]\n"
        "print(wrong, os.getpid() > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[] True\n", 0), done.stderr[-500:]
