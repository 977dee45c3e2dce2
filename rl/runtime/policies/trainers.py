"""The trainers of several policies in one process: one base, one program where their configs allow, and turns."""

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType

from axlearn_like.operations.sdc import CorruptionError
from axlearn_like.run.disk import DiskFull
from axlearn_like.training.updates.programs import Calls
from mesh.errors import UserError
from rl.parameter_server.errors import WeightsError
from rl.runtime.policies.changes import Change
from rl.runtime.policies.controllers import Controllers
from rl.runtime.policies.joint_updates import JointUpdates
from rl.training.trainer import PolicyTrainer

_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.2  # seconds between two looks for batches, the longer nothing is ready


class PolicyTrainers:
    """`PolicyTrainer`s that take turns, each with its own run, controller, parameter server client, seed and config.

    A policy has the bits that it would have alone. The base's arrays are shared, which no step changes or donates, and
    compiled programs, in which policies that have a batch are updated together (`JointUpdates`).

    One that fails by an error of its own (a reward that its objective refuses, a damaged checkpoint) is saved as far as
    it got, named to the controllers, and the others go on; when all have failed, that is an error.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], PolicyTrainer]],
        controllers: Controllers,
        changes: Callable[[], Mapping[str, Change]] = dict,
        join: Callable[[str], PolicyTrainer] | None = None,
    ):
        """Make the trainers: each restores its newest checkpoint, or starts.

        The caller makes the base once, and what it gives each trainer: the policy's `RunDirectory`
        (RUN/policies/NAME), `controllers.of(name)`, a `ParameterServerClient` of its own, and

            base = make_base(experiment.trainer_cfg, FirstVersion(initial, experiment.cfg.seed))
            first = FirstVersion(seed=policy.cfg.seed, base=base, beside=[checkpoint directories of the others])

        Args:
            makers: functions that make each policy's trainer, by name. A UserError of one fails that policy.
            controllers: those of the policies; a policy that has failed before is not made.
            changes: the last change of each policy that has one, taken up between two updates.
            join: makes the trainer of a policy that joins or resumes; None: none does.
        """
        self._controllers, self._changes, self._join = controllers, changes, join
        self._taken: dict[str, int] = {}  # number of each policy's last change that was taken up
        self._stopped = {name for name, change in changes().items() if self._has_stopped(name, change)}
        self._why: dict[str, str] = dict(controllers.failed())
        self._made: dict[str, PolicyTrainer] = {}
        self._names = frozenset(makers)
        self._last: set[str] = set()  # policies whose last version is saved
        self._ended: set[str] = set()  # policies whose last version is evaluated, and whose operations have ended
        self._opened = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:  # a maker that raises leaves none open
            for name, make in makers.items():
                if name in self._stopped or name in self._why:
                    continue
                if (trainer := self._try(name, make)) is not None:
                    self._made[name] = opened.enter_context(trainer)
            self._raise_if_all_failed()
            self._opened = opened.pop_all()
        self._joint = JointUpdates(self._made, self._try)

    def of(self, policy: str) -> PolicyTrainer:
        """Return a policy's trainer."""
        return self._made[policy]

    @property
    def step(self) -> int:
        """Completed updates of all policies together."""
        return sum(trainer.step for trainer in self._made.values())

    @property
    def finished(self) -> bool:
        """True if the last version of every policy that has not failed or stopped is made and evaluated."""
        return all(trainer.finished for trainer in self._going().values())

    def failed(self) -> Mapping[str, str]:
        """Return why each policy that has failed did."""
        return self._why

    def done(self) -> bool:
        """Return True if no policy has an update left to make."""
        return all(trainer.done() for trainer in self._going().values())

    def start(self) -> None:
        """Publish the current version of each policy, and those before it that workers may still need."""
        for name, trainer in self._going().items():
            self._try(name, trainer.start)

    def run(self, stop: Callable[[], bool] = lambda: False) -> int:
        """Update each to its last step and evaluation, or until `stop()`, and save; returns the updates completed."""
        with self:
            self.start()
            pause = _FIRST_PAUSE
            while not self.finished and not stop():
                if self._round(stop) | self._look_evaluated():
                    pause = _FIRST_PAUSE
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, _LAST_PAUSE)
            self._close()
        return self.step

    def run_once(self, timeout: float = 0.0) -> bool:
        """Make an update of each policy whose batch is complete; False if none is within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            updated = self._round()
            left = deadline - time.monotonic()
            if updated or left <= 0:
                return updated
            time.sleep(min(left, _FIRST_PAUSE))

    def settle(self) -> None:
        """Wait until the current version of each can be pulled."""
        for name, trainer in self._going().items():
            self._try(name, trainer.settle)

    def offer_evaluated(self) -> None:
        """Keep the best of each policy's checkpoints that have been evaluated since they were saved."""
        for name, trainer in self._going().items():
            self._try(name, trainer.offer_evaluated)

    def save(self) -> None:
        """Start to write a checkpoint of each policy's last update."""
        for name, trainer in self._going().items():
            self._try(name, trainer.save)

    def close(self) -> None:
        """Save each, wait until all are on disk, and end the sessions."""
        with self:
            self._close()

    def __enter__(self) -> "PolicyTrainers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the operations of all; nothing is saved."""
        self._opened.__exit__(kind, error, trace)

    def _round(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Make an update of each policy whose batch is there, until `stop()`; False if there was none."""
        self._take_up_changes()
        updated = False
        for name, why in self._controllers.failed().items():
            if name in self._going():
                self._end_failed(name, why)  # a worker has found it
        taken: dict[str, Calls] = {}
        for name, trainer in self._going().items():
            if trainer.done() or stop():
                continue
            if name not in self._joint:
                updated |= bool(self._try(name, trainer.run_once))
            elif (calls := self._try(name, partial(self._joint.take, name))) is not None:
                taken[name] = calls
        return self._joint.make(taken, stop) or updated

    def _close(self) -> None:
        for name, trainer in self._going().items():
            if name not in self._ended:
                self._try(name, trainer.close)

    def _going(self) -> dict[str, PolicyTrainer]:
        return {name: one for name, one in self._made.items() if name not in self._why and name not in self._stopped}

    def _has_stopped(self, name: str, change: Change) -> bool:
        """Tell the controllers of a change; returns True if it stops the policy."""
        tell = self._controllers.dismiss if change.stopped else self._controllers.admit
        tell(name, change.number)
        self._taken[name] = change.number
        return change.stopped

    def _take_up_changes(self) -> None:
        """Begin the policies that join or resume, then stop those that are to stop."""
        new = [(name, one) for name, one in self._changes().items() if one.number > self._taken.get(name, 0)]
        for name, change in sorted(new, key=lambda one: one[1].stopped):
            if change.stopped:
                self._stop(name, change)
            elif name in self._going():  # stopped and resumed between two looks
                self._taken[name] = change.number
            elif self._join is not None:
                self._begin(name, change, partial(self._join, name))

    def _begin(self, name: str, change: Change, make: Callable[[], PolicyTrainer]) -> None:
        """Begin or resume a policy beside the others: from its newest checkpoint, if it has one."""
        self._names |= {name}
        self._has_stopped(name, change)
        for known in (self._stopped, self._last, self._ended):
            known.discard(name)
        self._why.pop(name, None)
        if (why := self._controllers.failed().get(name)) is not None:
            self._why[name] = why
        elif (trainer := self._try(name, make)) is not None:
            self._made[name] = self._opened.enter_context(trainer)
            self._joint.add(name, trainer)
            self._try(name, trainer.start)

    def _stop(self, name: str, change: Change) -> None:
        """Save a policy as far as it got, and go on without it."""
        if name in self._going() and name not in self._ended:
            self._try(name, self._made[name].close)
        self._stopped.add(name)
        self._has_stopped(name, change)

    def _look_evaluated(self) -> bool:
        """Look after the policies whose updates are made; True if one of them has got on."""
        changed = False
        for name, trainer in self._going().items():
            if not trainer.done() or trainer.finished:
                continue
            if name not in self._last:
                self._last.add(name)
                self._try(name, trainer.wind_up)
            elif self._try(name, trainer.look_evaluated):
                changed = True
                if trainer.finished:
                    self._try(name, trainer.offer_evaluated)
                    self._try(name, trainer.close)
                    self._ended.add(name)
        return changed

    def _try[T](self, name: str, call: Callable[[], T]) -> T | None:
        """Call something of one policy; if that is an error of its own it has failed, and nothing is returned."""
        try:
            return call()
        except (CorruptionError, DiskFull, WeightsError):
            raise  # an error of what all policies use: devices, disk, parameter server
        except UserError as error:
            self._end_failed(name, str(error), error)
            return None

    def _end_failed(self, name: str, why: str, error: UserError | None = None) -> None:
        """Save a policy that has failed as far as it got, and tell of it."""
        self._why[name] = why
        step = None
        if (trainer := self._made.get(name)) is not None:
            step = trainer.step
            with contextlib.suppress(UserError):
                trainer.close()
        self._controllers.fail(name, why, step)
        self._raise_if_all_failed(error)

    def _raise_if_all_failed(self, last: UserError | None = None) -> None:
        if self._names - self._stopped and self._names - self._stopped <= self._why.keys():
            each = "".join(f"\n  {policy}: {said}" for policy, said in sorted(self._why.items()))
            raise UserError(f"all policies have failed:{each}") from last
