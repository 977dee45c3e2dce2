"""Durations, sizes and prices that stand for devices, transfers and starts in a simulation, and their sources."""

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, Self

from axlearn_like.run.metrics import read_rows
from mesh import UserError, did_you_mean
from mesh.errors import once

_SETTLED = 10.0  # seconds from a kill on in which updates do not count as undisturbed
_FREE = {"cores", "weights_bytes", "core_network"}  # fields that may be None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds, bytes and prices. A step of decoding takes `decode_step`, and more by active rows and cached tokens."""

    decode_step: float = 0.02  # seconds of a step that draws a token of each row
    decode_row: float = 0.0  # seconds a step more for each row of the dispatch, a halving of max_num_seqs
    decode_context: float = 0.0  # seconds a step more for each cached token of the active rows
    prefill_token: float = 0.0  # seconds for a token of a prompt; samples of a prompt share it
    lease: float = 0.0  # seconds of a lease beside its steps: submission, programs' launches
    update: float = 1.0  # seconds of an update
    update_token: float = 0.0  # seconds more for each token of its rollouts
    # Seconds of a core for a rollout, of the controller and of other processes, for which nobody waits; counted where
    # all roles share cores
    rollout_rest: float = 0.0
    update_rest: float = 0.0  # seconds of the trainer's host between two updates
    score: float = 0.0  # seconds of a verifier process for an answer
    verifiers: float = 1.0  # processes of the verifier
    call: float = 0.0  # seconds of a call from one role to another
    # `push`, `pull`, `swap`: seconds of these beside the transfer of the weights
    push: float = 0.0
    pull: float = 0.0
    swap: float = 0.0
    save: float = 0.0  # seconds for which the trainer waits for a checkpoint
    write: float = 0.0  # seconds after which the checkpoint counts
    # `start_trainer`, `start_worker`, `start_controller`: seconds from the death of a role to its first call
    start_trainer: float = 60.0
    start_worker: float = 60.0
    start_controller: float = 10.0
    weights_bytes: float | None = None  # bytes of a version; None: those of the policy
    # `server_network`, `worker_network`: bytes a second of the parameter server's and of each worker's network, each
    # way
    server_network: float = 25e9
    worker_network: float = 25e9
    core_network: float | None = None  # bytes a second between all hosts together; None: any
    cores: float | None = None  # cores of the one host that all roles share; None: each role has devices of its own
    # `decode_cores`, `update_cores`: cores among those that a worker and the trainer can use
    decode_cores: float = 1.0
    update_cores: float = 1.0
    # `worker_price`, `trainer_price`: dollars an hour, of each worker and of the trainer
    worker_price: float = 0.0
    trainer_price: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            positive = field.name in ("verifiers", "server_network", "worker_network", "core_network", "cores")
            if value is None and field.name in _FREE:
                continue
            if value is None or not number or value < 0 or (positive and value == 0):
                least = "above 0" if positive else "0 or more"
                raise UserError(f"durations.{field.name}={value!r}; expected a finite number, {least}")

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str) -> Self:
        """Return the durations that a table names; `where` begins messages (UserError: it names others)."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in table:
            if name not in known:
                raise UserError(f"{where}: there is no duration {name!r}{did_you_mean(name, known)}")
        try:
            return cls(**table)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    def changed(self, edits: Sequence[str]) -> Self:
        """Return a copy with edits `name=number`, as of --duration."""
        known = [field.name for field in dataclasses.fields(self)]

        def read(edit: str) -> tuple[str, float]:
            name, equals, number = edit.partition("=")
            if name not in known:
                raise UserError(f"--duration {edit!r}: there is no duration {name!r}{did_you_mean(name, known)}")
            try:
                return name, float(number)
            except ValueError:
                raise UserError(f"--duration {edit!r}: expected {name}=NUMBER{'' if equals else ', with ='}") from None

        return dataclasses.replace(self, **once("--duration", map(read, edits)))


def read_durations(path: Path) -> Durations:
    """Return the durations of a TOML or JSON table, or of a run directory (UserError: it is neither)."""
    if path.is_dir():
        return measured(path)
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected a table of durations, in TOML or JSON: {error}") from None
    if not isinstance(table, dict):
        raise UserError(f"{path}: expected a table of durations, got {type(table).__name__}")
    if not table:
        raise UserError(f"{path}: has no durations; expected lines such as update = 5.0, in TOML or JSON")
    return Durations.from_table(table, str(path))


def measured(run: Path) -> Durations:
    """Return medians of a run's events, but for the first third, which compiles (UserError: nothing to measure)."""
    rows = read_rows(run / "events.jsonl")
    metrics = [row for row in read_rows(run / "metrics.jsonl") if row.get("phase") == "rl"]
    drawn, updates = timed(rows, "generate"), timed(rows, "update")
    if not drawn or len(updates) < 3:
        raise UserError(f"{run}: expected a run with rollouts and at least 3 updates, got {len(updates)} updates")
    tokens = mean_of([row.get("completion_length", 0.0) for row in metrics]) or 1.0
    rest = [max(row.get("step_seconds", 0.0) - row.get("input_seconds", 0.0), 0.0) for row in metrics]
    update = mean_of([row["seconds"] for row in updates])
    scores, leases = timed(rows, "score"), len({row["lease"] for row in drawn}) / max(len(updates), 1)
    answers = mean_of([row.get("gen_tokens", 0.0) for row in metrics]) / tokens / max(leases, 1e-9)
    return Durations(
        decode_step=mean_of([row["seconds"] for row in drawn]) / tokens,
        update=update,
        update_rest=max(mean_of(rest) - update, 0.0),
        score=_low([row["seconds"] for row in scores]) / max(answers, 1.0),
        call=_calls(rows),
        push=mean_of([row["seconds"] for row in timed(rows, "push")]),
        pull=mean_of([row.get("transfer_seconds", row["seconds"]) for row in timed(rows, "pull")]),
        swap=mean_of([row["seconds"] for row in timed(rows, "swap")]),
        start_trainer=_starts(rows, "trainer"),
        start_worker=_starts(rows, "worker-0"),
        weights_bytes=max((row.get("nbytes", 0) for row in rows if row["event"] == "push"), default=0),
    )


