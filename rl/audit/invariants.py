"""Invariants that every run keeps, whichever roles were killed, checked afterwards from the logs of the run.

Reads `events.jsonl`, `metrics.jsonl` and `config.txt` of a run directory, finished or under way. Rows are taken in the
order of the file, not of their times: the clocks of the roles need not agree. What a log does not tell is said to be
unchecked, never passed over.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

from mesh.distributed import process_name
from rl.audit.records import Records, Row
from rl.fleet.devices import HERE
from rl.fleet.fleet import Fleet

SILENCE = 300.0  # seconds that a trainer may do nothing that it has a word for
_MOST_TRIED = 12  # generations of one step among which the batch is searched


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One invariant: how many facts were looked at, which break it, and what could not be seen."""

    invariant: str
    checked: int
    broken: tuple[str, ...] = ()
    unchecked: str = ""


def check_run(path: str | Path, *, silence: float = SILENCE) -> list[Finding]:
    """All invariants of a run directory. `silence`: seconds beyond which a wait must have a name."""
    records = Records(path)
    checks: tuple[Callable[[Records], Finding], ...] = (
        steps_in_order,
        nothing_lost,
        whole_batches,
        leases_once,
        within_age,
        versions_once,
        deaths_followed,
        partial(waits_named, silence=silence),
        answers_scored,
    )
    return [_checked(check, records) for check in checks]


def _checked(check: Callable[[Records], Finding], records: Records) -> Finding:
    """Return a finding; of records that cannot be read as a run's it is that nothing was checked."""
    try:
        return check(records)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        name = getattr(check, "__name__", "waits_named").replace("_", " ")
        return Finding(name, 0, (), f"its records cannot be read ({type(error).__name__}: {error!s:.80})")


def steps_in_order(records: Records) -> Finding:
    """Each incarnation of the trainer updates in order from the step it restored; metrics hold each update once."""
    broken, done = [], 0
    for one in records.incarnations:
        first, steps = one.first, one.steps
        if first is None:
            if steps:
                broken.append(f"trainer incarnation {one.number} updated before it published what it had restored")
            continue
        if first > done:
            broken.append(f"trainer incarnation {one.number} began at step {first}, but only {done} were done")
        if steps != (expected := list(range(first, first + len(steps)))):
            wrong = next(s for s, e in zip(steps, expected, strict=True) if s != e)
            broken.append(
                f"trainer incarnation {one.number}: step {wrong} out of order among {len(steps)} from {first}"
            )
        done = max([done, *(step + 1 for step in steps)])
    written = [row["step"] for row in records.metrics]
    if written != list(range(1, len(written) + 1)):
        broken.append(f"metrics.jsonl does not hold the updates 1 to {len(written)} once each, in order")
    if records.incarnations and (last := records.incarnations[-1]).first is not None:
        reached = (last.first or 0) + len(last.steps)
        if not reached - 1 <= len(written) <= reached:  # the row of the update in hand is written a moment later
            broken.append(f"metrics.jsonl holds {len(written)} updates, the trainer has made {reached}")
    steps = sum(len(one.steps) for one in records.incarnations)
    unchecked = f"{records.torn} unreadable lines" if records.torn else ""
    return Finding("every update once and in order", steps + len(written), tuple(broken), unchecked)


