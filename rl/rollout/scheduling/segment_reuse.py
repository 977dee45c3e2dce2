"""Prompts in segments: written from bases and anchors where these are near enough, else computed and learned from.

Both happen between two dispatches. What begins like a cached prompt is taken from there first, as ever; segments behind
it, up to the last long one, are approximations. A prompt of which one must be computed is computed as a whole.
"""

import dataclasses
from collections.abc import Hashable
from collections.abc import Sequence as Items
from weakref import WeakKeyDictionary

import jax
import numpy as np

from rl.protocol.messages import Prompt
from rl.rollout.kv_cache.kvcomm.anchors import TAG, Correction
from rl.rollout.kv_cache.kvcomm.arrays import (
    CacheForm,
    Tokens,
    offsets_of,
    read_segment,
    write_segment,
)
from rl.rollout.model_runner.executor import Executor
from rl.rollout.scheduling.page_moves import PageMoves
from rl.rollout.scheduling.scheduler import Scheduler
from rl.rollout.sequence import Sequence, SequenceGroup

_LEAST_SIZE = 16  # tokens of the smallest arrays; larger ones are twice as long each


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A segment in its place; neighbours without a placeholder are one."""

    start: int
    tokens: tuple[int, ...]
    placeholder: str

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def name(self) -> bytes:
        return np.asarray(self.tokens, np.int32).tobytes()


class SegmentReuse:
    """Reuse of segments by the sequences of one engine."""

    def __init__(self, executor: Executor, scheduler: Scheduler, moves: PageMoves):
        assert scheduler.kv_cache.kvcomm is not None
        self._executor, self._scheduler, self._moves = executor, scheduler, moves
        self._kv_cache, self._kvcomm = scheduler.kv_cache, scheduler.kv_cache.kvcomm
        runner = executor.runner
        assert runner.key_angles is not None, "refused by check_policy"
        self._form = CacheForm(runner.cache.layers, runner.cfg.pool_pages, runner.key_angles)
        # Sequences whose prompts are computed: weights they began with, and the places of placeholders to learn
        self._computed: WeakKeyDictionary[Sequence, tuple[Hashable, list[int]]] = WeakKeyDictionary()

    def start(self) -> None:
        """Write the prompts of waiting sequences, as far as bases and anchors have them."""
        for sequence in list(self._scheduler.prefillable()):
            if sequence.segments and not sequence.to_score and sequence not in self._computed:
                self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        self._scheduler.reused += self._scheduler.adopt(sequence)
        least = self._kvcomm.cfg.least_tokens
        key, parts = sequence.cache_key, _parts(sequence, least)
        known = parts[-1].end if parts else 0
        if key is None or known - sequence.cached < least:
            self._computed[sequence] = key, []
            return
        self._kvcomm.count(requests=1, prompt_tokens=sum(segment.tokens for segment in sequence.segments))
        bases = self._bases(sequence, key, parts)
        corrections = {} if bases is None else self._corrections(key, parts, bases)
        refused = [place for place, one in corrections.items() if one is None]
        if bases is None or refused or not self._scheduler.room(sequence, known):
            self._computed[sequence] = key, refused
            return
        self._moves.run(self._kv_cache.reserve(sequence, known))
        for place, part in enumerate(parts):
            if part.end > sequence.cached:
                self._write(sequence, part, bases[place], _of_part(place, corrections))
        self._kvcomm.count(reused_requests=1, reused_tokens=known - sequence.cached)
        sequence.approximated(known - sequence.cached, TAG)

    def _corrections(self, key: Hashable, parts: list[_Part], bases: list[Tokens]) -> dict[int, Correction | None]:
        """Return how each placeholder is corrected, by its place; None: it must be computed."""
        if not self._kvcomm.cfg.offsets:
            return {}
        places = [place for place, part in enumerate(parts) if part.placeholder]
        template = _template(parts)
        return {
            place: self._kvcomm.correction(key, (template, place), bases[place], len(parts[place].tokens))
            for place in places
        }

    def _write(self, sequence: Sequence, part: _Part, base: Tokens, weighted: tuple[Tokens, Tokens] | None) -> None:
        runner = self._executor.runner
        numbers = part.start, max(0, sequence.cached - part.start), len(part.tokens)
        places = tuple(np.int32(number) for number in numbers)
        offsets, weights = (None, None) if weighted is None else weighted
        arguments = runner.cache.pool, self._table(sequence), places, base, offsets, weights
        with jax.set_mesh(runner.mesh):
            runner.cache.pool = write_segment(*arguments, form=self._form)

    def _bases(self, sequence: Sequence, key: Hashable, parts: list[_Part]) -> list[Tokens] | None:
        """Return the base of each part; None: there is no room to compute one."""
        found: list[Tokens] = []
        for part in parts:
            base = self._kvcomm.base(key, part.name) or self._compute(sequence, key, part)
            if base is None:
                return None
            found.append(base)
        return found

    def _compute(self, sequence: Sequence, key: Hashable, part: _Part) -> Tokens | None:
        """Compute a segment without a context, in pages of its own."""
        count, executor, kv_cache = len(part.tokens), self._executor, self._kv_cache
        request = sequence.group.request
        prompt = Prompt(request.prompt.id, request.prompt.family, np.asarray(part.tokens, np.int32))
        alone = dataclasses.replace(request, prompt=prompt, segments=(), partial=(), earlier=(), prompt_scores=False)
        numbers = -1, alone, sequence.group.sampler, sequence.group.stop, None, None, sequence.group.adapter
        # The last token of a sequence is fed when it draws, which this one does not: any will do.
        one = Sequence(SequenceGroup(*numbers), -1, [*part.tokens, part.tokens[-1]], None)
        one.start_cache(key)
        if not kv_cache.make_room(kv_cache.missing(one, count)):
            return None
        self._moves.run(kv_cache.reserve(one, count))
        while one.unfilled:
            _, chunk = executor.prefill_room(one.unfilled)
            executor.prefill([(one, step := min(chunk, one.unfilled))])
            one.prefilled(step)
        base = self._read(one, 0, count)
        kv_cache.release(one)
        self._kvcomm.count(base_tokens=count)
        self._kvcomm.keep_base(key, part.name, base)
        return base

    def _read(self, sequence: Sequence, start: int, count: int) -> Tokens:
        runner, size = self._executor.runner, _LEAST_SIZE
        while size < count:
            size *= 2
        arguments = runner.cache.pool, self._table(sequence), np.int32(start), np.int32(count)
        with jax.set_mesh(runner.mesh):
            return read_segment(*arguments, form=self._form, size=size)

    def _table(self, sequence: Sequence) -> np.ndarray:
        table = np.zeros(self._executor.runner.pages_of_a_row, np.int32)
        table[: len(sequence.pages)] = sequence.pages
        return table

    def learn(self, sequence: Sequence) -> None:
        """Make anchors of the placeholders for which a prompt had to be computed, once it is in the pool."""
        key, places = self._computed.get(sequence, (None, []))
        if not places or key != sequence.cache_key:
            return  # computed under other weights than it began with
        self._computed[sequence] = key, []
        parts = _parts(sequence, self._kvcomm.cfg.least_tokens)
        template = _template(parts)
        for place in places:
            found = self._offsets(sequence, key, parts[place])
            behind = parts[place + 1] if place + 1 < len(parts) and not parts[place + 1].placeholder else None
            of_behind = None if behind is None else self._offsets(sequence, key, behind)
            if found is not None and (behind is None or of_behind is not None):
                anchor = *found, None if of_behind is None else of_behind[1]
                self._kvcomm.add(key, (template, place), len(parts[place].tokens), anchor)

    def _offsets(self, sequence: Sequence, key: Hashable, part: _Part) -> tuple[Tokens, Tokens] | None:
        """Return the base of a part, and what its context has added; None: the base is not kept any more."""
        if (base := self._kvcomm.base(key, part.name)) is None:
            return None
        found = self._read(sequence, part.start, len(part.tokens))
        with jax.set_mesh(self._executor.runner.mesh):
            return base, offsets_of(found, base, np.int32(part.start), form=self._form)


def _parts(sequence: Sequence, least: int) -> list[_Part]:
    """Return the segments of a sequence as parts, up to the last one of so many tokens.

    What is behind it, such as a question about a text, is short: computed over what was reused, it costs little, and
    sees its context. The last token of all is fed, and in no part.
    """
    parts, start = list[_Part](), 0
    for segment in sequence.segments:
        end = min(start + segment.tokens, len(sequence.tokens) - 1)
        tokens = tuple(sequence.tokens[start:end])
        if parts and not segment.placeholder and not parts[-1].placeholder:
            parts[-1] = dataclasses.replace(parts[-1], tokens=parts[-1].tokens + tokens)
        elif tokens:
            parts.append(_Part(start, tokens, segment.placeholder))
        start = end
    while parts and len(parts[-1].tokens) < least:
        parts.pop()
    return parts


def _template(parts: Items[_Part]) -> Hashable:
    return tuple(part.placeholder or part.name for part in parts)


def _of_part(place: int, corrections: dict[int, Correction | None]) -> tuple[Tokens, Tokens] | None:
    """Return offsets and weights of a part: its own, or those that the placeholder before it has."""
    if (own := corrections.get(place)) is not None:
        return own.own
    before = corrections.get(place - 1)
    return None if before is None else before.behind
