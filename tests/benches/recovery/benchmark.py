"""`axl bench recovery`: each role of a run is killed repeatedly; recovery times, and a check of the results.

One run under Ray is disturbed from start to end (a killed command is restarted, as a supervisor would do). Then the
same updates are made in one process without kills, and the files that both wrote are compared.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.run.scratch import scratch
from mesh.errors import UserError, did_you_mean
from rl.runtime.simulated.result import measured_ettr
from tests.benches.recovery.compare import compare, make_undisturbed
from tests.benches.recovery.figures import Recovery, recoveries, role_of, seconds_by_role
from tests.benches.recovery.job import recovery_job, undisturbed
from tests.benches.recovery.run import COMMAND, DRIVER, PATIENCE_S, RAYLET, RunFailed, WatchedRun
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import Say

BENCHMARK = "recovery"
ELASTIC = {"elastic": signal.SIGKILL, "elastic-stopped": signal.SIGSTOP}
ROLES = ("trainer", "controller", "parameter-server", "verifier", "worker", *ELASTIC, DRIVER, RAYLET, COMMAND)
JOB = "tests.benches.recovery.job:recovery_job"
SPARES = ("trainer-spare-0", "worker-spare-0")
_CALM_UPDATES = (2, 9)  # updates from one recovery to the next kill
_SECONDS = {
    "seconds": "update_s",
    "back_seconds": "back_s",
    "longest_gap_seconds": "gap_s",
    "back_cpu_seconds": "back_cpu_s",
}


def find_roles(names: Iterable[str]) -> list[str]:
    """Return the roles of these names; all roles if there are no names.

    Raises:
        UserError: there is no such role.
    """
    asked = list(names)
    for name in asked:
        if name not in ROLES:
            raise UserError(f"benchmark {BENCHMARK} has no role {name!r}{did_you_mean(name, ROLES)}")
    return [role for role in ROLES if role in asked] if asked else list(ROLES)


@dataclasses.dataclass(frozen=True)
class Kills:
    """How a run is disturbed.

    Attributes:
        each: kills of each role.
        roles: from `ROLES`.
        seed: for the order and the times of the kills.
        minutes: time after which no further kill begins; None: no limit.
        every: seconds from one kill to the next, at least.
        spares: warm processes that take over, of the trainer and of workers: 0 or 1.
    """

    each: int
    roles: Sequence[str]
    seed: int = 0
    minutes: float | None = None
    every: float = 0.0
    spares: int = 1

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the command that is disturbed."""
        return ("--set", f'standby={{"trainer": {self.spares}, "worker": {self.spares}}}') if self.spares else ()


def run(kills: Kills, say: Say, *, keep: Path | None = None) -> dict[str, Any]:
    """Return everything that `--json` prints; `keep`: a new directory for the two runs, which are deleted otherwise."""
    where = machine()  # measured before our own load
    with scratch("bench-recovery") as temporary:
        folder = keep or temporary
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with WatchedRun(folder / "disturbed", JOB, kills.options) as watched:
            disturb(watched, kills, say)
        seconds = time.monotonic() - began
        say(f"the same {watched.step} updates again, in one process")
        calm = make_undisturbed(folder / "undisturbed", undisturbed(watched.step))
        compared = compare(folder / "disturbed", calm, watched.step)
        return summarise(recoveries(watched.events), watched.events) | {
            "bench": BENCHMARK,
            "spares": kills.spares,
            "ettr": round(measured_ettr(watched.events)["ettr"], 4),
            "updates": watched.step,
            "disturbed_s": round(seconds, 1),
            **compared,
            "machine": where,
            **circumstances(),
        }


def schedule(kills: Kills) -> list[str]:
    """Return each role as often as asked: rounds of all in a random order, workers alternately, new elastic ones."""
    rng = random.Random(kills.seed)
    order = [role for _ in range(kills.each) for role in rng.sample(kills.roles, len(kills.roles))]
    for role, count in (("worker", recovery_job().workers), *((role, kills.each) for role in ELASTIC)):
        for number, index in enumerate([index for index, one in enumerate(order) if one == role]):
            order[index] = f"{role}-{number % count}"
    return order


def disturb(run: WatchedRun, kills: Kills, say: Say) -> None:
    """Kill role after role, each after the previous one is back and some updates are done; then end the run."""
    rng, targets = random.Random(kills.seed), schedule(kills)
    spares = SPARES if kills.spares else ()
    end = math.inf if kills.minutes is None else time.monotonic() + 60 * kills.minutes
    run.start()
    run.wait_for("the first update", lambda: run.count("update") > 0, PATIENCE_S)
    for number, target in enumerate(targets, start=1):
        if time.monotonic() > end:
            say(f"out of time after {number - 1} of {len(targets)} kills")
            break
        calm, due = run.step + rng.randint(*_CALM_UPDATES), time.monotonic() + kills.every
        ready = lambda calm=calm, due=due: run.step >= calm and time.monotonic() >= due and run.prepared(spares)  # noqa: E731
        run.wait_for(f"update {calm}, and spares", ready, PATIENCE_S)
        time.sleep(rng.uniform(0.0, 0.5))  # any moment of an update
        if (signum := ELASTIC.get(role_of(target))) is None:
            run.kill_and_wait(target)
        else:
            run.join(target)
            run.lose(target, signum)
            run.leave(target)
        say(f"kill {number} of {len(targets)}: {target} at update {run.step}")
    status = run.stop()
    if status:
        raise RunFailed(f"the run ended with status {status} after SIGTERM; it said:\n{run.said()[-2000:]}")


def summarise(found: Sequence[Recovery], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys of the result that come from the kills and the event log."""
    updates = [row["step"] for row in events if row["event"] == "update" and row["role"] == "trainer"]
    counts = collections.Counter(role_of(recovery.target) for recovery in found)
    return {
        "kills": dict(sorted(counts.items())),
        **{name: seconds_by_role(found, field) for name, field in _SECONDS.items()},
        "lost_steps": sum(recovery.lost for recovery in found),
        "redone_steps": sum(recovery.redone for recovery in found),
        "double_consumed": double_consumed(events),
        "updates_made": len(updates),
        "each": [dataclasses.asdict(recovery) for recovery in found],
    }


def double_consumed(events: Iterable[Mapping[str, Any]]) -> int:
    """Return the updates of a step that the same incarnation of the trainer had already made."""
    seen: set[int] = set()
    twice = 0
    for row in events:
        if row["role"] == "trainer" and row["event"] == "start":
            seen = set()
        elif row["role"] == "trainer" and row["event"] == "update":
            twice += row["step"] in seen
            seen.add(row["step"])
    return twice


def succeeded(result: Mapping[str, Any]) -> bool:
    """Return whether the run recovered from every kill and nothing was lost, duplicated or changed."""
    whole = all(each["update_s"] is not None and each["back_s"] is not None for each in result["each"])
    return whole and result["bit_identical"] and not result["lost_steps"] and not result["double_consumed"]
