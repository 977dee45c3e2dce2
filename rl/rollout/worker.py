"""The rollout worker: lease, pull, generate, have verified, submit; and again.

It holds nothing that cannot be had again: kill it at any moment and its lease goes to another. Asked to leave, it hands
back what it has, for another to go on from.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from axlearn_like.run.events import EventLog, span
from axlearn_like.tokenizers.protocol import Tokenizer
from mesh import UserError
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.pull.fetch import PullStats
from rl.roles.messages import Group, Lease, Rollout
from rl.roles.protocols import LeaseSource, ScoreSource, WeightSource
from rl.rollout.engine import RolloutEngine, Swap
from rl.rollout.request import Request

_PULL_ATTEMPTS = 5  # in a row that may fail before the run does


class RolloutWorker:
    """Generates what the controller leases to it, under the name it is given."""

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        seed: int,
        controller: LeaseSource,
        weights: WeightSource,
        verifier: ScoreSource,
        events: EventLog,
        pull_timeout: float = 60.0,
        swap: Swap = "keep_cache",
        began: float | None = None,
    ):
        """`swap`: what becomes of sequences under way when newer weights are taken up (see the engine).

        `began`: when its process was started, if not now (`time.time()`).
        """
        self.name, self._engine, self._tokenizer, self._seed = name, engine, tokenizer, seed
        self._controller, self._weights, self._verifier = controller, weights, verifier
        self._events, self._pull_timeout = events, pull_timeout
        self._swap: Swap = swap
        self._failed_pulls = 0  # in a row
        self._began = time.time() if began is None else began
        self._productive = False  # some rollouts were accepted
        self._stop: Callable[[], bool] = lambda: False
        self._incarnation = 0  # of the trainer that made the weights in place
        self._void = False  # what is in hand has gone to another
        self._whole: tuple[Lease, list[Rollout]] | None = None  # generated and not yet submitted

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Work until the controller says that the run is over, or until `stop()`: then hand back what is in hand."""
        self._stop = stop
        self._controller.join(self.name)
        while not stop() and not self._controller.status()["stopped"]:
            while self.run_once(timeout=2.0):
                pass
        self._controller.leave(self.name)

    def run_once(self, timeout: float = 0.0) -> bool:
        """One lease; False if none was to be had, or it was handed back."""
        if self._stop() or (lease := self._controller.lease(self.name, timeout)) is None:
            return False
        if (
            lease.incarnation != self._incarnation
        ):  # what is in place may be weights of a trainer that died before it saved them
            self._engine.version, self._incarnation = -1, lease.incarnation
        if not self._load(lease.version):
            return True
        with self._span("generate", step=lease.step, lease=lease.id, version=lease.version) as span:
            rollouts = self._generate(lease)
            span["tokens"] = sum(len(r.tokens) for r in rollouts) - sum(len(r.tokens) for r in lease.partial)
        if self._stop():
            self._hand_back(lease, rollouts)
            return False
        if self._void:
            return True
        check_whole(rollouts)
        if self._controller.generated(lease.id):
            self._whole = lease, rollouts
            accepted = self._controller.submit(lease.id, self._score(lease, rollouts))
            self._whole = None
            if accepted and not self._productive:
                self._productive = True
                self._events.append(self.name, "productive", join_s=round(time.time() - self._began, 3))
        return True

    def abandon(self) -> None:
        """From another thread, when there is no more time: free the lease, and hand back rollouts that are whole."""
        if (whole := self._whole) is not None:
            self._hand_back(*whole)
        self._controller.leave(self.name)

    def _generate(self, lease: Lease) -> list[Rollout]:
        """All rollouts of a lease in its order; some are not whole if it is void, or the worker is asked to leave."""
        numbers = []
        for prompt in lease.prompts:
            partial = tuple(r for r in lease.partial if r.prompt_id == prompt.id)
            numbers.append(self._engine.submit(Request(prompt, lease.samples, self._seed, partial=partial)))
        rollouts: dict[int, tuple[Rollout, ...]] = {}
        self._void, heard = False, time.monotonic()
        while len(rollouts) < len(numbers):
            if self._stop() or self._void:
                finished = self._engine.abort_all()
            else:
                finished = self._engine.step()
                if lease.follow:
                    self._follow()
            rollouts |= {one.number: one.rollouts for one in finished}
            if time.monotonic() - heard > lease.seconds / 4:
                self._void, heard = not self._controller.renew(lease.id), time.monotonic()
        return [rollout for number in numbers for rollout in rollouts[number]]

    def _hand_back(self, lease: Lease, rollouts: list[Rollout]) -> None:
        if all(rollout.finish_reason != "error" for rollout in rollouts):
            self._controller.hand_back(lease.id, tuple(rollouts))

    def _load(self, version: int) -> bool:
        """False if the version is not to be had for now: its trainer died, and makes it again when it is back."""
        if version == self._engine.version:
            return True
        with self._span("pull", version=version) as span:
            try:
                placed, moved = self._weights.take(version, self._pull_timeout)
            except WeightsError as error:
                self._failed_pulls += 1
                if self._failed_pulls >= _PULL_ATTEMPTS:
                    raise
                span["error"] = str(error)
                self._controller.join(self.name)  # frees the lease
                return False
            self._failed_pulls = 0
            span |= _figures(moved)
        with self._span("swap", version=version):
            self._engine.set_weights(placed, version, rewind=True)
        return True

    def _follow(self) -> None:
        """Between two dispatches: take up newer weights if they are here."""
        if (found := self._weights.newer()) is None:
            return
        newest, placed, moved = found
        self._events.append(self.name, "pull", version=newest, seconds=0.0, **_figures(moved))
        with self._span("swap", version=newest, swap=self._swap):
            self._engine.set_weights(placed, newest, swap=self._swap)

    def _score(self, lease: Lease, rollouts: list[Rollout]) -> tuple[Group, ...]:
        with self._span("score", step=lease.step):
            answers = [self._tokenizer.decode(rollout.tokens) for rollout in rollouts]
            scores = self._verifier.score([r.prompt_id for r in rollouts], answers)
        n = lease.samples
        return tuple(
            Group(prompt, tuple(rollouts[i * n : (i + 1) * n]), tuple(scores[i * n : (i + 1) * n]))
            for i, prompt in enumerate(lease.prompts)
        )

    def _span(self, event: str, **fields: Any) -> AbstractContextManager[dict[str, Any]]:
        return span(self._events, self.name, event, **fields)


def _figures(moved: PullStats) -> dict[str, Any]:
    """Of a pull, whose `seconds` are those that the worker has waited; most of the transfer goes on beside drawing."""
    seconds = round(moved.seconds, 4)
    figures = {"nbytes": moved.needed, "network": moved.network, "source": moved.source, "checksum": moved.checksum}
    return {**figures, "transfer_seconds": seconds}


def check_whole(rollouts: Sequence[Rollout]) -> None:
    """Refuse to go on with a policy whose logits are not all numbers: nothing that it draws is of use.

    Raises:
        UserError: naming the first prompt that failed, and the version.
    """
    for rollout in rollouts:
        if rollout.finish_reason not in ("stop", "length"):
            raise UserError(
                f"prompt {rollout.prompt_id}, sample {rollout.sample_id}: drawing ended with {rollout.finish_reason!r} "
                f"after {len(rollout.tokens)} tokens; are the policy's weights all numbers? (A learning rate that is "
                "too high, or no clipping, are the usual causes.)"
            )
