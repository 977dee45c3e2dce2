"""The record of a run by update: fingerprints of versions, marks of batches, metrics, and the checkpoints on disk."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from axlearn_like.checkpoint.versions import list_steps
from axlearn_like.config import from_text, recorded_lines
from axlearn_like.operations.step_metrics import without_clock
from axlearn_like.run.directory import RunDirectory
from mesh.errors import UserError
from mesh.files.bounded import is_readable
from rl.audit.records import Records, Row
from rl.experiment import RLExperiment
from rl.protocol.headers import MARK
from rl.runtime.policies.changes import refuse_several

# Parts that an update records, in the order in which they come about.
PARTS = ("rollouts", "rewards", "metrics", "weights")
_COMPILERS = ("hardware", "xla_flags")
# Begin names of counts over the whole run so far, of problems left out and of audits: not of the updates themselves.
_COUNTS = ("problems_", "audit")


class Unequal(NamedTuple):
    """A part of an update that two records have, and not alike."""

    part: str  # one of `PARTS`
    what: tuple[Any, ...]  # groups, metrics or arrays, by number or name; empty: not known
    sides: tuple[str, str]  # text of the first of them on both sides


class RunRecord:
    """The files of a run directory, of which none is changed.

    Update N makes version N, by the batch of number N - 1.
    """

    def __init__(self, path: str | Path):
        """Read them (UserError: it is no run of RL, or of several policies)."""
        self.run = RunDirectory.attach(path)
        self.path = self.run.path
        if not is_readable(self.run.config_path):
            raise UserError(f"{path} is no run directory: it has no config.txt; expected a run of axl rl")
        self.text = self.run.read_config()
        self.records = records = Records(self.path)
        rows = records.events
        self.versions: dict[int, Row] = {row["version"]: row for row in rows if row["event"] == "push"}
        self.batches: dict[int, Row] = {row["step"] + 1: row for row in rows if row["event"] == "update"}
        self.metrics: dict[int, Row] = {row["step"]: row for row in records.metrics}
        begins = [row for row in rows if row["event"] == "train_begin"]
        self.compilers = [{name: row.get(name) for name in _COMPILERS} for row in begins]

    @property
    def updates(self) -> list[int]:
        """Updates with a record, in order."""
        return sorted({*self.metrics, *self.batches, *self.versions} - {0})

    def config(self) -> RLExperiment.Config:
        """Return the experiment (UserError: it cannot be read, or is another kind of run)."""
        refuse_several(self.path)
        cfg = from_text(self.text)
        if not isinstance(cfg, RLExperiment.Config):
            raise UserError(f"{self.path} is no run of axl rl; expected one, whose updates can be made again")
        return cfg

    def check(self, update: int) -> None:
        """Refuse an update that is not recorded, or cannot come out the same (UserError)."""
        if not (known := self.updates):
            raise UserError(f"{self.path} has no updates yet; expected a run of axl rl that has made some")
        if not known[0] <= update <= known[-1]:
            raise UserError(f"{self.path}: update {update} is not recorded; expected {known[0]} to {known[-1]}")
        if not self.records.repeatable:
            weights, staleness = self.records.setting("controller.weights"), self.records.setting("staleness")
            raise UserError(
                f"{self.path}: controller.weights={weights!r} with staleness={staleness}: a rollout was drawn by "
                "whichever version had arrived, which the events do not say for each token; expected a run with "
                "controller.weights='pinned', or staleness=0"
            )

    def checkpoint(self, before: int) -> Path | None:
        """Return the newest checkpoint that has at most so many updates; None: there is none, the run is its start."""
        folders = (self.run.checkpoints / "rl", self.run.checkpoints / "rl" / "best")
        found = [(step, folder / str(step)) for folder in folders for step in list_steps(folder) if step <= before]
        return max(found, default=(0, None), key=lambda one: one[0])[1]

    def unequal(self, other: "RunRecord", update: int) -> Iterator[Unequal]:
        """Yield what both have recorded of an update and is not equal, in the order of `PARTS`."""
        a, b = (side.batches.get(update, {}) for side in (self, other))
        for part, name in (("rollouts", "drawn"), ("rewards", "rewards")):
            if found := _marks(a.get(name), b.get(name)):
                yield Unequal(part, tuple(found), _texts(a.get(name), b.get(name), found[0]))
        a, b = (_figures(side.metrics.get(update)) for side in (self, other))
        names = sorted((name for name in a.keys() & b.keys() if a[name] != b[name]), key=_by_origin)
        if names:
            yield Unequal("metrics", tuple(names), (str(a[names[0]]), str(b[names[0]])))
        a, b = (side.versions.get(update, {}) for side in (self, other))
        if None not in (one := (a.get("checksum"), b.get("checksum"))) and one[0] != one[1]:
            yield Unequal("weights", tuple(_marks(a.get("arrays"), b.get("arrays"))), (str(one[0]), str(one[1])))

    def has_equal(self, other: "RunRecord", update: int) -> bool:
        """Return True if the records show that both versions are the same."""
        a, b = (side.versions.get(update, {}).get("checksum") for side in (self, other))
        return a is not None and a == b


def config_differences(a: RunRecord, b: RunRecord) -> dict[str, tuple[str | None, str | None]]:
    """Return {path: texts} of the config's fields that differ, and of what has compiled, by the records."""
    sides = [recorded_lines(one.text) for one in (a, b)]
    for side, one in zip(sides, (a, b), strict=True):
        side |= {f"({name})": str(one.compilers[-1][name]) for name in _COMPILERS if one.compilers}
    paths = list(dict.fromkeys(itertools.chain(*sides)))
    found = {path: (sides[0].get(path), sides[1].get(path)) for path in paths}
    return {path: texts for path, texts in found.items() if texts[0] != texts[1]}


def _figures(row: Row | None) -> Row:
    return {} if row is None else {name: x for name, x in without_clock(row).items() if not name.startswith(_COUNTS)}


def _by_origin(name: str) -> tuple[bool, str]:
    """Sort figures of rollouts before those of the update, which follow from them."""
    return name not in ("reward", "loss", "lr"), name


def _marks(a: str | None, b: str | None) -> list[int]:
    """Return the places at which two rows of marks differ; none where a side has none."""
    if not a or not b:
        return []
    sides = ([text[i : i + MARK] for i in range(0, len(text), MARK)] for text in (a, b))
    return [place for place, pair in enumerate(itertools.zip_longest(*sides)) if pair[0] != pair[1]]


def _texts(a: str | None, b: str | None, place: int) -> tuple[str, str]:
    own = slice(place * MARK, (place + 1) * MARK)
    return (a or "")[own], (b or "")[own]
