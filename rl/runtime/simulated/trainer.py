"""The trainer of a simulated run: the real updates and publication around an update that is a duration."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from axlearn_like.checkpoint.interval import SAVE_EVERY
from axlearn_like.run.events import EventLog
from mesh.distributed import ProcessGroup
from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.server import ParameterServer
from rl.runtime.simulated.durations import Durations
from rl.runtime.simulated.virtual_clock import VirtualClock
from rl.runtime.simulated.weights import Links, SimulatedPublisher
from rl.training.config import PolicyTrainingConfig
from rl.training.publication import Publication
from rl.training.spec import DrawingPolicy
from rl.training.steps.policy_updates import PolicyUpdates, Steps
from rl.training.steps.take import AgreedBatch, TakeStep

_WAIT = 2.0  # seconds of one request for a batch
_EVALUATION_POLL = 0.2  # seconds between two questions for the end of the last evaluation


@dataclasses.dataclass
class Saved:
    """The newest checkpoint that counts: its step, the versions that workers may need, and the prompt pool."""

    step: int = 0
    versions: tuple[int, ...] = ()
    pool: Mapping[str, Any] | None = None


@dataclasses.dataclass
class TrainerLog:
    """Record of the trainers of a run so far: rows of metrics, updates (those made again, too), seconds."""

    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    busy: float = 0.0
    made: int = 0  # updates, those made again included
    saving: float = 0.0
    ages: Counter[int] = dataclasses.field(default_factory=Counter[int])  # rollouts by their age in updates


@dataclasses.dataclass(frozen=True)
class TrainerParts:
    """Parts of a trainer."""

    cfg: PolicyTrainingConfig[Any]
    clock: VirtualClock
    links: Links
    server: ParameterServer
    controller: Any  # calls of the controller
    events: EventLog
    work: Callable[[float, float], None]  # lets the seconds of a computation pass on so many cores

    @property
    def durations(self) -> Durations:
        """Durations of the run."""
        return self.links.durations


class SimulatedTrainer:
    """One incarnation of the trainer; it begins with the newest checkpoint."""

    def __init__(self, parts: TrainerParts, saved: Saved, log: TrainerLog, grain: int = 1):
        """Take the checkpoint, which `run` replaces by newer ones; `grain`: tokens that one in an array stands for."""
        self._parts, self._saved, self._log, self._grain = parts, saved, log, grain
        group, weights = ProcessGroup("trainer"), self._client()
        self._publication = Publication(
            parts.cfg, weights, parts.controller, group, parts.events, drawing=DrawingPolicy()
        )
        if saved.step:
            recent = {str(n): {} for n in range(len(saved.versions))}
            self._publication.restore(recent, list(saved.versions), {})
            self._publication.pool = saved.pool
        take = TakeStep(parts.controller, group)
        steps: Any = cast(Any, Steps)(take, self._score, _Fill(), _Inputs())
        self._updates = PolicyUpdates(steps, self._publication, parts.events)

    def run(self) -> None:
        """Update until the last step, and await the last evaluation."""
        parts, step = self._parts, self._saved.step
        clock, d, state = parts.clock, parts.durations, {"params": {}}
        self._publication.start(step, {})
        began = clock()
        while step < parts.cfg.num_steps:
            tokens = self._updates.next(step + 1, state, _WAIT)
            if tokens is None:
                continue
            parts.work(seconds := d.update + d.update_token * tokens, d.update_cores)
            self._log.busy += seconds
            self._log.made += 1
            self._updates.updated(step + 1, state, {})
            step += 1
            self._write(step, tokens, clock() - began)
            began = clock()
            parts.work(d.update_rest, 1.0)
            if step % (parts.cfg.checkpoint.save_every or SAVE_EVERY) == 0:
                self._save(step)
        self._publication.settle()
        while (status := parts.controller.status())["version"] < step or status["evaluating"] is not None:
            clock.sleep(_EVALUATION_POLL)

    def _score(self, agreed: AgreedBatch, state: Any, seen: Any) -> Any:
        """Return the batch without rows: what is learned from it has no duration of its own."""
        rollouts = [rollout for header in agreed.headers for rollout in header.rollouts]
        rewards = [score.reward for header in agreed.headers for score in header.scores]
        self._log.ages.update(agreed.step - rollout.oldest for rollout in rollouts)
        tokens = sum(rollout.length for rollout in rollouts) * self._grain
        figures = {"gen_tokens": float(tokens), "completion_length": tokens / len(rollouts)}
        arranged = SimpleNamespace(figures={**figures, "reward": float(np.mean(rewards))})
        tokens += sum(header.prompt_length for header in agreed.headers)
        known: dict[str, Any] = {"headers": agreed.headers, "contents": agreed.contents, "arranged": arranged}
        return SimpleNamespace(**known, tokens=tokens, flops=None)

    def _client(self) -> ParameterServerClient:
        parts = self._parts
        publisher = lambda **given: SimulatedPublisher(parts.links, parts.server, **given)  # noqa: E731
        return cast(ParameterServerClient, SimpleNamespace(publisher=publisher, directory=parts.server.directory))

    def _save(self, step: int) -> None:
        parts, d = self._parts, self._parts.durations
        _, versions = self._publication.saved({})
        new = Saved(step, tuple(versions), self._publication.pool)
        parts.links.spend(d.save)
        self._log.saving += d.save

        def written() -> None:
            if new.step > self._saved.step:
                self._saved.step, self._saved.versions, self._saved.pool = new.step, new.versions, new.pool
                parts.events.append("trainer", "saved", step=step)

        parts.clock.timer(d.write, written)

    def _write(self, step: int, tokens: int, seconds: float) -> None:
        row = {"phase": "rl", "step": step, "time": round(self._parts.clock.wall(), 3)}
        numbers = {key: value for key, value in self._updates.metrics().items() if isinstance(value, int | float)}
        row |= {key: round(float(value), 6) for key, value in numbers.items()}
        times = {"step_seconds": round(seconds, 6), "input_seconds": row["wait_seconds"]}
        self._log.rows.append({**row, "train_tokens": tokens, **times})


class _Fill:
    columns = ()

    def __call__(self, scored: Any, params: Any) -> Any:
        return scored


class _Inputs:
    epochs = 1

    def __call__(self, filled: Any) -> int:
        return filled.tokens
