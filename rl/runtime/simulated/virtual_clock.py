"""The virtual clock: a heap of events, and threads of which one runs at a time, so that real code waits in no time.

A simulated process is a thread that holds the turn until it waits. Then it takes the next events off the heap itself:
calls what is to be called, and gives the turn to the thread whose time has come. So nothing depends on the scheduling
of threads, and a run repeats. A killed process never gets the turn again: as after SIGKILL, none of its `finally` runs.
"""

import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any, override

from axlearn_like.run.clock import RunClock

_STACK = 512 * 1024  # bytes of a thread's stack: there may be thousands
_EPOCH = 1_700_000_000.0  # wall time at which every simulation begins


class Unwound(BaseException):
    """The simulation is over; ends the threads that are left."""


class SimulatedProcess:
    """A thread of a simulated process. Threads of one `group` are killed together."""

    def __init__(self, name: str, group: str, target: Callable[[], None], clock: "VirtualClock"):
        self.name, self.group, self.target, self._clock = name, group, target, clock
        self.turn = threading.Lock()
        self.turn.acquire()
        self.dead, self.over, self.started = False, False, False
        self.waits, self.notified = 0, False  # number of the current wait, and how it ended
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def resume(self) -> None:
        """Give the turn to its thread."""
        if not self.started:
            self.started = True
            self._thread.start()
        self.turn.release()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def is_alive(self) -> bool:
        """Return True until its function has returned, or it was killed."""
        return not self.over and not self.dead

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self._clock.closing:
                self.target()
        except Unwound:
            pass
        except BaseException as error:  # raised by `run`
            self._clock.fail(error)
        self.over = True
        if not self._clock.closing:
            self._clock.pass_on(None)


class VirtualClock(RunClock):
    """Simulated seconds from 0.

    >>> from rl.runtime.simulated.virtual_clock import VirtualClock
    >>> clock, said = VirtualClock(), []
    >>> def process(name, seconds):
    ...     for _ in range(2):
    ...         clock.sleep(seconds)
    ...         said.append((name, clock()))
    >>> _ = clock.spawn("a", lambda: process("a", 30.0)), clock.spawn("b", lambda: process("b", 45.0))
    >>> clock.run()
    >>> said
    [('a', 30.0), ('b', 45.0), ('a', 60.0), ('b', 90.0)]
    """

    def __init__(self) -> None:
        self.now, self.closing = 0.0, False
        self._events: list[tuple[float, int, Any, int]] = []  # heap of (time, order, process or timer, its wait)
        self._order = itertools.count()
        self._main = threading.Lock()
        self._main.acquire()
        self._stopped, self._error = False, None
        self._processes = list[SimulatedProcess]()
        self.current: SimulatedProcess | None = None

    @override
    def __call__(self) -> float:
        return self.now

    @override
    def wall(self) -> float:
        return _EPOCH + self.now

    @override
    def cpu(self) -> float:
        return 0.0  # durations stand for it

    @override
    def sleep(self, seconds: float) -> None:
        self.park(max(seconds, 0.0))

    @override
    def condition(self) -> threading.Condition:
        return _VirtualCondition(self)

    @override
    def lock(self) -> Any:
        return _VirtualLock(self)

    @override
    def timer(self, seconds: float, call: Callable[[], None]) -> "Timer":
        timer = Timer(call)
        heapq.heappush(self._events, (self.now + max(seconds, 0.0), next(self._order), timer, 0))
        return timer

    @override
    def thread(self, target: Callable[[], None], name: str) -> SimulatedProcess:
        group = self.current.group if self.current is not None else name
        return self.spawn(name, target, group)

    def spawn(self, name: str, target: Callable[[], None], group: str | None = None) -> SimulatedProcess:
        """Start a process now; `group`: None: its name."""
        process = SimulatedProcess(name, group or name, target, self)
        self._processes.append(process)
        self._push(self.now, process)
        return process

    def kill(self, group: str) -> int:
        """Kill all threads of a group but the one that asks, at once; returns how many there were."""
        found = [one for one in self._processes if one.group == group and one.is_alive() and one is not self.current]
        for process in found:
            process.dead = True
        return len(found)

    def park(self, timeout: float | None) -> bool:
        """Give up the turn until `wake`, or for `timeout` seconds; returns True if woken."""
        process = self.waiting()
        if self.closing:
            raise Unwound
        process.waits, process.notified = process.waits + 1, False
        if timeout is not None:
            self._push(self.now + timeout, process)
        self.pass_on(process)
        if self.closing:
            raise Unwound
        return process.notified

    def waiting(self) -> SimulatedProcess:
        """Return the process whose turn it is."""
        if self.current is None:
            raise RuntimeError("nothing but a simulated process can wait for simulated time")
        return self.current

    def wake(self, process: SimulatedProcess) -> None:
        """End the current wait of a process, now."""
        if not process.notified:
            process.notified = True
            self._push(self.now, process)

    def pass_on(self, process: SimulatedProcess | None) -> None:
        """Go on with the next events, until it is the turn of `process` again; None: it has ended."""
        while not self._stopped and self._error is None and self._events:
            when, _, what, wait = heapq.heappop(self._events)
            if isinstance(what, Timer):
                if not what.cancelled:
                    self.now, self.current = when, None
                    try:
                        what.fire()
                    except BaseException as error:
                        self.fail(error)
                continue
            if what.dead or what.over or what.waits != wait:
                continue
            self.now, self.current = when, what
            if what is not process:
                what.resume()
                if process is not None:
                    process.turn.acquire()
            return
        self._main.release()
        if process is not None:
            process.turn.acquire()

    def fail(self, error: BaseException) -> None:
        """End the simulation with an error, which `run` raises."""
        self._error = self._error or error

    def stop(self) -> None:
        """End the simulation after the current event."""
        self._stopped = True

    def run(self) -> None:
        """Let time pass until `stop`, or until nothing is left to happen; raises what a process has raised."""
        before = threading.stack_size(_STACK)
        try:
            self.pass_on(None)
            self._main.acquire()
        finally:
            threading.stack_size(before)
            self._unwind()
        if self._error is not None:
            raise self._error

    def _unwind(self) -> None:
        """End all threads, one after the other."""
        self.closing = True
        for process in self._processes:
            if process.started and not process.over:
                self.current = process
                process.turn.release()
                process.join()
        self.current = None

    def _push(self, when: float, process: SimulatedProcess) -> None:
        heapq.heappush(self._events, (when, next(self._order), process, process.waits))


