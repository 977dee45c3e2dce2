"""A published run: config, digests of data, and names and digests of all rollouts, in one small file.

The file and the data are enough to make the run again and compare every rollout and every version of the weights; or to
draw some rollouts again with a checkpoint of their version.
"""

import base64
import dataclasses
import hashlib
import json
import lzma
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.checkpoint.versions import SavedWeights
from axlearn_like.config import ConfigBase, from_text, to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.jsonl import JsonlTail
from mesh import UserError
from mesh.files.bounded import LARGE, BoundsError, is_readable, parse_json, read_bounded
from mesh.files.written import replace_file
from rl.audit.records import Records
from rl.audit.rollout_ledger import Entry, LedgerRow, entry, ledger_path, read_ledger, unpack
from rl.experiment import RLExperiment
from rl.runtime.inprocess import remade_config
from rl.runtime.redraw import Redrawer
from rl.runtime.run import RLRun
from rl.tasks.skipped import skipped_path

_MAGIC = b"axl run 1\n"
UNPACKED = 1 << 30  # bytes of a file once it is unpacked


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """Content of the file."""

    config: str  # text of the experiment's config
    data: Mapping[str, str]  # checksums of the tasks' data, by task
    skipped: str  # verdicts on problems that took too long to make, as the run directory has them
    versions: Mapping[int, str]  # checksum of each version's weights
    rows: Mapping[int, LedgerRow]  # the ledger, by update from 1

    @property
    def hardware(self) -> list[str]:
        """Classes of the hardware that drew the rollouts."""
        return sorted({name for row in self.rows.values() for name in row.hardware})

    def entries(self) -> list[Entry]:
        """Return all rollouts, in order of updates."""
        return [one for row in self.rows.values() for one in unpack(row.data)]

    def experiment(self) -> RLExperiment.Config:
        """Return the config by which this process makes the run again (UserError: no experiment, or not readable)."""
        return remade_config(_experiment(from_text(self.config)))


@dataclasses.dataclass(frozen=True)
class Checked:
    """Rollouts and versions that were compared, and the first difference; None: all are the same to the bit."""

    rollouts: int
    versions: int
    difference: str | None


def publish(run: RunDirectory, out: Path) -> PublishedRun:
    """Write the file of a run as far as it is (UserError: not repeatable, or no update; names the field or file)."""
    if not is_readable(run.config_path):
        raise UserError(f"{run.path} is no run directory: it has no {run.config_path.name}")
    cfg = _experiment(from_text(run.read_config()))
    if cfg.policies:
        raise UserError(f"{run.path} has several policies; publish one: {run.path}/policies/{next(iter(cfg.policies))}")
    cfg.check_repeatable("in a run to be published")
    pushed = [row for row in Records(run.path).events if row["event"] == "push" and "checksum" in row]
    last = max((row["version"] for row in pushed), default=0)  # the batch after it may never have been used
    if not (rows := {update: row for update, row in read_ledger(run.path).items() if update <= last}):
        raise UserError(f"{run.path}: {ledger_path(run.path).name} has no update yet")
    made = PublishedRun(
        config=to_text(cfg),
        data=json.loads(_text(run.path / "data.json") or "{}"),
        skipped=_text(skipped_path(run.path)),
        versions={row["version"]: row["checksum"] for row in pushed if row["version"] <= len(rows)},
        rows=rows,
    )
    try:
        replace_file(out, packed(made))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from error
    return made


def packed(made: PublishedRun) -> bytes:
    """Return the bytes of the file."""
    rows = [[step, base64.b64encode(row.data).decode(), row.hardware] for step, row in made.rows.items()]
    parts = {**vars(made), "rows": rows, "versions": list(made.versions.items())}
    content = lzma.compress(json.dumps(parts).encode(), preset=9)
    return _MAGIC + hashlib.sha256(content).digest() + content