def nothing_lost(records: Records) -> Finding:
    """A restarted trainer begins no earlier than the last checkpoint."""
    every = records.setting("trainer.checkpoint.save_every") or 100
    broken, restarts, unchecked, done, saved = [], 0, "", 0, 0
    logged = any(row["event"] == "saved" for one in records.incarnations for row in one.rows)
    for one in records.incarnations:
        if one.number and one.first is not None:
            restarts += 1
            if one.first < saved:
                broken.append(f"trainer incarnation {one.number} began at step {one.first}; step {saved} was saved")
        done = max([done, *(step + 1 for step in one.steps)])
        saved = max([saved, *(row["step"] for row in one.rows if row["event"] == "saved")])
        if not logged and one.steps:
            unchecked = "the trainer logs no event `saved` (step): one save may have been under way at each death"
            saved = max(saved, (done // every - 1) * every)
    return Finding("nothing lost that a checkpoint holds", restarts, tuple(broken), unchecked if restarts else "")


def whole_batches(records: Records) -> Finding:
    """The tokens of each batch are those of as many generated leases of its step as it has, none halved or doubled."""
    groups = records.setting("prompts_per_step") or records.setting("groups", 0)  # name before 0.2.0
    items = groups // (records.setting("groups_per_lease") or groups or 1)
    generated: dict[int, list[int]] = {}
    handed_back: Counter[int] = Counter()
    for row in records.events:
        if row["event"] == "generate" and "step" in row:
            generated.setdefault(row["step"], []).append(row["tokens"])
        elif row["event"] == "handed_back":
            handed_back[row["step"]] += 1
    broken, checked, skipped = [], 0, 0
    for row in records.metrics:
        step = row["step"] - 1
        leases = generated.get(step, [])
        if "gen_tokens" not in row or len(leases) > max(items, _MOST_TRIED):
            skipped += 1
            continue
        checked += 1
        sizes = range(items, items + handed_back[step] + 1)  # leases handed back have tokens of their own
        if not any(sum(chosen) == row["gen_tokens"] for size in sizes for chosen in combinations(leases, size)):
            broken.append(
                f"step {step} consumed {row['gen_tokens']:g} tokens; its leases generated {leases}, "
                f"of which {items} make a batch"
            )
    unchecked = f"{skipped} updates: generated too often to tell by tokens" if skipped else ""
    return Finding("batches whole: as many leases as planned", checked, tuple(broken), unchecked)


def leases_once(records: Records) -> Finding:
    """A controller's event `consumed` names the leases of a step: none is in two steps, none is of another step."""
    name = "no lease consumed twice"
    granted = {row["lease"]: row["step"] for row in records.events if row["event"] == "generate" and "lease" in row}
    consumed: dict[int, int] = {}
    broken, checked = [], 0
    for row in records.events:
        for lease in row.get("leases", ()) if row["event"] == "consumed" else ():
            checked += 1
            step = consumed.setdefault(lease, row["step"])
            if step != row["step"]:
                broken.append(f"lease {lease} was consumed by step {step} and by step {row['step']}")
            if granted.get(lease, row["step"]) != row["step"]:
                broken.append(f"lease {lease} of step {granted[lease]} was consumed by step {row['step']}")
        if row["event"] == "consumed" and len(set(row.get("leases", ()))) < len(row.get("leases", ())):
            broken.append(f"step {row['step']} consumed a lease more than once: {row['leases']}")
    unchecked = "" if checked else "the controller logs no event `consumed` (step, leases)"
    return Finding(name, checked, tuple(broken), unchecked)


def within_age(records: Records) -> Finding:
    """No rollout was older than the bound, and none was drawn by a version that was still to come."""
    bound = records.setting("staleness", 0)
    broken = [
        f"update {row['step']} consumed rollouts of age {row['staleness_max']}; the bound is {bound}"
        for row in records.metrics
        if row["staleness_max"] > bound
    ]
    drawn = [row for row in records.events if row["event"] == "generate" and {"step", "version"} <= set(row)]
    broken += [
        f"lease {row.get('lease')} of step {row['step']} was drawn by version {row['version']}; the bound is {bound}"
        for row in drawn
        if not 0 <= row["step"] - row["version"] <= bound
    ]
    return Finding("ages within the bound", len(records.metrics) + len(drawn), tuple(broken))


def versions_once(records: Records) -> Finding:
    """A version always means the same weights: every push and pull of it sees the same checksum."""
    known: dict[int, str] = {}
    broken, checked, silent = [], 0, 0
    for row in records.events:
        if row["event"] == "start" and row["role"] == "trainer" and not records.repeatable:
            known = {}  # restarted trainer makes versions from other rollouts
        if row["event"] not in ("push", "pull") or "error" in row:
            continue
        if "checksum" not in row:
            silent += 1
            continue
        checked += 1
        first = known.setdefault(row["version"], row["checksum"])
        if first != row["checksum"]:
            broken.append(
                f"version {row['version']}: {row['role']} saw {row['checksum']} ({row['event']}), it was {first} before"
            )
    unchecked = f"{silent} events `push` and `pull` without a checksum" if silent else ""
    return Finding("versions never reused", checked, tuple(broken), unchecked)


def deaths_followed(records: Records) -> Finding:
    """Roles that died or left were started again, unless the run was ended; no process starts twice in a session.

    Workers that have joined from outside may go for good.
    """
    ours = {"trainer", "controller", "parameter-server", "verifier", "driver"}
    fleet = Fleet.Config(workers=records.setting("fleet.workers", HERE))
    fleet.reference = records.setting("fleet.reference", None)
    hosts = range(fleet.worker_hosts)
    ours |= {process_name("reference", index) for index in range(fleet.reference_hosts)}
    workers = range(records.setting("workers", 0))
    ours |= {process_name(f"worker-{worker}", index) for worker in workers for index in hosts}
    ours |= {f"trainer-{number}" for number in range(1, records.setting("trainer.processes", 1))}
    ours |= {f"parameter-server-{number}" for number in range(1, records.setting("parameter_server.shard_servers", 1))}
    broken, checked, unseen = [], 0, 0
    gone: Counter[str] = Counter()
    last: dict[str, tuple[int, str]] = {}
    for index, row in enumerate(records.events):
        if row["event"] == "session":
            last, gone = {}, Counter()
        elif (role := _gone(row)) is not None and role in ours:
            gone[role] += 1
            checked += 1
            under_way = records.events[-1]["time"] - row["time"] < SILENCE
            if not _came_back(records.events[index + 1 :], role) and not under_way:
                broken.append(f"{role} died at {row['time']:.0f} and did not start again")
        elif row["event"] == "start" and "pid" in row:
            process = row["pid"], row.get("host", "")
            if last.get(row["role"]) == process:
                broken.append(f"{row['role']} (pid {row['pid']}) started twice")
            unseen += row["role"] in last and not gone[row["role"]]
            last[row["role"]] = process
    unchecked = f"{unseen} starts without an event `died` before them" if unseen else ""
    return Finding("every death followed by a start", checked, tuple(broken), unchecked)


def waits_named(records: Records, silence: float) -> Finding:
    """Trainer and workers never did nothing for longer than `silence` seconds without word of what they waited for.

    Word is an event of their own (a `wait` says `for` what), or one `waiting` that says who waits.
    """
    broken, checked = [], 0
    reached: dict[str, float] = {}  # role -> last known activity since its process started
    told: set[str] = set()  # roles with a reported wait since
    for row in records.events:
        role, time = row["role"], row["time"]
        if row["event"] == "waiting":
            told.add(row["who"])
        if (gone := _gone(row)) is not None or row["event"] in ("session", "phase", "phase_begin"):
            reached = {name: at for name, at in reached.items() if name != gone and gone is not None}
        elif row["event"] == "start":
            reached[role] = time
            told.discard(role)
        elif role == "trainer" or role.startswith("worker-"):
            checked += 1
            gap = time - row.get("seconds", 0.0) - reached.get(role, time)
            if gap > silence and role not in told:
                broken.append(f"{role}: nothing for {gap:.0f} s before {row['event']} at {time:.0f}")
            if row["event"] == "wait" and row["seconds"] > silence and not row.get("for"):
                broken.append(f"{role}: a wait of {row['seconds']:.0f} s does not say for what")
            reached[role] = time
            told.discard(role)
    unchecked = ""
    if records.clocks_apart:
        unchecked = "clocks of the roles disagree: time between a death and a start not compared"
    for index, row in enumerate(() if records.clocks_apart else records.events):
        if row["event"] == "died" and (after := _came_back(records.events[index + 1 :], row["target"])):
            gap = after["time"] - row["time"]
            if gap > silence and after["event"] == "start":
                broken.append(f"{row['target']} was gone for {gap:.0f} s")
    return Finding(f"no nameless wait beyond {silence:g} s", checked, tuple(broken), unchecked)


def answers_scored(records: Records) -> Finding:
    """The verifier could score some answers of every lease: a scorer that always fails teaches nothing."""
    scored = [row for row in records.events if row["event"] == "score"]
    broken = [
        f"{row['role']}: none of the {row['answers']} answers of step {row['step']} could be scored; {row['error']}"
        for row in scored
        if row.get("failed") and row["failed"] == row["answers"]
    ]
    return Finding("answers that the verifier can score", len(scored), tuple(broken))


def _gone(row: Row) -> str | None:
    """Return the role whose end a row reports, or None."""
    if row["event"] in ("died", "kill", "ended"):
        return row["target"]
    return row["role"] if row["event"] == "shutdown" else None


def _came_back(rows: Sequence[Row], target: str) -> Row | None:
    """The start of a role's successor; or the event that ended the need for one; None if there is neither."""
    for row in rows:
        if target == "driver" and row["event"] == "session":
            return row
        if row["event"] == "start" and row["role"] == target:
            return row
        if row["event"] == "phase" and row.get("phase") == "rl":
            return row  # the run was stopped, or was done, before it was back
    return None
