"""Failures of a run, simulated or real: traces of preemptions, and a generator of them."""

import dataclasses
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from mesh import UserError, did_you_mean
from rl.runtime.simulated.sources.spot_traces import Counts, read_counts, workers_there

Kind = Literal["kill", "gone", "back", "slow"]
_COMMAND = ("driver", "raylet")  # processes of the command itself
_MOST = 1_000_000  # random failures of a role in a simulation
_ROLES = ("trainer", "controller", "worker", *_COMMAND)


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Event in the life of a role."""

    time: float  # seconds since the run began
    # "trainer", "controller", "worker-N", or "worker": one of those alive, by the seed; "driver": the process that
    # supervises the roles; "raylet": Ray's, which takes all roles with it; in a trace of a simulation also "zone-N":
    # all workers of a zone
    target: str
    # "kill": its process dies, and is started again; "gone": its host is lost and does not come back before "back";
    # "slow": from now on its computations take `factor` times as long
    kind: Kind = "kill"
    factor: float = 1.0  # factor of "slow"


@dataclasses.dataclass
class Faults:
    """Failures to inject into a real run."""

    after_update: int | None = None  # completed updates at which one worker is killed; None: none is
    # Kills by time, of which those that are done are gone
    trace: list[Failure] = dataclasses.field(default_factory=list[Failure])
    # Monotonic time from which the trace counts: the first update that this command has seen
    began: float | None = None

    def due(self, now: float) -> list[Failure]:
        """Take the failures that are due, once an update has been seen."""
        self.began = self.began or now
        count = sum(one.time <= now - self.began for one in self.trace)
        taken, self.trace = self.trace[:count], self.trace[count:]
        return taken

    def check(self, workers: int, *, kept: bool = False) -> None:
        """Refuse failures that cannot be injected (UserError); `kept`: the command outlives its driver and its Ray."""
        for one in self.trace:
            if one.target in _COMMAND and not kept:
                raise UserError(
                    f"--trace: {one.target!r} at {one.time:g} s: expected roles that are processes of this machine "
                    "alone (--runtime ray, without RAY_ADDRESS and with a local --run-dir)"
                )
            if one.kind != "kill":
                raise UserError(
                    f"--trace: {one.kind!r} at {one.time:g} s: expected 'kill', the only kind in a real run"
                )
            check_worker(one.target, workers)


def check_worker(target: str, workers: int) -> None:
    """Refuse the target of a trace if the run has no such worker (UserError)."""
    role, _, number = target.partition("-")
    if role == "zone":
        raise UserError(
            f"trace: {target!r}: zones are of simulations; expected trainer, controller, worker or worker-N"
        )
    if number and int(number) >= workers:
        raise UserError(f"trace: there is no {target!r}; expected worker-0 to worker-{workers - 1}")


def read_traces(paths: Sequence[Path], workers: int, zones: int = 1) -> list[Failure]:
    """Return the failures of traces, in order; each trace of instances (`spot_traces`) is of the next zone's workers.

    Raises:
        UserError: names the line: of another form, an unknown role, kind or zone, times out of order.
    """
    found, zone = list[Failure](), 0
    for path in paths:
        if (counts := read_counts(_text(path), f"--trace {path}")) is None:
            found += [one for whole in read_trace(path) for one in _spread(whole, workers, zones)]
            continue
        if zone == zones:
            raise UserError(f"--trace {path}: expected at most a trace of instances for each of the {zones} zones")
        found += _of_counts(counts, in_zone(zone, workers, zones))
        zone += 1
    return sorted(found, key=lambda one: one.time)


def in_zone(zone: int, workers: int, zones: int) -> list[str]:
    """Return the workers of a zone; they are dealt to the zones one after the other."""
    return [f"worker-{number}" for number in range(zone, workers, zones)]


def _of_counts(counts: Counts, workers: Sequence[str]) -> list[Failure]:
    found, before = list[Failure](), len(workers)
    for time, there in workers_there(counts, len(workers)):
        found += [Failure(time, name, "gone") for name in workers[there:before]]
        found += [Failure(time, name, "back") for name in workers[before:there]]
        before = there
    return found


def _spread(one: Failure, workers: int, zones: int) -> list[Failure]:
    """Return the failures of the workers of a zone in the place of the zone's; other failures as they are."""
    if not one.target.startswith("zone-"):
        return [one]
    if (zone := int(one.target.removeprefix("zone-"))) >= zones:
        raise UserError(f"--trace: there is no {one.target!r}; expected zone-0 to zone-{zones - 1} (--zones {zones})")
    return [dataclasses.replace(one, target=name) for name in in_zone(zone, workers, zones)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--trace {path}: cannot be read: {error}") from None


def read_trace(path: Path) -> list[Failure]:
    """Return the failures of a trace: CSV `time,target,kind,factor` with a header, or an object a line in JSON.

    Raises:
        UserError: names the line: of another form, an unknown role or kind, times out of order.
    """
    lines = [line for line in _text(path).splitlines() if line.strip()]
    if not lines:
        raise UserError(f"--trace {path}: is empty; expected lines of time, target and kind")
    if lines[0].lstrip().startswith("{"):
        rows = [(n, _object(line, f"--trace {path}, line {n}")) for n, line in enumerate(lines, start=1)]
    else:
        names = [name.strip() for name in lines[0].split(",")]
        rows = [(n, _named(names, line, f"--trace {path}, line {n}")) for n, line in enumerate(lines[1:], start=2)]
    found: list[Failure] = []
    for number, row in rows:
        failure = _failure(row, where := f"--trace {path}, line {number}")
        if found and failure.time < found[-1].time:
            raise UserError(f"{where}: time {failure.time:g} is before {found[-1].time:g}; expected times in order")
        found.append(failure)
    return found


def read_rate(text: str) -> tuple[str, float]:
    """Return role and failures an hour, of a text such as `worker=2` (UserError: of another form)."""
    role, _, number = text.partition("=")
    try:
        return role, float(number)
    except ValueError:
        raise UserError(f"--rate {text!r}: expected ROLE=N, failures an hour") from None


def synthetic(rates: Mapping[str, float], hours: float, seed: int = 0, *, back_s: float = 0.0) -> list[Failure]:
    """Return Poisson kills by role's rate an hour; `back_s`: mean seconds that a worker's host is gone."""
    if not (0 <= back_s < math.inf):
        raise UserError(f"--back-s {back_s:g}: expected seconds, 0 or more")
    rng, found = random.Random(seed), list[Failure]()
    for role, rate in rates.items():
        if role not in _ROLES:
            raise UserError(f"--rate {role}: there is no such role{did_you_mean(role, _ROLES)}; expected {_ROLES}")
        if not (0 <= rate < math.inf):
            raise UserError(f"--rate {role}={rate:g}: expected failures an hour, 0 or more")
        if rate * hours > _MOST:
            raise UserError(f"--rate {role}={rate:g}: expected at most {_MOST:,} failures in {hours:g} hours")
        now = 0.0
        while rate and (now := now + rng.expovariate(rate) * 3600) < hours * 3600:
            if role == "worker" and back_s:
                found.append(Failure(now, role, "gone"))
                found.append(Failure(now + rng.expovariate(1 / back_s), role, "back"))
            else:
                found.append(Failure(now, role))
    return sorted(found, key=lambda one: one.time)


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object with time, target and kind, got {line[:60]!r}")
    return row


def _named(names: Sequence[str], line: str, where: str) -> Mapping[str, Any]:
    values = [value.strip() for value in line.split(",")]
    if "time" not in names or "target" not in names or len(values) != len(names):
        raise UserError(f"{where}: expected the columns time,target,kind,factor that a first line names, got {line!r}")
    return {name: value for name, value in zip(names, values, strict=True) if value}


def _failure(row: Mapping[str, Any], where: str) -> Failure:
    kinds = get_args(Kind)
    try:
        time, factor = float(row["time"]), float(row.get("factor", 1.0))
        target, kind = str(row["target"]), row.get("kind", "kill")
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where}: expected numbers for time and factor, and a target, got {dict(row)}") from None
    role, _, number = target.partition("-")
    whole = role in _ROLES if not number else role in ("worker", "zone") and number.isdigit()
    if not whole:
        known = f"one of {_ROLES}, worker-N or zone-N"
        raise UserError(f"{where}: there is no {target!r}{did_you_mean(target, _ROLES)}; expected {known}")
    if kind not in kinds:
        raise UserError(f"{where}: there is no kind {kind!r}{did_you_mean(str(kind), kinds)}; expected one of {kinds}")
    if not (0 <= time < math.inf) or not (0 < factor < math.inf):
        raise UserError(f"{where}: expected a time of 0 or more and a factor above 0, got {time:g} and {factor:g}")
    if kind in ("gone", "back", "slow") and role not in ("worker", "zone"):
        raise UserError(f"{where}: {kind!r} is of workers; expected kind 'kill' for {target!r}")
    return Failure(time, target, kind, factor)
