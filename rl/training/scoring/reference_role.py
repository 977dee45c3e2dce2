"""The reference role: a reference policy on devices of its own, which scores what the trainer sends.

It holds weights alone. They follow from version 0, which every process of a run can make again, from a version that the
trainer has saved, or from the files of a teacher. So the role has no state to lose, and restarts with the same answers.
"""

import contextlib
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.layers.base import Params, first_params
from axlearn_like.run.events import EventLog
from axlearn_like.training.program import describe_params
from mesh import make_mesh, shard_batch
from mesh.batches import local_rows
from mesh.distributed import ProcessGroup
from mesh.rules import axis_sizes, complete_rows, use_mesh
from rl.protocol.protocols import ReferenceRequest
from rl.training.config import PolicyTrainingConfig
from rl.training.scoring.reference_programs import describe_reference, parts_of_rows
from rl.training.scoring.saved_versions import SavedVersions
from rl.training.spec import FirstVersion

ROLE = "reference"
_POLL = 1.0  # seconds without a request after which the processes look whether one of them must go


class ReferenceScorer:
    """The policy and its programs, in each process of the role; all make the same calls in the same order."""

    def __init__(
        self,
        cfg: PolicyTrainingConfig[Any],
        *,
        first: FirstVersion | None = None,
        devices: Sequence[Any] | None = None,
        saved: SavedVersions | None = None,
    ):
        """Read the parameters; those of a reference that is reset, when the first update compares with them.

        Args:
            first: source of version 0 of the policy; None: the model's own initialisation.
            devices: devices of the mesh; None: all.
            saved: later versions that the reference may be reset to.
        """
        assert cfg.reference is not None, "a fleet's reference role is refused without one"
        self._mesh, self._rules = make_mesh(cfg.reference_mesh, devices), cfg.axis_rules
        self._first, self._saved = first or FirstVersion(), saved
        with use_mesh(self._mesh, self._rules):
            _, self._abstract, self._init = describe_params(cfg.model, self._mesh, "policy")
            self._reference = cfg.reference.build(frozen=cfg.learner.build().frozen(self._abstract))
        self._params: Params = {}
        self._version: int | None = None  # version of `params`
        known = describe_reference(cfg, self._mesh)
        self._rows, self._rollouts = known.rows, known.rollouts
        packing = cfg.build_packing()
        self._most = None if packing is None else packing.rows  # packed rows of a device at a time, as the trainer has
        self._temperature = cfg.temperature
        if cfg.reference.version_at(sys.maxsize) == 0:  # frozen: loaded while the first rollouts are drawn
            with use_mesh(self._mesh, self._rules):
                self._load(0)

    def has(self, version: int) -> bool:
        """Return True if the reference can be made of this version, False while that is still saved."""
        return version == 0 or self._saved is None or self._saved.keep(version)

    def score(self, kind: ReferenceRequest, arrays: Mapping[str, np.ndarray], version: int) -> np.ndarray | None:
        """Return log-probabilities of the targets, float32 and shaped like them; see `ReferenceSource`."""
        count = len(arrays["targets"])
        if not self.has(version):
            return None
        return self.score_part(kind, count, version, lambda rows: {name: x[rows] for name, x in arrays.items()})

    def score_part(
        self, kind: ReferenceRequest, count: int, version: int, read: Callable[[np.ndarray], Mapping[str, np.ndarray]]
    ) -> np.ndarray:
        """Return the log-probabilities of `count` rows, of which `read(indices)` returns those of this process.

        The last row is repeated where they do not divide over the devices.
        """
        rollouts = kind == "rollouts"
        with use_mesh(self._mesh, self._rules), complete_rows() if rollouts else contextlib.nullcontext():
            self._load(version)
            each = math.prod(axis_sizes("batch").values())
            found: list[np.ndarray] = []
            first = 0
            for part, total in parts_of_rows(count, None if rollouts else self._most, each):
                arrays = dict(read(np.minimum(first + local_rows(total), count - 1)))
                placed = shard_batch(arrays, rows=total, by_length=rollouts)
                found.append(self._scored(placed, rollouts=rollouts)[:part])
                first += part
            return np.concatenate(found)

    def _load(self, version: int) -> None:
        """Make or read the parameters, unless they are there."""
        if version != self._version:
            self._version, self._params = None, {}  # memory need not hold both
            self._params = self._reference.alone(partial(self._policy, version))
            self._version = version

    def _policy(self, version: int) -> Params:
        if version and self._saved is not None:
            return restore_params(self._saved.path(version), self._abstract)
        if self._first.initial is not None:
            return self._first.initial(self._abstract)
        return first_params(self._init, self._first.seed, self._abstract)

    def _scored(self, placed: dict[str, jax.Array], *, rollouts: bool) -> np.ndarray:
        if rollouts:
            arrays = {**placed, "temperature": jnp.full(1, self._temperature, jnp.float32)}
            found = self._rollouts(self._params, **arrays)
            return self._on_host(found).logprobs()
        return self._on_host(self._rows(self._params, placed))

    def _on_host(self, found: Any) -> Any:
        """Return arrays of which every process has a part, complete in each."""
        everywhere = NamedSharding(self._mesh, jax.P())
        if self._mesh.is_multi_process:
            found = jax.jit(_same, out_shardings=everywhere)(found)
        return jax.tree.map(np.asarray, found)


