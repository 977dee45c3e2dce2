"""The scheduler and the KV-cache manager without a device: rows, pages and contents stay right in any order of events.

A page's contents are kept here as (position, token, all tokens before it), which is what keys and values depend on; so
a page that is shared, copied, evicted or handed on wrongly shows.
"""

from concurrent.futures import Future
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl.protocol.messages import Prompt
from rl.rollout.agent_loops.commands import Generate, Wait, single_turn
from rl.rollout.kv_cache.manager import KVCacheManager, PageCopy
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.rollout.scheduling.scheduler import Scheduler
from rl.rollout.sequence import Sequence, SequenceGroup, State

MAX_PROMPT, MAX_NEW = 24, 12
Content = tuple[int, ...]  # the tokens up to and including this one


class World(RuleBasedStateMachine):
    """The engine and the device, simulated; `turn` is one iteration, which must make progress."""

    @initialize(
        max_num_seqs=st.integers(1, 4),
        page_size=st.sampled_from([1, 2, 4, 8]),
        spare=st.integers(0, 20),
        keep=st.booleans(),
    )
    def begin(self, max_num_seqs: int, page_size: int, spare: int, keep: bool) -> None:
        self.page_size, self.max_num_seqs = page_size, max_num_seqs
        pages = 1 + -(-(MAX_PROMPT + MAX_NEW) // page_size) + spare
        self.kv_cache = KVCacheManager(pages, page_size, keep)
        self.scheduler = Scheduler(self.kv_cache, max_num_seqs)
        self.pool: list[list[Content | None]] = [[None] * page_size for _ in range(pages)]
        self.sequences: list[Sequence] = []
        self.submitted = 0

    # ---- what the device does

    def copy(self, copies: list[PageCopy]) -> None:
        read = [list(self.pool[source]) for source, _ in copies]
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets) and 0 not in targets
        for target, page in zip(targets, read, strict=True):
            self.pool[target] = page

    def write(self, sequence: Sequence, start: int, count: int) -> None:
        for at in range(start, start + count):
            page = sequence.pages[at // self.page_size]
            assert self.kv_cache.pool.references(page) == 1, "a shared page is written"
            self.pool[page][at % self.page_size] = tuple(sequence.tokens[: at + 1])

    # ---- what the engine does

    def add(self, group: SequenceGroup, sample: int, tokens: list[int], prefix: bool = False) -> Sequence:
        sequence = Sequence(group, sample, list(tokens), None if prefix else single_turn)
        self.sequences.append(sequence)
        return sequence

    def enqueue(self, sequence: Sequence) -> None:
        sequence.generate(Generate(), None)
        self.scheduler.enqueue(sequence)

    def completion(self, parent: Sequence, sample: int) -> Sequence:
        completion = self.add(parent.group, sample, parent.tokens)
        completion.inherit(parent)
        self.kv_cache.share(parent, completion)
        self.enqueue(completion)
        return completion

    @rule(
        length=st.integers(1, MAX_PROMPT),
        family=st.integers(0, 2),
        new=st.integers(1, MAX_NEW),
        samples=st.integers(1, 6),
        priority=st.integers(0, 2),
    )
    def submit(self, length: int, family: int, new: int, samples: int, priority: int) -> None:
        """Prompts of a family begin alike."""
        tokens = (np.arange(length, dtype=np.int32) // 5 + 7 * family).astype(np.int32)
        request = Request(Prompt(self.submitted, "any", tokens), samples, priority=priority)
        group = SequenceGroup(self.submitted, request, Sampler.Config(), StopConditions(max_new_tokens=new), None, None)
        self.submitted += 1
        if samples > 1:
            self.scheduler.enqueue(self.add(group, -1, tokens.tolist(), prefix=True))
        else:
            self.enqueue(self.add(group, 0, tokens.tolist()))

    @rule(steps=st.integers(1, 9), chunk=st.sampled_from([1, 3, 8, 40]), rows=st.integers(1, 3), draws=st.data())
    def turn(self, steps: int, chunk: int, rows: int, draws: Any) -> None:
        while self.prefill(rows, chunk) and not self.scheduler.running:
            pass
        running, copies = self.decode(steps)
        self.copy(copies)
        if not running and self.scheduler.waiting:
            assert self.prefill(rows, chunk), "nobody gets on"
        for sequence in running:
            most = min(steps, sequence.remaining)
            assert most >= 1 and sequence.unfilled == 0
            self.draw(sequence, draws.draw(st.integers(1, most)))

    def prefill(self, rows: int, chunk: int) -> bool:
        chosen, copies = self.scheduler.to_prefill(lambda _: (rows, chunk))
        self.copy(copies)
        assert len(chosen) <= rows
        for sequence, count in chosen:
            assert count <= chunk and (count or not sequence.unfilled)
            self.write(sequence, sequence.cached, count)
            sequence.prefilled(count)
            if not sequence.unfilled:
                self.kv_cache.remember(sequence)
                if sequence.is_prefix:
                    for sample in range(sequence.group.request.samples):
                        self.completion(sequence, sample)
                    self.scheduler.end(sequence)
        return bool(chosen)

    def decode(self, steps: int) -> tuple[list[Sequence], list[PageCopy]]:
        """Check that the first of all keeps its row."""
        first = min(self.live(), key=lambda one: one.order, default=None)
        has_row = first is not None and first.state is State.RUNNING
        running, copies = self.scheduler.to_decode(steps)
        assert len(running) <= self.max_num_seqs and (not has_row or first in running)
        return running, copies

    def draw(self, sequence: Sequence, count: int) -> None:
        drawn = [(sum(sequence.tokens[-3:]) + sequence.sample + i) % 11 for i in range(count)]
        fed = len(sequence.tokens) - 1
        assert fed == sequence.cached
        sequence.extend(drawn, [0.0] * count, 0, ())
        self.write(sequence, fed, count)
        if not sequence.remaining:
            self.scheduler.end(sequence)

    def live(self) -> list[Sequence]:
        return [one for one in self.sequences if not one.ended]

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        """End it as an abort does, in any state."""
        self.scheduler.end(data.draw(st.sampled_from(self.live())))

    @precondition(lambda self: any(not one.is_prefix for one in self.live()))
    @rule(data=st.data(), given=st.integers(0, 5))
    def park_or_return(self, data: Any, given: int) -> None:
        """Let an agent loop wait, or go on with tokens that it was given."""
        sequence = data.draw(st.sampled_from([one for one in self.live() if not one.is_prefix]))
        if sequence.state is not State.SUSPENDED:
            return self.scheduler.suspend(sequence, Wait(Future()))
        self.scheduler.withdraw(sequence)
        sequence.observe([given] * given, 0)
        self.enqueue(sequence) if len(sequence.tokens) < sequence.most else self.scheduler.end(sequence)

    @precondition(lambda self: any(not one.is_prefix for one in self.live()))
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        parent = data.draw(st.sampled_from([one for one in self.live() if not one.is_prefix]))
        if len(parent.tokens) < parent.most:
            self.completion(parent, 100 + len(parent.group.sequences))

    @precondition(lambda self: self.live())
    @rule(recompute=st.booleans())
    def other_weights(self, recompute: bool) -> None:
        """Change the weights; here pages stay right only if all is recomputed, or nothing cached is reused."""
        self.scheduler.version += 1
        self.kv_cache.forget()
        for sequence in [one for one in self.live() if one.cached]:
            if recompute:
                self.scheduler.drop_pages(sequence)
            else:
                sequence.mix_cache()

    # ---- invariants

    @invariant()
    def rows_and_queues(self) -> None:
        if not self.sequences:
            return
        scheduler = self.scheduler
        assert len(scheduler.running) <= self.max_num_seqs
        for queue, state in (
            (scheduler.running, State.RUNNING),
            (scheduler.suspended, State.SUSPENDED),
            (scheduler._waiting, State.WAITING),
        ):
            assert [one for one in self.sequences if one.state is state] == sorted(queue, key=self.sequences.index)
            assert [one.order for one in queue] == sorted(one.order for one in queue)

    @invariant()
    def pages(self) -> None:
        """References are holders; a sequence's pages hold its tokens; nothing that has not started holds any."""
        if not self.sequences:
            return
        holders = [0] * (self.kv_cache.pool.total + 1)
        for one in self.sequences:
            for page in one.pages:
                holders[page] += 1
            assert not (one.ended and one.pages) and (one.group.started or not one.pages)
            assert one.cached <= len(one.pages) * self.page_size and one.cached < len(one.tokens)
            for at in range(one.cached):
                found = self.pool[one.pages[at // self.page_size]][at % self.page_size]
                assert found == tuple(one.tokens[: at + 1]), "a page does not hold its sequence's tokens"
        kept = [self.kv_cache.pool.references(page) - holders[page] for page in range(1, len(holders))]
        assert holders[0] == 0 and set(kept) <= {0, 1} and sum(kept) == self.kv_cache.prefix_pages

    def teardown(self) -> None:
        """Everything comes to an end: in each turn, who goes first makes progress. Then all pages are free."""
        if not hasattr(self, "memory"):
            return
        for sequence in list(self.scheduler.suspended):
            self.scheduler.withdraw(sequence)
            self.enqueue(sequence) if len(sequence.tokens) < sequence.most else self.scheduler.end(sequence)
        while live := self.live():
            self.progress(min(live, key=lambda one: one.order))
            self.rows_and_queues()
            self.pages()
        self.kv_cache.forget()
        assert self.kv_cache.pool.used == 0

    def progress(self, first: Sequence) -> None:
        """Run a few turns of one token and check progress: if the first gets no row, some row comes nearer its end."""
        before = self.left()
        for _ in range(3):
            while self.prefill(2, 8) and not self.scheduler.running:
                pass
            running, copies = self.decode(1)
            self.copy(copies)
            for sequence in running:
                self.draw(sequence, 1)
        assert self.left() < before, f"{first.order} does not get on"

    def left(self) -> tuple[int, int]:
        """Return tokens still to be drawn, by the samples of shared prefixes too, and shared prefixes."""
        total = prefixes = 0
        for one in self.live():
            most = (one.most - len(one.tokens)) * (one.group.request.samples if one.is_prefix else 1)
            total, prefixes = total + most, prefixes + one.is_prefix
        return total, prefixes


World.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestWorld = World.TestCase


def _sequence(number: int, tokens: list[int], priority: int = 0) -> Sequence:
    request = Request(Prompt(number, "any", np.array(tokens, np.int32)), priority=priority)
    group = SequenceGroup(number, request, Sampler.Config(), StopConditions(max_new_tokens=8), None, None)
    sequence = Sequence(group, 0, tokens, single_turn)
    sequence.generate(Generate(), None)
    return sequence


def test_a_sequence_without_room_releases_the_prefix_it_adopted():
    """Otherwise it would hold pages before it starts, against those that must end before others may start."""
    kv_cache = KVCacheManager(1 + 6, 4, True)
    scheduler = Scheduler(kv_cache, 2)
    before, long, late = (
        _sequence(0, [1] * 9),
        _sequence(1, list(range(16))),
        _sequence(2, [1] * 8 + [2] * 8, priority=1),
    )
    for sequence in (before, long):
        scheduler.enqueue(sequence)
        ((chosen, count),) = scheduler.to_prefill(lambda _: (1, 64))[0]
        assert chosen is sequence
        sequence.prefilled(count)
        assert scheduler.to_decode(1)[0] == [sequence]
        if sequence is before:
            scheduler.end(sequence)
            assert kv_cache.prefix_pages == 2
    scheduler.enqueue(late)
    assert scheduler.to_prefill(lambda _: (1, 64)) == ([], [])
    assert late.pages == [] and not late.group.started and scheduler.reused == 0
