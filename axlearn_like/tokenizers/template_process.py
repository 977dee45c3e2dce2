"""The process beside this one in which chat templates are rendered, as they are programs of strangers.

Jinja's sandbox keeps a template from files and the interpreter, but not from loops without end or texts without bound,
and one operation of Python's can take all time or memory. A process is ended by the operating system instead. One
serves all templates of this process; a request that ends it leaves the next one a new one.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mesh.errors import UserError, install_hint

CPU_SECONDS = 0.8  # limit of a request; templates in use take milliseconds
MEMORY = 200 << 20  # bytes; Python and Jinja have 30 MB of it
LENGTH = 16 << 20  # characters of a rendered text
_WAIT = 60.0  # seconds for an answer, on a machine that does other work
_PASSED_ON = ("TZ", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class ExceededError(Exception):
    """A request ended the process; the message says by which bound."""


class TemplateProcess:
    """The process, started at the first request, and again after a request that ended it; threads take turns."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process, if it is not there; it gets ready while this one goes on."""
        with self._lock:
            self._started()

    def ask(self, source: str, variables: dict[str, Any] | None) -> dict[str, Any]:
        """Return the answer of `template_program` to a template and its variables.

        Raises:
            ExceededError: it took more than its bounds; ValueError, RecursionError: the variables are no JSON.
        """
        request = json.dumps([source, variables], ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(request) > MEMORY // 4:
            raise ExceededError(f"a conversation of {len(request):,} bytes; expected at most {MEMORY // 4:,}")
        framed = len(request).to_bytes(8, "little") + request
        with self._lock:
            for attempt in range(2):
                process = self._started()
                try:
                    return json.loads(_exchange(process, framed))
                except TimeoutError:  # the rest of the answer would be the next one's
                    self._close(kill=True)
                    raise ExceededError(f"more than {_WAIT:g} seconds") from None
                except (OSError, EOFError):
                    process.kill()
                    code = process.wait()
                    self._process = None
                    if code == -signal.SIGPROF:
                        raise ExceededError(f"more than {CPU_SECONDS} seconds of CPU time") from None
                    if attempt:  # first failure: the idle process may have been ended
                        raise ExceededError(f"the process that renders it ended (status {code})") from None
                except BaseException:  # likewise
                    self._close(kill=True)
                    raise
        raise AssertionError

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._close(kill=False)

    def _close(self, kill: bool) -> None:
        if self._process is not None:
            if kill:
                self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            program = Path(__file__).with_name("template_program.py")
            bounds = (str(CPU_SECONDS), str(MEMORY), str(LENGTH))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(program), *_folders(), *bounds],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            )
        return self._process


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """Send a request, and return the answer (EOFError: the process has ended; TimeoutError)."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(request)
    process.stdin.flush()
    output = process.stdout.fileno()
    poll, answer, wanted = select.poll(), bytearray(), 8
    poll.register(output, select.POLLIN)
    while len(answer) < wanted:
        if not poll.poll(1000 * _WAIT):
            raise TimeoutError
        part = os.read(output, 1 << 20)
        if not part:
            raise EOFError
        answer += part
        if len(answer) >= 8:
            wanted = 8 + int.from_bytes(answer[:8], "little")
    return bytes(answer[8:])


def _folders() -> list[str]:
    """Return the folders of the packages that the program needs."""
    found = []
    for name in ("jinja2", "markupsafe"):
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"a chat template needs the package {name}; {install_hint('hf')}")
        found.append(str(Path(spec.submodule_search_locations[0]).parent))
    return list(dict.fromkeys(found))


def template_process() -> TemplateProcess:
    """Return the one of this process."""
    return _here[0]


def _renew() -> None:
    _here[0] = TemplateProcess()  # a fork's own: two processes cannot share a pipe


_here = [TemplateProcess()]
os.register_at_fork(after_in_child=_renew)
atexit.register(lambda: template_process().close())
