"""An update of a past run, made again in this process from the nearest checkpoint, and once more with changes.

All comes from the run directory, which is only read: config, checkpoints, skipped problems, a warm start's weights. The
roles are those of a run in one process; they draw and score what the update learns from, as they did.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from axlearn_like.config import differences, text_lines, to_text
from axlearn_like.operations.step_metrics import without_clock
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.scratch import scratch
from mesh import make_mesh
from mesh.errors import UserError
from rl.experiment import RLExperiment
from rl.parameter_server.client import connect_local
from rl.runtime.inprocess import DeviceSplit, local_roles, remade_config
from rl.runtime.replay.record import RunRecord, Unequal
from rl.runtime.replay.sources import GivenBatch, Sample, WatchedBatches, changed
from rl.runtime.replay.trace import UpdateTrace, Watch, read_trace
from rl.tasks.rows.unchanged import check_unchanged
from rl.tasks.skipped import skipped_path
from rl.training.spec import TrainerServices
from rl.training.trainer import PolicyTrainer
from rl.training.warm_start import warm_start_directory

_LEARNING = ("objective", "learner", "trainer")  # fields that no rollout depends on
Beat = Callable[[int, int], None]  # is told (updates made, update wanted)


@dataclasses.dataclass(frozen=True)
class Changes:
    """Other circumstances of an update."""

    # Function that changes the config, of which only what learns may differ (objective, learner, trainer)
    edit: Callable[[RLExperiment.Config], object] | None = None
    # Other rewards, by prompt and sample
    rewards: Mapping[Sample, float] = dataclasses.field(default_factory=dict[Sample, float])
    dropped: frozenset[Sample] = frozenset()  # samples that are left out

    def __bool__(self) -> bool:
        return bool(self.edit or self.rewards or self.dropped)


@dataclasses.dataclass(frozen=True)
class Replay:
    """An update that was made again."""

    update: int
    start: int  # updates of the checkpoint from which it was made; 0: the run's start
    # The first update from there that has not come out as recorded, and what of it; None: all are equal
    unequal: tuple[int, list[Unequal]] | None
    trace: UpdateTrace  # arrays and metrics of the update
    versions: dict[int, str]  # checksums of the versions that were made, by number
    changed: UpdateTrace | None = None  # the trace with the changes, if some were asked for

    def write(self, path: Path) -> None:
        """Write all but the changed trace into a new file."""
        versions = {str(number): checksum for number, checksum in self.versions.items()}
        own = {"update": self.update, "start": self.start, "unequal": self.unequal, "versions": versions}
        self.trace.write(path, **own)

    @classmethod
    def read(cls, path: Path) -> "Replay":
        """Return what `write` wrote (UserError: it is something else)."""
        trace, about = read_trace(path)
        unequal, versions = about["unequal"], {int(n): str(checksum) for n, checksum in about["versions"].items()}
        if unequal is not None:
            found = [Unequal(part, tuple(what), (str(sides[0]), str(sides[1]))) for part, what, sides in unequal[1]]
            unequal = int(unequal[0]), found
        return cls(int(about["update"]), int(about["start"]), unequal, trace, versions)

    def movement(self) -> dict[str, float]:
        """Return norms of the update and of the changed one, and the cosine of the two, over all parameters."""
        assert self.changed is not None, "asked for with changes"
        one, other = (_moved(trace) for trace in (self.trace, self.changed))
        products = [(a @ b, a @ a, b @ b) for a, b in zip(one, other, strict=True)]
        dot, a, b = (float(sum(column)) for column in zip(*products, strict=True))
        cosine = {"cosine": dot / (a * b) ** 0.5} if a and b else {}
        return {"norm": a**0.5, "changed_norm": b**0.5, **cosine}


def replay(
    record: RunRecord,
    update: int,
    changes: Changes = Changes(),
    *,
    since: int | None = None,
    deep: bool = False,
    beat: Beat = lambda made, wanted: None,
) -> Replay:
    """Make an update again, and compare it and those on the way with what the run has recorded.

    Args:
        changes: make it once more with these.
        since: begin at a checkpoint of at most so many updates; None: at the nearest.
        deep: trace gradients and marks of activations, too.
        beat: is told after each update.

    Raises:
        UserError: the update is not recorded, or cannot come out the same; a change that does not fit.
    """
    record.check(update)
    cfg = remade_config(record.config())
    other = cfg if changes.edit is None else _edited(cfg, changes.edit)
    most = update - 1 if since is None else min(since, update - 1)
    with scratch("replay") as folder:
        run, start = _begin(folder / "again", cfg, record, record.checkpoint(most))
        with run:
            trace, source = _forward(cfg, run, update, Look(deep, bool(changes), beat))
        made = RunRecord(run.path)
        unequal = next(((n, found) for n in range(start, update + 1) if (found := [*record.unequal(made, n)])), None)
        versions = {number: str(row["checksum"]) for number, row in made.versions.items()}
        whole = Replay(update, start, unequal, dataclasses.replace(trace, metrics=_figures(made, update)), versions)
        if not changes:
            return whole
        groups = changed(source.groups, changes.rewards, changes.dropped)
        run, _ = _begin(folder / "changed", other, record, made.checkpoint(update - 1))
        with run:
            after = _once(other.build(), run, GivenBatch(update - 1, groups, source.plan), groups)
        after = dataclasses.replace(after, metrics=_figures(RunRecord(run.path), update))
        return dataclasses.replace(whole, changed=after)


class Look(NamedTuple):
    """Options of the way to an update: see `replay`; `saves`: the state before the update."""

    deep: bool
    saves: bool
    beat: Beat


def _forward(
    cfg: RLExperiment.Config, run: RunDirectory, update: int, look: Look
) -> tuple[UpdateTrace, WatchedBatches]:
    watched: list[WatchedBatches] = []

    def around(controller: Any) -> Any:
        watched.append(WatchedBatches(controller))
        return watched[-1]

    roles = local_roles(cfg.build(), run, around)
    with roles as (trainer, worker), trainer, closing(worker), jax.set_mesh(make_mesh()):
        trainer.start()
        while trainer.step < update - 1:
            _advance(trainer, worker)
            look.beat(trainer.step, update)
        if look.saves:
            trainer.save()
        watch = Watch(trainer, deep=look.deep)
        _advance(trainer, worker)
        look.beat(update, update)
        return watch.trace(watched[0].groups), watched[0]


def _advance(trainer: PolicyTrainer, worker: Any) -> None:
    """Make the next update, and draw no more for it than it needs."""
    before = trainer.step
    while not trainer.run_once():
        if not worker.run_once():
            raise UserError(f"update {before + 1}: its batch does not become complete, and there is nothing to draw")
    trainer.settle()


def _once(experiment: RLExperiment, run: RunDirectory, source: GivenBatch, groups: list[Any]) -> UpdateTrace:
    """Make the one update of a batch from the checkpoint of a run directory."""
    weights = connect_local(experiment.make_parameter_server())
    devices, reference = DeviceSplit.of(experiment.cfg), None
    if devices.reference is not None:
        reference = experiment.make_reference_scorer(run, devices.reference)
    trainer = experiment.make_trainer(run, TrainerServices(source, weights, reference), devices=devices.trainer)
    with trainer, jax.set_mesh(make_mesh()):
        trainer.start()
        watch = Watch(trainer)
        if not trainer.run_once():
            raise UserError("the changed batch gives no update")
        trainer.settle()
        return watch.trace(groups)


def _edited(cfg: RLExperiment.Config, edit: Callable[[RLExperiment.Config], object]) -> RLExperiment.Config:
    """Return an edited copy (UserError: the edit changes what draws the rollouts)."""
    made = cfg.clone()
    edit(made)
    for path in differences(text_lines(cfg), text_lines(made)):
        if path.partition(".")[0].partition("[")[0] not in _LEARNING:
            raise UserError(
                f"--set {path}: the rollouts of the update depend on it; expected a field of "
                f"{', '.join(_LEARNING)}. Another run tells what it changes: axl rl"
            )
    made.check_fields()
    return made


def _begin(
    path: Path, cfg: RLExperiment.Config, record: RunRecord, checkpoint: Path | None
) -> tuple[RunDirectory, int]:
    """Return a run directory that begins where a checkpoint ends, and the number of updates of that."""
    run = RunDirectory.open(path, to_text(cfg))
    folder = run.checkpoints / "rl"
    folder.mkdir()
    if checkpoint is not None:
        (folder / checkpoint.name).symlink_to(checkpoint, target_is_directory=True)
    if (warm := warm_start_directory(record.run)).is_dir():
        warm_start_directory(run).symlink_to(warm, target_is_directory=True)
    for name in (skipped_path(record.path), record.path / "data.json"):
        if name.is_file():
            shutil.copyfile(name, path / name.name)
    check_unchanged(path, cfg.build().data_digests())
    return run, 0 if checkpoint is None else int(checkpoint.name)


def _figures(made: RunRecord, update: int) -> dict[str, Any]:
    return without_clock(made.metrics.get(update, {}))


def _moved(trace: UpdateTrace) -> Iterator[np.ndarray]:
    """Yield what an update has added to each parameter, float64 and flat."""
    for name in sorted(name for name in trace.arrays if name.startswith("weights/")):
        before = trace.before[name.removeprefix("weights/")]
        yield (trace.arrays[name].astype(np.float64) - before.astype(np.float64)).ravel()
