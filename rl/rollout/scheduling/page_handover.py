"""Handover of KV pages: those of rollouts that a worker hands back go to the worker that continues them.

Without it that worker computes them again, as it does with whatever is late, lost, damaged or of another version.
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from axlearn_like.run.events import EventLog, span
from mesh import UserError
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.store.page_depot import PageDepot
from rl.protocol.messages import WHOLE, Lease, Rollout
from rl.rollout.engine import RolloutEngine
from rl.rollout.scheduling.page_exports import export_pages, import_pages

_SECONDS = 5.0  # limit of leaving pages, a part of the time that a preemption gives


class PageHandover:
    """Leaves and takes the pages of an engine with tiers; an event for each, on both sides."""

    def __init__(self, engine: RolloutEngine, depot: PageDepot, events: EventLog):
        """`depot`: where pages wait for the next worker."""
        self._engine, self._depot, self._events = engine, depot, events

    def leave(self, worker: str, lease: Lease, rollouts: Iterable[Rollout]) -> None:
        """Leave the pages of rollouts that are not complete, before these are handed back."""
        began = self._events.clock()
        with span(self._events, worker, "pages_left", lease=lease.id) as fields:
            count = nbytes = 0
            for name, tokens in self._sequences(lease, rollouts):
                if self._events.clock() - began > _SECONDS:
                    break
                try:
                    self._depot.put(name, data := export_pages(self._engine, tokens))
                except WeightsError as error:
                    fields["error"] = str(error)
                    break
                count, nbytes = count + 1, nbytes + len(data)
            fields |= {"sequences": count, "nbytes": nbytes}

    def take(self, worker: str, lease: Lease) -> None:
        """Take the pages that were left of the rollouts which a lease continues; the rest is computed again."""
        with span(self._events, worker, "pages_taken", lease=lease.id) as fields:
            count = nbytes = moved = damaged = 0
            for name, _ in self._sequences(lease, lease.partial):
                try:
                    if (data := self._depot.take(name)) is None:
                        continue
                    moved += import_pages(self._engine, data)
                except WeightsError as error:
                    fields["error"] = str(error)
                    break
                except UserError:  # damaged, or of another engine
                    damaged += 1
                    continue
                count, nbytes = count + 1, nbytes + len(data)
            pages = moved // self._engine.cfg.page_size
            fields |= {"sequences": count, "pages": pages, "nbytes": nbytes, "damaged": damaged}

    def _sequences(self, lease: Lease, rollouts: Iterable[Rollout]) -> Iterator[tuple[str, np.ndarray]]:
        """Return name and tokens of each rollout that is not complete and fills a page."""
        prompts = {prompt.id: prompt.tokens for prompt in lease.prompts}
        for rollout in rollouts:
            tokens = np.concatenate([prompts[rollout.prompt_id], rollout.tokens]).astype(np.int32)
            if rollout.finish_reason not in WHOLE and len(tokens) > self._engine.cfg.page_size:
                digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
                yield f"{self._engine.version}-{digest}", tokens
