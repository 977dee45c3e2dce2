"""Publication of the weights: the current version and those before it that workers may still ask for."""

import secrets
from collections.abc import Collection, Mapping
from typing import Any

from axlearn_like.layers.base import Params
from axlearn_like.layers.parameter_names import merged, without
from axlearn_like.run.events import EventLog
from mesh.distributed import ProcessGroup
from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.push.coordinated import CoordinatedPush
from rl.parameter_server.push.publisher import Pusher
from rl.parameter_server.push.snapshot import Snapshot
from rl.protocol.headers import MARK
from rl.protocol.protocols import BatchSource
from rl.training.config import PolicyTrainingConfig
from rl.training.spec import DrawingPolicy


class Publication:
    """One process's part of it; all processes of the trainer make the same calls in the same order.

    Publishing runs on a thread; the next update waits only until the weights that it overwrites have been copied.
    """

    def __init__(
        self,
        cfg: PolicyTrainingConfig[Any],
        weights: ParameterServerClient,
        controller: BatchSource,
        group: ProcessGroup,
        events: EventLog,
        *,
        frozen: Collection[str] = (),
        unrounded: Collection[str] = (),
        drawing: DrawingPolicy,
    ):
        """Connect the parameter server.

        Args:
            cfg: the trainer's: versions before the current one that are kept (`staleness`), and the interval of
                versions of which the newest is kept too (`evaluate_every`).
            weights: access to it.
            controller: learns what can be pulled.
            frozen: paths of the parameters that no update changes: they are copied and pushed once, or, where engines
                have them already, not at all.
            unrounded: paths of the parameters that no codec may round (`Layer.unrounded`).
            drawing: differences of the engines' policy: types in which they read, and whether they have the base.
        """
        self._pusher = Pusher(group.broadcast(secrets.token_hex(8)), group.index, group.count)
        self._publisher = weights.publisher(pusher=self._pusher, unrounded=unrounded, dtypes=drawing.dtypes)
        self._versions, self._controller = weights.directory, controller
        self._group, self._events, self._staleness = group, events, cfg.staleness
        self._back, self._fixed = max(cfg.staleness, drawing.opponents.back), frozenset(drawing.opponents.fixed)
        self._recent: list[Snapshot] = []  # the `_back` versions before the current one, and fixed ones
        self._every, self._frozen = cfg.evaluate_every, frozenset(frozen)
        self._omitted = self._frozen if drawing.has_base else frozenset[str]()  # paths of what is not published
        self._kept = self._frozen - self._omitted  # paths of what is pushed once
        self._evaluated: Snapshot | None = None  # the newest version to evaluate, if this process made it
        self._push: CoordinatedPush | None = None  # push of the current version
        self.pool: Mapping[str, Any] | None = None  # state of the controller's prompt pool, as of the current version

    def start(self, version: int, params: Params) -> None:
        """Publish the current version and those that workers may still need; only then ask for data."""
        self.settle()
        if self._group.leader:
            self._versions.rewind(version, self._pusher.trainer)
        self._group.barrier()
        for snapshot in self._to_publish_again():
            CoordinatedPush(self._publisher.republish(snapshot), self._publisher, self._group).settle()
        self._begin(version, params)
        self.settle()
        if self._group.leader:
            for held in self._fixed.intersection(one.version for one in self._recent):
                self._versions.pin(held, for_good=True)
            first = min([one.version for one in self._recent if version - one.version <= self._staleness] or [version])
            self._controller.begin(version, first, held=self._held(version), pool=self.pool)

    def copied(self) -> Snapshot:
        """Return the current version on the host: after that the next update may overwrite it."""
        assert self._push is not None, "start() publishes before any update"
        return self._push.snapshot()

    def publish(self, version: int, params: Params) -> None:
        """Begin to publish the version of an update; at most one is under way."""
        known = [*self._recent, self.copied()]
        self._recent = [one for one in known if version - one.version <= self._back or one.version in self._fixed]
        self._begin(version, params)

    def settle(self) -> None:
        """Wait until the current version can be pulled; raises what went wrong with it."""
        if self._push is not None:
            self._push.settle()

    def restart_if_forgotten(self, version: int, params: Params) -> bool:
        """Publish again if the parameter server or the controller has restarted, and so is empty."""
        settled = self._push is not None and self._push.settled()
        if not settled or not self._group.broadcast(self._group.leader and self._forgotten(version)):
            return False
        self.start(version, params)
        return True

    def params(self, version: int, current: int, like: Params) -> Params:
        """Return the parameters of a version; `like` are those of the `current` one."""
        if version == current:
            return like
        snapshot = next(snapshot for snapshot in self._recent if snapshot.version == version)
        return merged(like, snapshot.params(without(like, self._omitted)))

    # ---- in checkpoints

    def describe(self, params: Params) -> dict[str, Params]:
        """Return the abstract arrays of `saved`."""
        return {str(i): without(params, self._frozen) for i in range(self._back + len(self._fixed))}

    def saved(self, params: Params) -> tuple[dict[str, Params], list[int]]:
        """Return earlier versions without frozen parameters, padded by the current one, and their numbers."""
        trained = without(params, self._frozen)
        recent = [snapshot.params(trained) for snapshot in self._recent]
        recent += [trained] * (self._back + len(self._fixed) - len(recent))
        return {str(i): copy for i, copy in enumerate(recent)}, [snapshot.version for snapshot in self._recent]

    def restore(self, recent: dict[str, Params], versions: list[int], params: Params) -> None:
        """Take back what `saved` returned; `params` are those of the current version."""
        for i, version in enumerate(versions):
            whole = without(merged(params, recent[str(i)]), self._omitted)
            copy = self._publisher.copy(whole, version, frozen=self._kept, before=self._newest_copy())
            self._recent.append(copy)

    def _begin(self, version: int, params: Params) -> None:
        self.settle()
        began = self._events.clock()

        def published(snapshot: Snapshot) -> None:
            what: dict[str, Any] = {"version": version, "nbytes": snapshot.copied, "checksum": snapshot.checksum}
            what["arrays"] = "".join(mark[:MARK] for _, mark in sorted(snapshot.fingerprints.items()))
            self._events.append(self._group.name, "push", seconds=round(self._events.clock() - began, 4), **what)
            if self._every and version and version % self._every == 0:
                self._evaluated = snapshot
                if self._group.leader:
                    self._versions.pin(version)
            if self._group.leader:
                if version in self._fixed:
                    self._versions.pin(version, for_good=True)
                self._controller.published(version)

        before, sent = self._newest_copy(), without(params, self._omitted)
        push = self._publisher.publish_async(sent, version, published, frozen=self._kept, before=before)
        self._push = CoordinatedPush(push, self._publisher, self._group)

    def _newest_copy(self) -> Snapshot | None:
        if self._push is not None:
            return self._push.snapshot()
        return self._recent[-1] if self._recent else None

    def _to_publish_again(self) -> list[Snapshot]:
        """Return the versions before the current one that must be there, oldest first."""
        evaluated = [self._evaluated] if self._evaluated is not None else []
        known = {snapshot.version for snapshot in self._recent}
        return [*(one for one in evaluated if one.version not in known), *self._recent]

    def _held(self, version: int) -> int | None:
        """Return the newest version to evaluate, if it is older than the current one and can still be pulled."""
        newest = version - version % self._every if self._every else 0
        if not newest or newest == version or newest not in self._versions.versions():
            return None
        self._versions.pin(newest)
        return newest

    def _forgotten(self, version: int) -> bool:
        """Return True if the parameter server or the controller lacks what it has had from this trainer."""
        needed = {*(snapshot.version for snapshot in self._to_publish_again()), version}
        lacking = needed.difference(self._versions.versions())
        return bool(lacking) or self._controller.status()["version"] < version
