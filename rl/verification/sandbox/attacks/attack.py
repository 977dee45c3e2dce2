"""An attack: its source, and how it is run."""

import dataclasses
import re
from collections.abc import Mapping

from rl.verification.sandbox.sandbox import Sandbox
from rl.verification.sandbox.warm_process import Outcome

TESTS = "assert solve(3) == 9 and solve(12345) == 152399025"
STDIN = "12345"
SQUARE = "152399025"

SOLVED = "def solve(x):\n    return x * x\n"
WRONG = "def solve(x):\n    return 0\n"

# Modules that attacks name without an import of them.
_MODULES = (
    *("_ctypes", "atexit", "builtins", "contextlib", "ctypes", "fcntl", "gc", "json", "math", "mmap", "os", "pickle"),
    *("re", "resource", "shutil", "signal", "socket", "stat", "struct", "subprocess", "sys", "threading", "time"),
)
# Lines that define `call(number on x86-64, on aarch64, *arguments)`, a system call that must succeed.
CALL = (
    "import ctypes, os, sys",
    "libc = ctypes.CDLL(None, use_errno=True)",
    "def call(x86, arm, *arguments):",
    "    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]",
    "    result = libc.syscall(x86 if os.uname().machine == 'x86_64' else arm, *wide)",
    "    assert result >= 0, os.strerror(ctypes.get_errno())",
    "    return result",
)


@dataclasses.dataclass(frozen=True)
class Attack:
    """A source with the places {secret} (a file), {variable}, {port} (of a listener) and {pid} (of the caller)."""

    source: str
    script: bool = False  # a program on standard input, else functions
    hangs: bool = False  # runs until its deadline
    before: str = ""  # a program that runs first, as an earlier answer
    tests: str = TESTS
    prelude: str = ""

    def fill(self, places: Mapping[str, object], source: str | None = None) -> str:
        """Return the source, or another one, with its places filled in."""
        return re.sub(
            r"\{(secret|variable|port|pid)(!r)?\}",
            lambda found: _text(places[found[1]], found[2]),
            self.source if source is None else source,
        )

    def run(self, sandbox: Sandbox, places: Mapping[str, object]) -> tuple[Outcome, bool]:
        """Return how the attack ended, and True if it got through."""
        source = self.fill(places)
        if self.before:
            sandbox.run_script(self.fill(places, self.before), "")
        if self.script:
            outcome = sandbox.run_script(source, STDIN)
            return outcome, outcome.passed and outcome.output.split() == [SQUARE]
        outcome = sandbox.run_tests(source, self.tests, prelude=self.prelude)
        return outcome, outcome.passed


def _text(value: object, quoted: str | None) -> str:
    return repr(value) if quoted else str(value)


def program(*lines: str) -> str:
    """Return lines as a program, behind the imports of the modules that they name."""
    source = "\n".join(lines)
    named = [name for name in _MODULES if re.search(rf"\b{name}\.", source)]
    return f"import {', '.join(named)}\n{source}" if named else source


def then_solved(*lines: str, before: str = "") -> Attack:
    """Return an attack that is right if these lines raise nothing."""
    return Attack(program(*lines, SOLVED), before=before)


def then_wrong(*lines: str, hangs: bool = False) -> Attack:
    """Return an attack that answers wrongly after these lines."""
    return Attack(program(*lines, WRONG), hangs=hangs)
