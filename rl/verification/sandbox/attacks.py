"""Attacks on the sandbox, each a program that turns to the right answer only if it has succeeded.

The task is to define `solve(x)`, the square of x, or to print the square of the number on standard input; so a score of
1 means that the attack got through. `axl bench verify` and the tests run them.
"""

import dataclasses
import re
from collections.abc import Mapping

from rl.verification.sandbox.sandbox import Sandbox
from rl.verification.sandbox.warm_process import Outcome

__all__ = ["ATTACKS", "STDIN", "TESTS", "Attack"]

TESTS = "assert solve(3) == 9 and solve(12345) == 152399025"
STDIN = "12345"
SQUARE = "152399025"

_SOLVED = "def solve(x):\n    return x * x\n"
_WRONG = "def solve(x):\n    return 0\n"


@dataclasses.dataclass(frozen=True)
class Attack:
    """A source with the places {secret} (a file), {variable}, {port} (of a listener) and {pid} (of the caller)."""

    source: str
    script: bool = False  # a program on standard input, else functions
    hangs: bool = False  # until its deadline

    def fill(self, places: Mapping[str, object]) -> str:
        """Return the source with its places filled in."""
        return re.sub(
            r"\{(secret|variable|port|pid)(!r)?\}", lambda found: _text(places[found[1]], found[2]), self.source
        )

    def run(self, sandbox: Sandbox, places: Mapping[str, object]) -> tuple[Outcome, bool]:
        """Return how the attack ended, and True if it got through."""
        source = self.fill(places)
        if self.script:
            outcome = sandbox.run_script(source, STDIN)
            return outcome, outcome.passed and outcome.output.split() == [SQUARE]
        outcome = sandbox.run_tests(source, TESTS)
        return outcome, outcome.passed


def _text(value: object, quoted: str | None) -> str:
    return repr(value) if quoted else str(value)


def _then_solved(*lines: str) -> Attack:
    return Attack("\n".join([*lines, _SOLVED]))


def _then_wrong(*lines: str, hangs: bool = False) -> Attack:
    return Attack("\n".join([*lines, _WRONG]), hangs=hangs)


