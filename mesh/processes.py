"""What the processes of one program agree on: they run the same code over one mesh and must take the same turns.

Decisions travel through the key-value service of jax.distributed. A broadcast over the devices
(`jax.experimental.multihost_utils`) would need values of one shape, stand in line behind the devices' work, and wait
without an end or a word for a process that is gone; the service takes a third of a millisecond, and its waits can be
told.
"""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the service has no public name; orbax uses it by this one, too
from jax.experimental import multihost_utils

_LOOK = 1.0  # seconds after which a wait that goes on is looked at
_programs = itertools.count()  # several may follow each other in one process, in the same order in all

OnWait = Callable[[str, float], None]


class Processes:
    """The processes of one program as one of them sees them; in a program of one, nothing is sent and nothing costs.

    All must make the same calls in the same order.
    """

    def __init__(
        self, role: str = "process", *, on_wait: OnWait | None = None, say_after: float = 30.0, limit: float = 3600.0
    ):
        """Args:
        role: what they are together; see `process_name`.
        on_wait: told of a wait for another process (its name, seconds), after `say_after` seconds and whenever that
            has doubled.
        limit: seconds after which a wait is an error.
        """
        self._role, self._on_wait, self._say_after, self._limit = role, on_wait, say_after, limit
        state = distributed.global_state
        self._client: Any = state.client
        self.index, self.count = (state.process_id, state.num_processes) if state.client else (0, 1)
        self._program = f"agreed/{next(_programs)}"
        self._turns = itertools.count()
        self._mine: list[str] = []  # keys that this process has written

    @property
    def leader(self) -> bool:
        """Whether this is the first of them: the one that speaks for all."""
        return self.index == 0

    @property
    def name(self) -> str:
        """Of this process."""
        return process_name(self._role, self.index)

    def share(self, value: Any) -> Any:
        """The leader's value, in all of them; it must be small, and JSON can hold it."""
        if self.count == 1:
            return value
        key = self._next_key()
        if self.leader:
            self._put(key, value)
            return value
        return self._get(key, of=0)

    def any(self, flag: bool) -> bool:
        """Whether one of them said so. None has the answer before all have asked."""
        if self.count == 1:
            return flag
        key, former = self._next_key(), len(self._mine)
        if self.leader:
            flag = any([flag, *(self._get(f"{key}/{other}", of=other) for other in range(1, self.count))])
        else:
            self._put(f"{key}/{self.index}", flag)
        decided = self.share(flag)
        for key in self._mine[:former]:  # all are here, so all have read what was written before
            self._client.key_value_delete(key)
        del self._mine[:former]
        return decided

    def meet(self) -> None:
        """None goes on before all are here."""
        self.any(False)

    def _next_key(self) -> str:
        return f"{self._program}/{next(self._turns)}"

    def _put(self, key: str, value: Any) -> None:
        self._mine.append(key)
        self._client.key_value_set(key, json.dumps(value))

    def _get(self, key: str, of: int) -> Any:
        began, say_at = time.monotonic(), self._say_after
        while True:
            try:
                return json.loads(self._client.blocking_key_value_get(key, int(1000 * _LOOK)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            seconds, other = time.monotonic() - began, process_name(self._role, of)
            if seconds > self._limit:
                raise TimeoutError(f"{self.name} has waited {seconds:.0f} s for {other}, to go on together")
            if seconds > say_at and self._on_wait is not None:
                say_at = 2 * seconds
                self._on_wait(other, seconds)


def process_name(role: str, index: int) -> str:
    """The first has the role's own name: "trainer", "trainer-1", "trainer-2" ..."""
    return f"{role}-{index}" if index else role


def readable(array: jax.Array) -> np.ndarray:
    """The whole array on this host. If it is spread over processes, all of them must ask."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
