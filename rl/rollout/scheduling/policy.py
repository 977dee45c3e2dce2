"""The policy that an engine draws from: the version in place, and one that waits for running requests to end."""

from typing import Literal

from mesh import UserError
from rl.rollout.model_runner.executor import Executor
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.scheduling.lifecycle import Lifecycle
from rl.rollout.scheduling.scheduler import Scheduler

Swap = Literal["keep_cache", "recompute", "drain"]  # handling of running sequences when the weights change


class InstalledPolicy:
    """Weights in place."""

    def __init__(self, executor: Executor, scheduler: Scheduler, lifecycle: Lifecycle):
        self._executor, self._scheduler, self._lifecycle = executor, scheduler, lifecycle
        self.version = -1  # version of the weights in place, or -1
        self.approximations: tuple[str, ...] = ()  # tags for rollouts drawn with them
        self._next: tuple[PlacedWeights, int] | None = None

    def check(self, version: int, *, rewind: bool) -> None:
        """Refuse a version that is older than the newest, unless `rewind` (UserError)."""
        newest, place = (self.version, "in place") if self._next is None else (self._next[1], "to come next")
        if version < newest and not rewind:
            raise UserError(f"weights of version {version} are older than version {newest}, which is {place}")

    def switch(self, placed: PlacedWeights, version: int, swap: Swap) -> None:
        """Switch to a policy now or, with "drain", when all requests that have started have ended."""
        if swap == "drain" and self._lifecycle.started:
            self._next, self._scheduler.draining = (placed, version), True
        else:
            self._install(placed, version, recompute=swap == "recompute")

    def install_due(self) -> None:
        """Switch to the policy that waits, if no request that has started is left."""
        if self._next is not None and not self._lifecycle.started:
            self._install(*self._next, recompute=False)

    def _install(self, placed: PlacedWeights, version: int, *, recompute: bool) -> None:
        scheduler = self._scheduler
        self._executor.install(placed)
        self._next = None
        self.approximations = placed.approximations
        self.version = scheduler.version = version
        scheduler.draining = False
        scheduler.kv_cache.forget()
        for sequence in [one for group in self._lifecycle.groups.values() for one in group.sequences if one.cached]:
            if recompute:
                scheduler.drop_pages(sequence)
            else:
                sequence.mix_cache()

    def sleep(self) -> None:
        """Give back the memory of weights and cache, until `install`. Nothing may be unfinished."""
        self._scheduler.kv_cache.forget()
        self._executor.sleep()
        self.version, self._next = -1, None
