"""Requests of models as work on their slots and files, for the thread that trains.

The state of a model behind a request is written every so many steps (a snapshot). A service that was killed begins each
model at its last but one snapshot, so that answers since then can be given again, and runs what was accepted since.
What a request takes from files that others may change is kept for its second run: a state that it loads by a second
name of the file, and what it refuses by a record.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rl.serving.service.durable.folders import ServiceFolders, StatePath, link_file
from rl.serving.service.durable.journal import JournalRecord, RequestJournal
from rl.serving.service.durable.records import make_record, recorded_pass
from rl.serving.service.messages import AdamParams, LoraSpec, LossOutput, ServiceError
from rl.serving.service.saved import read_state, write_state
from rl.serving.service.scheduler import TrainPass, Work
from rl.serving.service.slots import TrainingSlots
from rl.serving.service.verbs import (
    ModelCreated,
    ModelUnloaded,
    SamplerOpened,
    StateLoaded,
    StateSaved,
    StepDone,
    UnknownId,
)


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """Rules for writing the state of a model.

    Attributes:
        steps: optimizer steps from one snapshot to the next.
        journal: bytes by which the journal grows until what no replay needs is dropped.
    """

    steps: int = 16
    journal: int = 256 << 20


class TaskHooks(NamedTuple):
    """Functions of the rest of the service for the thread that trains.

    Attributes:
        forget_before: no replay begins before this number of a model.
        removed: a model has no slot any more.
        sampler_wanted: returns False if a sampler was closed before its weights came.
        sampler_opened: the weights of a sampler of a tenant lie under this name.
        needs: returns True for records that a replay needs.
    """

    forget_before: Callable[[str, int], None]
    removed: Callable[[str], None]
    sampler_wanted: Callable[[str], bool]
    sampler_opened: Callable[[str, str, str], None]
    needs: Callable[[JournalRecord], bool]


class TrainingTasks:
    """Work of records."""

    def __init__(
        self,
        base: str,
        slots: TrainingSlots,
        folders: ServiceFolders,
        journal: RequestJournal,
        limits: SnapshotLimits,
    ):
        """Begin with the slots and files of a service of this base; `hooks` are set before the first work."""
        self._base, self._slots, self._folders = base, slots, folders
        self._journal, self._limits = journal, limits
        self.hooks: TaskHooks | None = None
        self._outcomes: dict[
            tuple[str, int], JournalRecord
        ] = {}  # results of work with files that was done before a kill
        self._with_gradient: set[str] = set()
        self._steps: dict[str, int] = {}  # steps since the last snapshot
        self._kinds: dict[str, Callable[[JournalRecord], Any]] = {
            "create": self._create,
            "create_from": partial(self._once, self._load),
            "step": self._step,
            "save": partial(self._once, self._save),
            "load": partial(self._once, self._load),
            "sampler_of": self._sampler_of,
            "refuse": self._refuse,
        }

    def passes(self, passes: Sequence[TrainPass]) -> Sequence[LossOutput | Exception]:
        """Run passes of several models in one call."""
        results = self._slots.forward_backward(passes)
        for one, result in zip(passes, results, strict=True):
            if isinstance(result, LossOutput) and not one.forward_only:
                self._with_gradient.add(one.model)
        return results

    def work(self, record: JournalRecord) -> Work:
        """Return the work of a request of a model."""
        kind = record.fields["kind"]
        return recorded_pass(record) if kind == "pass" else partial(self._kinds[kind], record)

    def begin(self, model: str) -> int:
        """Give a model the state of its last but one snapshot; returns the number of the request that follows."""
        numbers = self._folders.snapshots(model)
        if len(numbers) < 2:
            return 0
        self._slots.restore(model, read_state(self._folders.snapshot(model, numbers[-2]))[0])
        return numbers[-2] + 1

    def recorded(self, outcomes: Sequence[JournalRecord]) -> None:
        """Take over outcomes that were recorded before a kill."""
        self._outcomes |= {(one.fields["model"], one.fields["seq"]): one for one in outcomes}

    def end(self, tenant: str, model: str, after: int, name: str | None) -> ModelUnloaded:
        """Give a slot back behind request `after`; `name`: save the state under this name first."""
        if name is not None:
            file = self._folders.saved(tenant, StatePath(model, "weights", name))
            self._write(file, model, after)
        self._slots.unload(model)
        self._drop(model)
        return ModelUnloaded(model)

    # ---- work

    def _create(self, record: JournalRecord) -> ModelCreated:
        model = record.fields["model"]
        try:
            self._slots.create(model, LoraSpec(**record.fields["spec"]))
        except ServiceError:
            self._drop(model)
            raise
        return ModelCreated(model)

    def _step(self, record: JournalRecord) -> StepDone:
        model, seq = record.fields["model"], record.fields["seq"]
        if model not in self._with_gradient:
            raise ServiceError("no gradient: optim_step comes after a forward_backward that succeeded")
        self._with_gradient.discard(model)
        metrics = self._slots.optim_step(model, AdamParams(**record.fields["adam"]))
        self._steps[model] = self._steps.get(model, 0) + 1
        if self._steps[model] >= self._limits.steps:
            self._snapshot(model, seq)
        return StepDone(metrics)

    def _once(self, work: Callable[[JournalRecord], Any], record: JournalRecord) -> Any:
        """Do work with files that others may change in the meantime: its outcome is recorded."""
        fields = record.fields
        found = self._outcomes.pop((fields["model"], fields["seq"]), None)
        if found is not None:  # a save that came, or an error
            if "error" in found.fields:
                raise ServiceError(found.fields["error"], found.fields["category"])
            return StateSaved(str(_path(record)))
        try:
            return work(record)
        except ServiceError as error:
            self._record(record, error=str(error), category=error.category)
            if fields["kind"] == "create_from":
                self._drop(fields["model"])
            raise

    def _save(self, record: JournalRecord) -> StateSaved:
        fields, path = record.fields, _path(record)
        file = self._folders.saved(fields["tenant"], path)
        if file.exists() and not fields["overwrite"] and read_state(file)[1]["seq"] != fields["seq"]:
            raise ServiceError(f"{path} exists; expected another path, or a request with overwrite=True")
        self._write(file, fields["model"], fields["seq"], optimizer=path.kind == "weights")
        self._record(record)
        return StateSaved(str(path))

    def _load(self, record: JournalRecord) -> StateLoaded:
        fields, path = record.fields, StatePath.of(record.fields["path"])
        model, own = fields["model"], self._folders.loaded(record.fields["model"], fields["seq"])
        if not own.exists():
            source = self._folders.saved(fields["tenant"], path)
            if not source.exists():
                raise UnknownId("path", str(path))
            link_file(source, own)
        state, _ = read_state(own, base=self._base)
        self._slots.restore(model, state, optimizer=fields["optimizer"])
        self._with_gradient.discard(model)
        if fields["optimizer"] and state.gradients is not None:
            self._with_gradient.add(model)
        return StateLoaded(str(path))

    def _sampler_of(self, record: JournalRecord) -> SamplerOpened:
        fields = record.fields
        name, sampler = f"{fields['model']}@{fields['seq']}", fields["sampler"]
        if self._hooks.sampler_wanted(sampler):
            self._write(self._folders.adapter(name), fields["model"], fields["seq"], optimizer=False)
            self._hooks.sampler_opened(fields["tenant"], sampler, name)
        return SamplerOpened(sampler)

    def _refuse(self, record: JournalRecord) -> None:
        raise ServiceError(record.fields["error"], record.fields["category"])

    # ---- files

    @property
    def _hooks(self) -> TaskHooks:
        assert self.hooks is not None
        return self.hooks

    def _write(self, file: Path, model: str, seq: int, *, optimizer: bool = True) -> None:
        """Write a model's state behind request `seq`."""
        write_state(file, self._slots.state(model), {"seq": seq}, base=self._base, optimizer=optimizer)

    def _record(self, record: JournalRecord, **outcome: Any) -> None:
        """Note that work has come, and how, before anything else runs: it may not come out in the same way twice."""
        fields = record.fields
        self._journal.append(make_record("outcome", model=fields["model"], seq=fields["seq"], **outcome))

    def _snapshot(self, model: str, seq: int) -> None:
        """Write a model's state; what is older than the snapshot before it is not needed any more."""
        folders = self._folders
        self._steps[model] = 0
        if not (file := folders.snapshot(model, seq)).exists():
            self._write(file, model, seq)
        numbers = folders.snapshots(model)
        if len(numbers) < 2:
            return
        folders.remove_before(model, numbers[-2])
        self._hooks.forget_before(model, numbers[-2] + 1)
        if self._journal.grown > self._limits.journal:
            self._journal.compact(self._hooks.needs)

    def _drop(self, model: str) -> None:
        """Forget a model that has no slot."""
        self._journal.append(make_record("gone", model=model))
        self._folders.remove_model(model)
        self._steps.pop(model, None)
        self._with_gradient.discard(model)
        self._hooks.removed(model)


def _path(record: JournalRecord) -> StatePath:
    return StatePath(record.fields["model"], record.fields["saved_kind"], record.fields["name"])