def read_published(path: Path) -> PublishedRun:
    """Read the file that `publish` wrote, by whomever (UserError: it is another file, damaged, or too large)."""
    try:
        data = read_bounded(path, LARGE)
    except BoundsError as error:
        raise UserError(f"{path}: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    if not data.startswith(_MAGIC):
        raise UserError(f"{path} is no published run; expected a file that `axl publish RUN` wrote")
    digest, content = data[len(_MAGIC) :][:32], data[len(_MAGIC) + 32 :]
    if hashlib.sha256(content).digest() != digest:
        raise UserError(f"{path} is damaged: its content does not have its checksum; get it again")
    try:
        unpacker = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=256 << 20)
        text = unpacker.decompress(content, max_length=UNPACKED)
        if len(text) >= UNPACKED:
            raise UserError(f"{path} has more than {UNPACKED:,} bytes when it is unpacked")
        return _parsed(parse_json(text))
    except (lzma.LZMAError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is no published run: {type(error).__name__}: {error!s:.200}") from None


def _parsed(parts: Any) -> PublishedRun:
    rows = {
        int(step): LedgerRow(base64.b64decode(data, validate=True), tuple(str(name) for name in hardware))
        for step, data, hardware in parts["rows"]
    }
    if list(rows) != list(range(1, len(rows) + 1)) or not rows:
        raise ValueError("its updates are not numbered from 1")
    for row in rows.values():
        unpack(row.data)
    return PublishedRun(
        config=str(parts["config"]),
        data={str(task): str(digest) for task, digest in parts["data"].items()},
        skipped=str(parts["skipped"]),
        versions={int(version): str(checksum) for version, checksum in parts["versions"]},
        rows=rows,
    )


def check_data(published: PublishedRun, experiment: RLExperiment) -> None:
    """Refuse data that are not those of the run (UserError: names the task)."""
    here = experiment.data_digests()
    for task in sorted({*published.data, *here}):
        if published.data.get(task) != here.get(task):
            raise UserError(
                f"the rows of task {task!r} are not those of the run: their checksum is {here.get(task)}, expected "
                f"{published.data.get(task)}; name the run's files (--set PATH=VALUE)"
            )


def remake(
    published: PublishedRun, cfg: RLExperiment.Config, updates: int | None, say: Callable[[str], None]
) -> Checked:
    """Make the run again here, in a folder that is removed, until `updates` (None: all) or a difference."""
    experiment: RLExperiment = cfg.build()
    check_data(published, experiment)
    last = min(len(published.rows), updates or len(published.rows))
    with tempfile.TemporaryDirectory(prefix="axl-verify-") as name:
        folder = Path(name) / "run"
        with RunDirectory.open(folder, to_text(cfg)) as run:
            if published.skipped:
                replace_file(skipped_path(run.path), published.skipped)
        tail, found = JsonlTail(ledger_path(folder)), _Comparison(published)

        def stop() -> bool:
            for row in tail.new_rows():
                found.add(row["step"], base64.b64decode(row["data"]))
                say(f"update {row['step']} of {last}: {found.difference or 'the same'}")
            return found.difference is not None or found.updates >= last

        RLRun(experiment, say=lambda line: None).run(folder, runtime="inprocess", progress=False, stop=stop)
        stop()
        pushed = {row["version"]: row["checksum"] for row in Records(folder).events if row["event"] == "push"}
    versions = [version for version in sorted(pushed) if version in published.versions and version <= last]
    wrong = [version for version in versions if pushed[version] != published.versions[version]]
    if wrong and found.difference is None:
        found.difference = f"weights of version {wrong[0]}"
    if found.difference is None and found.updates < last:
        raise UserError(f"stopped after {found.updates} of {last} updates; what was made again is the same")
    return Checked(found.rollouts, len(versions), found.difference)


class _Comparison:
    """Rows of a ledger against those that were published."""

    def __init__(self, published: PublishedRun):
        self._rows = published.rows
        self.updates = self.rollouts = 0
        self.difference: str | None = None

    def add(self, step: int, data: bytes) -> None:
        if self.difference is not None or step not in self._rows:
            return
        self.updates = step
        theirs, ours = unpack(self._rows[step].data), unpack(data)
        if len(theirs) != len(ours):
            self.difference = f"update {step} has {len(theirs)} rollouts, made again {len(ours)}"
        for one, again in zip(theirs, ours, strict=False):
            if (what := one.difference(again)) is not None and self.difference is None:
                self.difference = f"update {step}, {one.name}: {what}"
            self.rollouts += self.difference is None


def redraw_some(
    published: PublishedRun, cfg: RLExperiment.Config, weights: SavedWeights, count: int, seed: int | None = None
) -> Checked:
    """Draw some rollouts of a checkpoint's version again, chosen by `seed`, and compare (UserError: it has none)."""
    entries = {one.name: one for one in published.entries()}
    mine = sorted(name for name in entries if name.version == weights.version)
    if not mine:
        drawn = sorted({name.version for name in entries})
        raise UserError(
            f"{weights.path} is version {weights.version}, by which no rollout was drawn; expected one of the versions "
            f"{drawn[0]} to {drawn[-1]}"
        )
    experiment: RLExperiment = cfg.build()
    check_data(published, experiment)
    chosen = random.Random(seed).sample(mine, min(count, len(mine)))
    drawn = Redrawer(experiment).draw(chosen, lambda version: restore_params(weights.path))
    wrong = None
    for name in chosen:
        again = entry(drawn[name].rollouts[0], drawn[name].scores[0], name.draw)
        if wrong is None and (what := entries[name].difference(again)) is not None:
            wrong = f"{name}: {what}"
    return Checked(len(chosen), 1, wrong)


def _experiment(cfg: ConfigBase[Any]) -> RLExperiment.Config:
    if not isinstance(cfg, RLExperiment.Config):
        raise UserError(f"this is a run of {type(cfg).__qualname__}; expected an RL experiment, as `axl rl` runs it")
    return cfg


def _text(path: Path) -> str:
    return read_bounded(path).decode() if is_readable(path) else ""
