"""Cases of hostile input, each run and measured in a process of its own: what it said, CPU seconds and memory.

    python -m tests.measured MODULE [NAME ...]

MODULE has `CASES`, a dict of name -> function of an empty folder that must raise a `UserError`, and may have `prepare`
and `finish`.
"""

import importlib
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mesh.errors import UserError

SECONDS, MEMORY = 4.0, 200 << 20  # CPU seconds: 1 is asked for, of a fast processor; slow ones take three times that
Cases = Mapping[str, Callable[[Path], object]]


class Measured(NamedTuple):
    """One case.

    Attributes:
        said: the message; that of an error that is none of ours begins with RAW, none with NOT REFUSED.
        seconds: CPU seconds of the process and its children.
        memory: bytes by which its peak grew, or those of its largest child.
    """

    said: str
    seconds: float
    memory: int


def measured(module: str, *names: str) -> dict[str, Measured]:
    """Return the cases of a module, or those of these names; they are run one after the other, in one process."""
    # The shell between is for the peak of memory, which a process inherits from the one that started it.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "tests.measured", module, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: Measured(*row) for name, row in json.loads(done.stdout.splitlines()[-1]).items()}


def check(found: Mapping[str, Measured]) -> None:
    """Expect a short sentence for each, within the bounds."""
    wrong = {
        name: one
        for name, one in found.items()
        if one.said.startswith(("RAW", "NOT")) or len(one.said) > 1200 or not one.said.isprintable()
    }
    assert not wrong, {name: f"{one.said:.300}" for name, one in wrong.items()}
    slow = {name: one for name, one in found.items() if one.seconds > SECONDS or one.memory > MEMORY}
    assert not slow, slow


def _run(case: Callable[[Path], object], folder: Path) -> Measured:
    began, before = _seconds(), _peak(resource.RUSAGE_SELF)
    try:
        case(folder)
        said = "NOT REFUSED"
    except UserError as error:
        said = str(error).replace(str(folder), "")
    except BaseException as error:
        said = f"RAW {error!r:.300}"
    grown = _peak(resource.RUSAGE_SELF) - before
    return Measured(said, _seconds() - began, max(grown, _peak(resource.RUSAGE_CHILDREN)))


def _seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _peak(who: int) -> int:
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    cases = importlib.import_module(sys.argv[1])
    getattr(cases, "prepare", lambda: None)()
    rows = {}
    for title in sys.argv[2:] or cases.CASES:
        with tempfile.TemporaryDirectory() as place:
            rows[title] = _run(cases.CASES[title], Path(place))
            if sys.argv[2:]:
                print(title, rows[title], file=sys.stderr)
    getattr(cases, "finish", lambda: None)()
    print(json.dumps(rows))