def _same(tree: Any) -> Any:
    return tree


class _Request(NamedTuple):
    """A request and its answer."""

    kind: ReferenceRequest
    arrays: Mapping[str, np.ndarray]
    version: int
    answer: "Future[np.ndarray]"


class ReferenceRole:
    """One process of the role. The leader takes requests; all compute each of them together, in one loop."""

    def __init__(
        self, scorer: ReferenceScorer, group: ProcessGroup, events: EventLog, *, leader: "ReferenceRole | None" = None
    ):
        """Connect; `leader`: of several processes the first, for the others."""
        self._scorer, self._group, self._events, self._leader = scorer, group, events, leader
        self._waiting: queue.Queue[_Request] = queue.Queue()
        self._lock, self._number = threading.Lock(), 0
        self._current: Mapping[str, np.ndarray] = {}

    def score(self, kind: ReferenceRequest, arrays: Mapping[str, np.ndarray], version: int) -> np.ndarray | None:
        """Return what `ReferenceScorer.score` does, as soon as the loop has come to it; any thread may ask."""
        with self._lock:
            if not self._scorer.has(version):
                return None
        request = _Request(kind, arrays, version, Future())
        self._waiting.put(request)
        return request.answer.result()

    def part(self, number: int, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Return rows of the arrays of the request that is being answered, to another process."""
        with self._lock:
            if number != self._number:
                raise RuntimeError(f"request {number} of the reference is over; {self._number} is being answered")
            arrays = self._current
        return {name: array[np.asarray(rows)] for name, array in arrays.items()}

    def run(self, leaving: Callable[[], bool]) -> None:
        """Answer requests until a process is asked to leave; who waits for an answer asks the restarted role again."""
        while not self._group.any(leaving()):
            request = self._next() if self._group.leader else None
            about = None
            if request is not None:
                about = self._number, request.kind, len(request.arrays["targets"]), request.version
            about = self._group.broadcast(about)
            if about is None:
                continue
            number, kind, count, version = about
            began = time.monotonic()
            found = self._scorer.score_part(kind, count, version, self._reader(number))
            if request is not None:
                seconds = round(time.monotonic() - began, 4)
                self._events.append(ROLE, "reference", rows=count, seconds=seconds)
                request.answer.set_result(found)

    def _reader(self, number: int) -> Callable[[np.ndarray], Mapping[str, np.ndarray]]:
        """Return the reader of this process's rows of a request."""
        leader = self if self._leader is None else self._leader
        return lambda rows: leader.part(number, rows.tolist())

    def _next(self) -> _Request | None:
        """Return the next request, if one comes in time; the leader's."""
        try:
            request = self._waiting.get(timeout=_POLL)
        except queue.Empty:
            return None
        with self._lock:
            self._number, self._current = self._number + 1, request.arrays
        return request
