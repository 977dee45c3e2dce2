"""`axl bench recovery`: each role of a run is killed repeatedly; recovery times, and a check of the results.

One run under Ray is disturbed from start to end (a killed driver is restarted, as a supervisor would do). Then the
same updates are made in one process without kills, and the files that both wrote are compared.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh.errors import UserError, did_you_mean
from tools.bench.harness.circumstances import circumstances, machine
from tools.bench.harness.interleave import Say
from tools.bench.recovery.compare import compare, make_undisturbed
from tools.bench.recovery.figures import Recovery, recoveries, role_of, seconds_by_role
from tools.bench.recovery.job import recovery_job, undisturbed
from tools.bench.recovery.run import DRIVER, PATIENCE_S, RunFailed, WatchedRun

BENCHMARK = "recovery"
ELASTIC = {"elastic": signal.SIGKILL, "elastic-stopped": signal.SIGSTOP}
ROLES = ("trainer", "controller", "parameter-server", "verifier", "worker", *ELASTIC, DRIVER)
JOB = "tools.bench.recovery.job:recovery_job"
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


def run(
    kills: int, roles: list[str], say: Say, *, seed: int = 0, minutes: float | None = None, keep: Path | None = None
) -> dict[str, Any]:
    """Return everything that `--json` prints.

    Args:
        kills: kills of each role.
        minutes: time after which no further kill begins; None: no limit.
        roles: from `ROLES`.
        say: called with one line about progress.
        seed: for the order and the times of the kills.
        keep: a new directory for the two runs; None: they are deleted.
    """
    where = machine()  # measured before our own load
    with tempfile.TemporaryDirectory(prefix="axl-recovery-") as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with WatchedRun(folder / "disturbed", JOB) as watched:
            end = math.inf if minutes is None else began + 60 * minutes
            disturb(watched, schedule(kills, roles, seed), say, random.Random(seed), end)
        seconds = time.monotonic() - began
        say(f"the same {watched.step} updates again, in one process")
        calm = make_undisturbed(folder / "undisturbed", undisturbed(watched.step))
        compared = compare(folder / "disturbed", calm, watched.step)
        cfg = recovery_job()
        assert cfg.groups_per_lease is not None
        found = recoveries(watched.events, cfg.prompts_per_step // cfg.groups_per_lease)
        return summarise(found, watched.events) | {
            "bench": BENCHMARK,
            "updates": watched.step,
            "disturbed_s": round(seconds, 1),
            **compared,
            "machine": where,
            **circumstances(),
        }


def schedule(kills: int, roles: list[str], seed: int) -> list[str]:
    """Return each role `kills` times: in each round all in a random order, workers alternately, new elastic ones."""
    rng = random.Random(seed)
    order = [role for _ in range(kills) for role in rng.sample(roles, len(roles))]
    for role, count in (("worker", recovery_job().workers), *((role, kills) for role in ELASTIC)):
        for number, index in enumerate([index for index, one in enumerate(order) if one == role]):
            order[index] = f"{role}-{number % count}"
    return order


def disturb(run: WatchedRun, targets: list[str], say: Say, rng: random.Random, end: float = math.inf) -> None:
    """Kill one role after the other, each after the previous one is back and some updates are done; then end the run.

    No kill is begun after `end` (`time.monotonic()`).
    """
    run.start()
    run.wait_for("the first update", lambda: run.count("update") > 0, PATIENCE_S)
    for number, target in enumerate(targets, start=1):
        if time.monotonic() > end:
            say(f"out of time after {number - 1} of {len(targets)} kills")
            break
        calm = run.step + rng.randint(*_CALM_UPDATES)
        run.wait_for(f"update {calm}", lambda calm=calm: run.step >= calm, PATIENCE_S)
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
        "regenerated_tokens": sum(recovery.regenerated for recovery in found),
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
