"""A command whose driver and whose Ray may be killed: it is their parent, and starts again what dies.

`run_drivers` divides a command into forks of one image, which has imported all. The command itself only waits. The
keeper starts Ray and holds it. The driver does the work. Where the driver dies, the roles work on, and the next one,
forked in milliseconds, finds them by name. Where Ray dies, another keeper starts it, and the same driver all roles. If
the command itself is killed, the kernel ends the others.
"""

import dataclasses
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from rl.runtime.node.forks import end_with
from rl.runtime.node.warm import may_be_forked

AGAIN = 75  # exit status of a driver that has lost its raylet, and asks for the next one
MAX_DEATHS = 5  # limit of a driver's deaths without an update in between; more are a fault of the run
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_STOPS = _FORWARDED[:2]
_AWAITED = {signal.SIGCHLD, *_FORWARDED}
_TICK = 0.1  # seconds between two looks of an observer
_LONGEST = 1 << 16  # bytes of the board
_PATIENCE = 10.0  # seconds for Ray to end


class Observer(Protocol):
    """Work of a command while its driver works."""

    @property
    def step(self) -> int: ...
    def begin_ray(self) -> None: ...
    def look(self, driver: int, ray: Mapping[str, Any]) -> bool: ...
    def died(self, driver: int, cause: str) -> None: ...


class Kept:
    """The Ray that a command keeps for its drivers.

    Attributes:
        number: number of this driver; of two, the later one's counts.
        token: secret of the run's roles, and a part of their namespace.
        group: process group of Ray's processes.
    """

    def __init__(self, board: int):
        """`board`: file in memory that tells where Ray is."""
        self._board, self._over = board, 0
        self._asked, self._asks = os.pipe()
        self.number, self.token, self.group = 0, secrets.token_hex(16), os.getpgid(0)

    def tell(self, **fields: Any) -> None:
        """Write where Ray is, or why it is not."""
        os.ftruncate(self._board, 0)
        os.pwrite(self._board, json.dumps(fields).encode() + b"\n", 0)

    def told(self) -> dict[str, Any]:
        """Return what was told last, or nothing."""
        text = os.pread(self._board, _LONGEST, 0)
        return json.loads(text) if text.endswith(b"\n") else {}

    def wait_until_asked(self) -> None:
        """Wait until a driver needs Ray: one whose run is finished needs none."""
        os.read(self._asked, 1)

    def wait(self) -> dict[str, Any]:
        """Wait until there is a Ray, which this driver has not given up, and return where it is."""
        os.write(self._asks, b"?")
        while (found := self.told()).get("keeper", self._over) == self._over:
            time.sleep(0.01)
        self._over = found["keeper"]
        return found


@dataclasses.dataclass
class _Here:
    """Facts about this process: `kept` is set in a driver."""

    kept: Kept | None = None


_here = _Here()


def kept_ray() -> Kept | None:
    """Return the Ray that the command of this driver keeps; None: this process starts Ray itself, or joins one."""
    return _here.kept


def run_drivers(keep: Callable[[Kept], None], observer: Observer) -> bool:
    """Return in each driver; the command ends here, as its last driver does.

    Args:
        keep: starts Ray, tells where it is, and returns when one of its processes has died.
        observer: what the command does besides.

    Returns:
        True in a driver; False if this process cannot be forked, and so is the driver itself.
    """
    if not may_be_forked():
        return False
    _Command(keep, observer).run()
    return True


class _Command:
    def __init__(self, keep: Callable[[Kept], None], observer: Observer):
        self._keep, self._observer = keep, observer
        self._kept = Kept(os.memfd_create("axl-ray"))
        self._driver = self._keeper = 0
        self._asked = False  # stopped by a signal
        self._deaths, self._reached = 0, 0

    def run(self) -> None:
        """Run drivers, one after the other; returns in each of them."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        watched = True
        while True:
            if not self._keeper and self._fork("_keeper", before):
                self._run_keeper()
            if not self._driver and self._fork("_driver", before):
                _here.kept = self._kept
                return
            found = signal.sigtimedwait(_AWAITED, _TICK) if watched else signal.sigwaitinfo(_AWAITED)
            if found is not None and found.si_signo in _FORWARDED:
                self._asked = self._asked or found.si_signo in _STOPS
                os.kill(self._driver, found.si_signo)
            if (status := _ended(self._driver)) is not None:
                self._end_driver(status)
            if _ended(self._keeper) is not None:
                self._keeper = 0
            if self._driver and self._keeper:
                watched = watched and self._observer.look(self._driver, self._kept.told())

    def _fork(self, which: str, mask: set[Any]) -> bool:
        """Fork, and keep the pid; returns True in the child, which ends with the command."""
        if which == "_keeper":
            self._kept.tell(lost=self._kept.told().get("lost"))
            self._observer.begin_ray()
        else:
            self._kept.number += 1
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        if (pid := os.fork()) != 0:
            setattr(self, which, pid)
            return False
        end_with(parent)
        if which == "_driver":
            os.setpgid(0, 0)  # Ctrl-C is the command's, which passes it on
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return True

    def _run_keeper(self) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._kept.wait_until_asked()
            self._keep(self._kept)
        except Exception as error:
            self._kept.tell(keeper=os.getpid(), error=f"{type(error).__name__}: {error}"[:1000])
        finally:
            os._exit(0)

    def _end_driver(self, status: int) -> None:
        """End as the driver did, unless it was killed: then another one begins."""
        cause = signal.Signals(-status).name if status < 0 else ""
        step = self._observer.step
        self._deaths, self._reached = (self._deaths + 1, self._reached) if step <= self._reached else (1, step)
        if (cause or status == AGAIN) and not self._asked and self._deaths < MAX_DEATHS:
            if cause:
                self._observer.died(self._driver, cause)
            self._driver = 0
            return
        status = 0 if status == AGAIN and self._asked else status
        self._end_keeper(remove=status == 0)
        if cause:
            if -status != signal.SIGKILL:
                signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
            os.kill(os.getpid(), -status)
        os._exit(status)

    def _end_keeper(self, *, remove: bool) -> None:
        folder = self._kept.told().get("folder")
        give_up = time.monotonic() + _PATIENCE
        if self._keeper:
            os.kill(self._keeper, signal.SIGTERM)
        while self._keeper and _ended(self._keeper) is None:
            if time.monotonic() > give_up:
                os.kill(self._keeper, signal.SIGKILL)
            time.sleep(0.01)
        if remove and folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # Ray's logs matter after errors only


def _ended(pid: int) -> int | None:
    """Return the exit status of a child that has ended, its signal as a negative number; None: it lives."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None
