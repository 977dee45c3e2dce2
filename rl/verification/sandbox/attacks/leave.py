"""Attacks that leave something behind, or find what an earlier answer has left."""

from rl.verification.sandbox.attacks.attack import CALL, Attack, program, then_solved, then_wrong

_SEGMENT = ("room = call(29, 194, 4242, 1 << 20, 0o1666)", "libc.shmat.restype = ctypes.c_void_p")
_QUEUE = ("queue = call(68, 186, 4242, 0o1666)", "room = ctypes.create_string_buffer(b'\\1' + bytes(7) + b'left', 64)")
_POSIX = ("room = ctypes.create_string_buffer(8192)", "queue = call(240, 180, b'left', 0o102, 0o666, None)")


def _left(leave: tuple[str, ...], *find: str) -> Attack:
    """Return an attack whose first lines run in an earlier answer; the others succeed if they find it."""
    return then_solved(*find, before=program(*leave))


ATTACKS: dict[str, Attack] = {
    "outlive the deadline": then_wrong(
        "if os.fork() == 0:",
        "    try: os.setsid()",
        "    except OSError: pass",
        "    if os.fork() == 0:",
        "        time.sleep(1000)",
        "    os._exit(0)",
        "time.sleep(1000)",
        hangs=True,
    ),
    "leave a daemon behind": then_wrong(
        "if os.fork() == 0:", "    try: os.setsid()", "    except OSError: pass", "    time.sleep(1000)"
    ),
    "leave a segment of shared memory": _left(
        (*CALL, *_SEGMENT, "ctypes.memmove(libc.shmat(room, None, 0), b'left', 4)"),
        *(*CALL, *_SEGMENT, "assert ctypes.string_at(libc.shmat(room, None, 0), 4) == b'left'"),
    ),
    "make a segment of shared memory": then_solved(*CALL, "call(29, 194, 0, 1 << 20, 0o1600)"),
    "leave a queue of messages": _left(
        (*CALL, *_QUEUE, "call(69, 189, queue, room, 4, 0)"),
        *(*CALL, *_QUEUE, "call(70, 188, queue, room, 4, 0, 0o4000)", "assert room.raw[8:12] == b'left'"),
    ),
    "make a queue of messages": then_solved(*CALL, "call(68, 186, 0, 0o1600)"),
    "leave a POSIX queue": _left(
        (*CALL, *_POSIX, "call(242, 182, queue, b'left', 4, 0, None)"),
        *(
            *CALL,
            *_POSIX,
            "limit = (ctypes.c_long * 2)()",
            "assert call(243, 183, queue, room, 8192, None, limit) == 4",
        ),
    ),
    "make a POSIX queue": then_solved(*CALL, "call(240, 180, b'mine', 0o102, 0o600, None)"),
    "leave a semaphore": _left(
        (*CALL, "call(66, 191, call(64, 190, 4242, 1, 0o1666), 0, 16, 7)"),
        *(*CALL, "assert call(66, 191, call(64, 190, 4242, 1, 0o1666), 0, 12, 0) == 7"),
    ),
    "make a semaphore": then_solved(*CALL, "call(64, 190, 0, 1, 0o1600)"),
    "leave shared memory of Python": _left(
        ("from multiprocessing import shared_memory", "shared_memory.SharedMemory('left', create=True, size=4096)"),
        *("from multiprocessing import shared_memory", "shared_memory.SharedMemory('left')"),
    ),
    "leave a file": _left(("open('left', 'w').write('x')",), "open('left').read()"),
    "leave a file in the folder above": _left(("open('../left', 'w').write('x')",), "open('../left').read()"),
    "leave a file in /tmp": _left(
        ("os.makedirs('/tmp', exist_ok=True)", "open('/tmp/left', 'w').write('x')"), *("open('/tmp/left').read()",)
    ),
    "leave a file in /dev/shm": _left(("open('/dev/shm/left', 'w').write('x')",), "open('/dev/shm/left').read()"),
    "leave a variable": _left(("os.environ['LEFT'] = 'x'",), "os.environ['LEFT']"),
    "leave a changed module": _left(("math.pi = 3",), "assert math.pi == 3"),
    "leave a process to find": _left(
        ("if os.fork() == 0: time.sleep(100)",), "assert [pid for pid in os.listdir('/proc') if pid.isdigit()]"
    ),
    "leave zombies": then_wrong("for _ in range(5):", "    if os.fork() == 0: os._exit(0)"),
    "leave orphans": then_wrong(
        "for _ in range(3):",
        "    if os.fork() == 0:",
        "        if os.fork() == 0: time.sleep(1000)",
        "        os._exit(0)",
    ),
    "leave a thread": then_wrong("threading.Thread(target=time.sleep, args=(1000,)).start()"),
    "leave an exit handler": then_wrong("atexit.register(time.sleep, 1000)"),
    "print after the end": Attack(
        "import os, time\nx = int(input())\nif os.fork() == 0:\n    time.sleep(0.2)\n    print(x * x, flush=True)\n"
        "os._exit(0)\n",
        script=True,
    ),
}