class Timer:
    """A call that is to come."""

    def __init__(self, call: Callable[[], None]):
        self._call, self.cancelled, self._fired = call, False, False

    def fire(self) -> None:
        """Make the call."""
        self._fired = True
        self._call()

    def cancel(self) -> None:
        """Call nothing."""
        self.cancelled = True

    def is_alive(self) -> bool:
        """Return True until the call, if it is not cancelled."""
        return not self._fired and not self.cancelled


class _VirtualCondition(threading.Condition):
    """A condition of the virtual clock. One thread runs at a time, so its lock is never waited for."""

    def __init__(self, clock: VirtualClock):
        super().__init__()
        self._clock, self._parked = clock, dict[SimulatedProcess, None]()

    @override
    def wait(self, timeout: float | None = None) -> bool:
        process = self._clock.waiting()
        self._parked[process] = None
        self.release()
        try:
            return self._clock.park(timeout)
        finally:
            self.acquire()
            self._parked.pop(process, None)

    @override
    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._clock() + timeout
        while not (result := predicate()):
            left = None if end is None else end - self._clock()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    @override
    def notify(self, n: int = 1) -> None:
        for process in list(self._parked)[:n]:
            del self._parked[process]
            self._clock.wake(process)

    @override
    def notify_all(self) -> None:
        self.notify(len(self._parked))


class _VirtualLock:
    """A lock of the virtual clock."""

    def __init__(self, clock: VirtualClock):
        self._clock, self._held, self._parked = clock, False, list[SimulatedProcess]()

    def acquire(self, blocking: bool = True) -> bool:
        while self._held:
            if not blocking:
                return False
            self._parked.append(self._clock.waiting())
            self._clock.park(None)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        if self._parked:
            self._clock.wake(self._parked.pop(0))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