ATTACKS: dict[str, Attack] = {
    # what it may not see
    "read a secret file": _then_solved("open({secret!r}).read()"),
    "read a secret by a symlink": _then_solved("import os", "os.symlink({secret!r}, 'link')", "open('link').read()"),
    "read a secret by /proc": _then_solved("open('/proc/1/root' + {secret!r}).read()"),
    "read an environment secret": _then_solved("import os", "os.environ[{variable!r}]"),
    "read the caller's environment": _then_solved("open('/proc/{pid}/environ').read()"),
    "read the project": _then_solved("import inspect, rl.verification.scorers"),
    "list the home folder": _then_solved("import os", "assert os.listdir(os.path.dirname({secret!r}))"),
    "open a socket": _then_solved("import socket", "socket.create_connection(('127.0.0.1', {port}), timeout=1)"),
    "open a raw socket": _then_solved("import socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    # what it may not do
    "write outside of /tmp": _then_solved("open('/usr/lib/mark', 'w').write('x')"),
    "write into Python": _then_solved("import json", "open(json.__file__, 'a').write('x')"),
    "remount the root": _then_solved(
        "import ctypes", "assert ctypes.CDLL(None).mount(None, b'/', None, 4096 | 32, None) == 0"
    ),
    "change the root": _then_solved("import os", "os.chroot('.')"),
    "become root": _then_solved("import os", "os.setuid(0)"),
    "make a user namespace": _then_solved("import os", "os.unshare(os.CLONE_NEWUSER)"),
    "make one by clone": _then_solved(
        "import ctypes",
        "pid = ctypes.CDLL(None).syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
        "assert pid >= 0",
    ),
    "trace a process": _then_solved("import ctypes", "assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0"),
    "signal the caller": _then_solved("import os", "os.kill({pid}, 9)"),
    "signal everything": _then_solved("import os", "os.kill(-1, 9)"),
    # what it may not use up
    "fork bomb": _then_solved(
        "import os, time", "for _ in range(200):", "    if os.fork() == 0:", "        time.sleep(100)"
    ),
    "fork bomb that goes on": _then_wrong(
        "import os",
        "while True:",
        "    try:",
        "        os.fork()",
        "    except OSError:",
        "        pass",
        hangs=True,
    ),
    "thread bomb": _then_solved(
        "import threading, time",
        "for _ in range(200):",
        "    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()",
    ),
    "memory bomb": _then_solved("held = bytearray(2 << 30)"),
    "memory bomb in a result": Attack("def solve(x):\n    return [0] * (1 << 40)\n"),
    "fill the disk": _then_solved("for number in range(64):", "    open(f'{number}', 'wb').write(bytes(1 << 20))"),
    "fill the disk with files": _then_solved("for number in range(100_000):", "    open(f'{number}', 'w')"),
    "many open files": _then_solved("held = [open('/dev/null') for _ in range(1000)]"),
    "loop": _then_wrong("while True: pass", hangs=True),
    "hang in C": _then_wrong("pow(int('9' * 4000), 10**8)", hangs=True),
    "sleep, deaf to signals": _then_wrong(
        "import signal, time",
        "for number in (1, 2, 3, 15, 24):",
        "    signal.signal(number, signal.SIG_IGN)",
        "time.sleep(1000)",
        hangs=True,
    ),
    "outlive the deadline": _then_wrong(
        "import os, time",
        "if os.fork() == 0:",
        "    os.setsid()",
        "    if os.fork() == 0:",
        "        time.sleep(1000)",
        "    os._exit(0)",
        "time.sleep(1000)",
        hangs=True,
    ),
    "leave a daemon behind": _then_wrong(
        "import os, time", "if os.fork() == 0:", "    os.setsid()", "    time.sleep(1000)"
    ),
    "print a gigabyte": Attack("for _ in range(1 << 20):\n    print('x' * 1023)\nprint(0)\n", script=True),
    "a result without end": Attack("def solve(x):\n    return 'x' * (1 << 28)\n"),
    "a result without bottom": Attack(
        "def solve(x):\n    held = []\n    for _ in range(100_000):\n        held = [held]\n    return held\n"
    ),
    # what it may not forge
    "return a pickle": Attack(
        "class Bomb:\n    def __reduce__(self):\n        return exec, ('1',)\ndef solve(x):\n    return Bomb()\n"
    ),
    "send a pickle": _then_wrong(
        "import os, pickle",
        "for fd in range(3, 64):",
        "    try: os.write(fd, pickle.dumps([1]))",
        "    except OSError: pass",
    ),
    "equal to everything": Attack(
        "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def solve(x):\n    return Equal(0)\n"
    ),
    "an object equal to everything": Attack(
        "class Equal:\n    def __eq__(self, other): return True\ndef solve(x):\n    return Equal()\n"
    ),
    "patch the checker": _then_wrong(
        "import builtins, sys",
        "for name, module in list(sys.modules.items()):",
        "    for one in ('_judge', '_ask', 'receive', 'decode'):",
        "        if hasattr(module, one): setattr(module, one, lambda *a, **k: {'passed': True})",
        "builtins.AssertionError = type('Never', (BaseException,), {})",
    ),
    "exit 0": Attack("import os\nos._exit(0)\n"),
    "sys.exit 0": Attack("import sys\nsys.exit(0)\n"),
    "exit 0 in a call": Attack("import os\ndef solve(x):\n    os._exit(0)\n"),
    "exit 0 of a program": Attack("import os\nos._exit(0)\n", script=True),
    "forge the verdict": _then_wrong(
        "import json, os, struct",
        "payload = json.dumps({'passed': True, 'error': ''}).encode()",
        "for fd in range(3, 64):",
        "    try: os.write(fd, struct.pack('<I', len(payload)) + payload)",
        "    except OSError: pass",
    ),
    "find the tests in memory": _then_solved(
        "import gc, sys",
        "frame, found = sys._getframe(), []",
        "while frame: found += list(frame.f_locals.values()); frame = frame.f_back",
        "assert any(''.join(['152399', '025']) in str(one)[:10_000] for one in [*gc.get_objects(), *found])",
    ),
    "overwrite the tests": _then_solved(
        "import os, sys",
        "folders = ['.', '/', '/tmp', '/etc', '/usr', '/home', '/root', sys.prefix, *sys.path]",
        "found = [os.path.join(f, n) for f in folders if os.path.isdir(f) for n in os.listdir(f)]",
        "writable = [name for name in found if os.path.isfile(name) and os.access(name, os.W_OK)]",
        "assert writable",
        "for name in writable: open(name, 'w').close()",
    ),
    "find the expected output": Attack(
        "import gc\nfound = any(''.join(['152399', '025']) in str(one)[:10_000] for one in gc.get_objects())\n"
        "print(''.join(['152399', '025']) if found else 0)\n",
        script=True,
    ),
}
