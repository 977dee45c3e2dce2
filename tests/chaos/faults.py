"""A seeded schedule of faults, and their injection into a run."""

import dataclasses
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from tests.benches.recovery.run import COMMAND, DRIVER, PATIENCE_S, RAYLET, WatchedRun

ROLES = ("trainer", "controller", "parameter-server", "verifier", "worker-0", "worker-1")


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A kill of these targets at once, a stop for `seconds`, or a request to leave (SIGTERM), as of a preemption."""

    kind: Literal["kill", "stop", "leave"]
    targets: tuple[str, ...]
    seconds: float = 0.0


def one_of_each(seed: int) -> list[Fault]:
    """Return a kill of every role, and a stop and a SIGTERM of a worker and of the trainer, in the seed's order."""
    faults = [Fault("kill", (role,)) for role in (*ROLES, "reference") if role != "worker-1"]
    faults += [Fault("stop", ("worker-1",), 2.0), Fault("stop", ("trainer",), 1.0)]
    faults += [Fault("leave", ("worker-1",)), Fault("leave", ("trainer",))]
    random.Random(seed).shuffle(faults)
    return faults


def many(seed: int, count: int, roles: Sequence[str] = ROLES) -> list[Fault]:
    """Return `count` faults: mostly kills of one role, some of two at once or of the command, some stops."""
    rng = random.Random(seed)
    faults = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.15:
            faults.append(Fault("kill", (rng.choice((COMMAND, DRIVER, RAYLET)),)))
        elif kind < 0.35:
            faults.append(Fault("kill", tuple(rng.sample(roles, 2))))
        elif kind < 0.6:
            faults.append(Fault("stop", (rng.choice(roles),), rng.uniform(0.5, 8.0)))
        else:
            faults.append(Fault("kill", (rng.choice(roles),)))
    return faults


def run_through(
    run: WatchedRun,
    faults: Iterable[Fault],
    seed: int = 0,
    *,
    look: Callable[[], None] = lambda: None,
    updates: int = 4,
) -> None:
    """Start the run, inject each fault when the run has recovered from the one before, then end it by SIGTERM.

    `look` is called once, after the first update; each fault comes after 1 to `updates` more.
    """
    rng = random.Random(seed)
    run.start()
    run.wait_for("the first update", lambda: run.count("update") > 0, PATIENCE_S)
    look()
    for fault in faults:
        calm = run.step + rng.randint(1, updates)
        run.wait_for(f"update {calm}", lambda calm=calm: run.step >= calm, PATIENCE_S)
        time.sleep(rng.uniform(0.0, 0.5))
        if fault.kind == "kill":
            run.kill_and_wait(*fault.targets)
        elif fault.kind == "leave":
            leave(run, *fault.targets)
        else:
            stop(run, fault.targets, fault.seconds)
    assert run.stop() == 0, run.said()


def leave(run: WatchedRun, target: str) -> None:
    """Send SIGTERM to a role, and wait until it is back."""
    starts = run.count("start", target)
    assert run.signal(target, signal.SIGTERM, "leave")
    run.wait_for(f"{target} is back", lambda: run.count("start", target) > starts, PATIENCE_S)
    run.wait_for_update(f"an update after {target} was asked to leave")


def stop(run: WatchedRun, targets: Sequence[str], seconds: float) -> None:
    """Send SIGSTOP, and SIGCONT after `seconds`: a straggler."""
    for target in targets:
        assert run.signal(target, signal.SIGSTOP, "stop")
    time.sleep(seconds)
    for target in targets:
        assert run.signal(target, signal.SIGCONT, "continue")
    run.wait_for_update(f"an update after {' and '.join(targets)} continued")


def flip_bytes(checkpoint: Path) -> Path:
    """Damage the largest parameter file of a checkpoint in its middle; returns the file."""
    files = [path for path in (checkpoint / "params").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    for at in range(len(content) // 2, min(len(content) // 2 + 64, len(content))):
        content[at] ^= 0xFF
    largest.write_bytes(content)
    return largest
