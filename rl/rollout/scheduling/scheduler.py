"""The scheduler of sequences: rows of the batch, prefill order, pages and preemption. Host code, no device.

Waiting sequences go in order of (priority, arrival, sample). When pages run out, cached prefixes go first; then the
sequence that would go last gives up its pages, keeps its tokens, and waits to be prefilled again. With tiers both go
to the host, and come back when they are needed.
"""

import bisect
from collections.abc import Callable, Iterator
from itertools import islice

from rl.protocol.messages import FinishReason
from rl.rollout.agent_loops.commands import Join, Wait
from rl.rollout.kv_cache.manager import KVCacheManager, PageCopy
from rl.rollout.sequence import Sequence, State


class Scheduler:
    """Rows and pages for sequences. The engine reports what happened; the scheduler says what to do next."""

    def __init__(self, kv_cache: KVCacheManager, max_num_seqs: int, keep_completions: bool = True):
        self.kv_cache, self._max_num_seqs, self._keep_completions = kv_cache, max_num_seqs, keep_completions
        self.running: list[Sequence] = []  # running sequences, in the order of the waiting ones
        self.suspended: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self.version = -1  # version of the current weights
        self.draining = False  # only started requests continue; no new ones are admitted
        self.preemptions = 0
        self.reused = 0  # tokens that a cached prefix saved

    @property
    def waiting(self) -> int:
        """Sequences that wait for a row."""
        return len(self._waiting)

    def clear(self) -> None:
        """Forget all sequences and what is cached."""
        for queue in (self.running, self.suspended, self._waiting):
            queue.clear()
        self.draining = False
        self.kv_cache.clear()

    def stats(self) -> dict[str, float]:
        """Return counts since the start, and current states of sequences and pages."""
        pool = self.kv_cache.pool
        return {
            "prefix_cache_hit_tokens": self.reused,
            "preemptions": self.preemptions,
            "running": len(self.running),
            "waiting": self.waiting,
            "suspended": len(self.suspended),
            "pages": pool.total,
            "pages_used": pool.used,
            "prefix_cache_pages": self.kv_cache.prefix_pages,
            **({} if self.kv_cache.tiers is None else self.kv_cache.tiers.stats()),
            **({} if self.kv_cache.kvcomm is None else self.kv_cache.kvcomm.stats()),
        }

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence that has tokens to draw."""
        sequence.wait()
        self.kv_cache.prefetch(sequence)
        bisect.insort(self._waiting, sequence, key=lambda s: s.order)

    def suspend(self, sequence: Sequence, waits_for: Wait | Join) -> None:
        """Take the row of a sequence whose agent loop waits; its pages stay while there is room."""
        self.withdraw(sequence)
        sequence.suspend(waits_for)
        bisect.insort(self.suspended, sequence, key=lambda s: s.order)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue; it keeps its pages."""
        queues = {State.WAITING: self._waiting, State.RUNNING: self.running, State.SUSPENDED: self.suspended}
        if sequence.state in queues and sequence in (queue := queues[sequence.state]):
            queue.remove(sequence)

    def end(self, sequence: Sequence, reason: FinishReason | None = None) -> None:
        """End a sequence: it needs neither row nor pages any more."""
        self.withdraw(sequence)
        if self._keep_completions:
            self.kv_cache.remember(sequence)
        self.kv_cache.release(sequence)
        sequence.end(reason)

    def drop_pages(self, sequence: Sequence) -> None:
        """Release the pages of a sequence: its keys and values are computed again."""
        self.kv_cache.release(sequence)
        if sequence.state is State.RUNNING:
            self.withdraw(sequence)
            self.enqueue(sequence)

    def to_prefill(self, shape: Callable[[int], tuple[int, int]]) -> tuple[list[tuple[Sequence, int]], list[PageCopy]]:
        """Choose sequences to prefill, and the number of tokens of each; 0 where a cached prefix was all it lacked.

        `shape` gives (rows, tokens of a row) for the number of tokens that the first lacks.
        """
        chosen: list[tuple[Sequence, int]] = []
        copies: list[PageCopy] = []
        rows, chunk = 0, 0
        for sequence in self.prefillable():
            if sequence.to_score and chosen:
                break  # prefilled alone, next
            fresh = not sequence.pages and not sequence.to_score
            reused = self.adopt(sequence)
            brought = self._bring(sequence) if fresh else 0
            if not rows:
                rows, chunk = shape(sequence.unfilled)
                rows = 1 if sequence.to_score else rows
            count = min(chunk, sequence.unfilled)
            if count and not self.room(sequence, sequence.cached + count):
                if reused and not brought:  # a sequence that has not started holds nothing
                    self.kv_cache.release(sequence)
                break
            self.reused += reused
            copies += self.kv_cache.reserve(sequence, sequence.cached + count) if count else []
            chosen.append((sequence, count))
            if len(chosen) == rows:
                break
        return chosen, copies

    def adopt(self, sequence: Sequence) -> int:
        """Give a sequence without pages the cached prefix of its tokens; returns its number of tokens."""
        if sequence.pages:
            return 0
        adapter = sequence.group.adapter
        sequence.start_cache((self.version, None if adapter is None else adapter.key))
        return 0 if sequence.to_score else self.kv_cache.adopt(sequence)

    def _bring(self, sequence: Sequence) -> int:
        """Bring back pages from the host, as many as there is room for; returns the number of their tokens."""
        kv_cache, digests = self.kv_cache, self.kv_cache.moved(sequence)
        while digests and not self.room(sequence, sequence.cached + len(digests) * kv_cache.page_size):
            digests = digests[: len(digests) // 2]
        return kv_cache.bring(sequence, digests) if digests else 0

    def prefillable(self) -> Iterator[Sequence]:
        """Yield sequences with tokens to prefill that will find a row free, in order."""
        free = self._max_num_seqs - len(self.running)
        for sequence in self._eligible():
            if free <= 0:
                return
            free -= sequence.group.request.samples if sequence.is_prefix else 1
            if sequence.unfilled or sequence.is_prefix:
                yield sequence

    def _eligible(self) -> Iterator[Sequence]:
        """Yield the first of the waiting sequences: enough to fill all rows."""
        eligible = (sequence for sequence in self._waiting if sequence.group.started or not self.draining)
        return iter(list(islice(eligible, 4 * self._max_num_seqs)))

    def room(self, sequence: Sequence, length: int) -> bool:
        """Make room for a waiting sequence: from cached prefixes and, if none runs, from sequences behind it."""
        needed = self.kv_cache.missing(sequence, length)
        while not self.kv_cache.make_room(needed):
            if self.running or not self._reclaim(sequence):
                return False
        return True

    def to_decode(self, steps: int) -> tuple[list[Sequence], list[PageCopy]]:
        """Choose all sequences that can draw up to `steps` tokens now, and reserve their pages."""
        self._admit()
        copies: list[PageCopy] = []
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING:
                continue  # gave up its pages to one before it
            length = sequence.cached + min(steps, sequence.remaining)
            needed = self.kv_cache.missing(sequence, length)
            while not self.kv_cache.make_room(needed):
                if not self._reclaim(sequence):
                    self._preempt(sequence)
                    break
            else:
                copies += self.kv_cache.reserve(sequence, length)
        return list(self.running), copies

    def _admit(self) -> None:
        """Give free rows to sequences that have nothing left to prefill."""
        free = self._max_num_seqs - len(self.running)
        ready = [sequence for sequence in self._eligible() if not sequence.unfilled and not sequence.is_prefix]
        for sequence in ready[:free]:
            self.adopt(sequence)  # a prompt of one token has nothing to adopt, but its pages get a key
            self._waiting.remove(sequence)
            sequence.run()
            bisect.insort(self.running, sequence, key=lambda s: s.order)

    def _reclaim(self, sequence: Sequence) -> bool:
        """Take the pages of the last sequence behind this one, or of a suspended one; False if there is none."""
        others = [s for s in (*self.suspended, *self._waiting) if s.pages and s is not sequence]
        behind = [s for s in others if s.state is State.SUSPENDED or s.order > sequence.order]
        if not behind:
            behind = [s for s in self.running if s.order > sequence.order]
        if not behind:
            return False
        self._preempt(max(behind, key=lambda s: s.order))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        if self.kv_cache.tiers is not None:
            self.kv_cache.remember(sequence)  # goes to the host when its pages are needed
        self.drop_pages(sequence)