def timed(rows: Sequence[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    """Return the events of a kind that have seconds, without the first third."""
    found = [row for row in rows if row["event"] == event and "seconds" in row]
    return found[len(found) // 3 :]


def mean_of(numbers: Sequence[float]) -> float:
    """Return the mean without the largest tenth: a pause of the machine is no duration."""
    kept = sorted(numbers)[: max(1, len(numbers) - len(numbers) // 10)]
    return fmean(kept) if kept else 0.0


def calm_intervals(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds between updates, one after the other, that no kill has disturbed in the last while."""
    updates = [row for row in rows if row["event"] == "update" and row["role"] == "trainer"]
    kills = [row["time"] for row in rows if row["event"] == "kill"]
    return [
        after["time"] - before["time"]
        for before, after in pairwise(updates)
        if after["step"] == before["step"] + 1
        and not any(before["time"] - _SETTLED < kill < after["time"] for kill in kills)
    ]


def _low(numbers: Sequence[float]) -> float:
    """Return the first decile: what is not waited for."""
    return quantiles(numbers, n=10)[0] if len(numbers) > 1 else sum(numbers)


def _calls(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of a call: half of the shortest gaps between the end of a score and the next work."""
    ends, gaps = dict[str, float](), list[float]()
    for row in rows:
        if row["event"] == "score":
            ends[row["role"]] = row["time"]
        elif row["event"] in ("generate", "pull") and row["role"] in ends:
            gaps.append(max(0.0, row["time"] - row.get("seconds", 0.0) - ends.pop(row["role"])))
    return _low(gaps) / 2


def _starts(rows: Sequence[Mapping[str, Any]], role: str) -> float:
    """Return the seconds from a role's death to its next start, if it has died in this run; else those of its start.

    That is of the first process of any role, and from its own `start` to its work.
    """
    lost = [row["time"] for row in rows if row["event"] == "died" and _kind(row["target"]) == _kind(role)]
    starts = [row["time"] for row in rows if row["event"] == "start" and _kind(row["role"]) == _kind(role)]
    if back := [min(after) - died for died in lost if (after := [time for time in starts if time > died])]:
        return median(back)
    session = next((row["time"] for row in rows if row["event"] == "session"), None)
    began = [row for row in rows if row["event"] == "start"]
    start = next((row["time"] for row in began if row["role"] == role), None)
    first = next((row["time"] for row in rows if row["role"] == role and row["event"] in ("push", "pull")), None)
    if session is None or start is None or first is None:
        return 60.0
    return max(0.0, began[0]["time"] - session) + max(0.0, first - start)


def _kind(role: str) -> str:
    return role if "-spare-" in role else role.partition("-")[0]
