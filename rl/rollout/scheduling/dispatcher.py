"""The dispatches of a rollout engine: prefill, drawing, and the tokens that the sequences get from them."""

import dataclasses
import time
from collections.abc import Sequence as Items
from typing import Any

import jax
import numpy as np

from mesh import UserError
from rl.rollout.config import EngineConfig
from rl.rollout.decoding.scores import TokenScores
from rl.rollout.model_runner.executor import Executor
from rl.rollout.model_runner.tiles import KeysRead, Tiles, make_tiles
from rl.rollout.request import RequestOutput
from rl.rollout.scheduling.lifecycle import Lifecycle
from rl.rollout.scheduling.page_moves import PageMoves
from rl.rollout.scheduling.policy import InstalledPolicy
from rl.rollout.scheduling.scheduler import Scheduler
from rl.rollout.scheduling.segment_reuse import SegmentReuse
from rl.rollout.sequence import Sequence
from rl.rollout.speculation.earlier import MOST, EarlierRollouts, Redraw
from rl.rollout.speculation.speculator import Speculation

_PASSES = 16  # passes of an iteration over earlier rollouts

Rows = Items[Sequence | None]  # None: an idle row between others


@dataclasses.dataclass(frozen=True, slots=True)
class Drawing:
    """A dispatch of decoding under way."""

    rows: Rows  # the sequence of each row
    out: dict[str, Any]  # arrays to come, of `decode.decode` or `verify.decode_drafts`
    keys: KeysRead | None  # keys that a step reads, if rows share them
    redraw: Redraw | None = None  # the earlier rollouts that it verifies; None: it decodes
    began: tuple[float, int] = (0.0, 0)  # time on the monotonic clock, and programs traced before


class Dispatcher:
    """Dispatches of what the scheduler chooses, and what the sequences get from them."""

    def __init__(
        self,
        cfg: EngineConfig[Any],
        executor: Executor,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        policy: InstalledPolicy,
        speculation: Speculation | None,
        earlier: EarlierRollouts,
    ):
        self._cfg, self._speculation, self._earlier = cfg, speculation, earlier
        self._executor, self._scheduler, self._lifecycle, self._policy = executor, scheduler, lifecycle, policy
        self._counts = dict.fromkeys(("prefill_tokens", "generation_tokens", "dispatches", "idle_rows"), 0)
        counted = () if cfg.cascade is None else ("cascade_keys_read", "cascade_keys_alone")
        self._keys = dict.fromkeys(counted, 0)
        self._seconds = dict.fromkeys(("host", "device"), 0.0)
        self._block_ends = executor.runner.cache.block_ends
        self._expert_slots = executor.runner.expert_slots
        self.moves = PageMoves(executor, scheduler.kv_cache)  # pages on their way between device and host
        self._segments = None if scheduler.kv_cache.kvcomm is None else SegmentReuse(executor, scheduler, self.moves)

    def stats(self) -> dict[str, float]:
        """Return counts since the start, and seconds by use."""
        seconds = {f"{use}_seconds": seconds for use, seconds in self._seconds.items()}
        drafts = {} if self._speculation is None else self._speculation.stats()
        coupled = self._earlier.counts if any(self._earlier.counts.values()) else {}
        watched = self._lifecycle.watching.stats()
        experts = {} if self._expert_slots is None else self._expert_slots.figures()
        return {**self._counts, **self._keys, **drafts, **coupled, **watched, **experts, **seconds}

    def iterate(self, *, paused: bool) -> list[RequestOutput]:
        """Prefill and draw, unless `paused`; returns what has finished, which is handed out while the device works."""
        began = time.monotonic()
        self._lifecycle.poll()
        drawing = None if paused else self._start()
        launched = time.monotonic()
        finished = self._lifecycle.collect()
        handed = time.monotonic()
        if drawing is not None:
            drawn = jax.device_get(drawing.out)
            ready = time.monotonic()
            if "drafted" not in drawn and self._executor.runner.steps.traces == drawing.began[1]:
                self._earlier.decoded(len(drawn["counts"]), int(drawn["counts"].sum()), ready - drawing.began[0])
            self._record(drawing, drawn)
            self._seconds["device"] += ready - handed
            self._seconds["host"] += launched - began + time.monotonic() - ready
        elif not self._lifecycle.abort_draws() and not finished and not self._lifecycle.idle:
            time.sleep(0.002)
        return finished

    def _start(self) -> Drawing | None:
        """Prefill, then start drawing; returns what is under way, or None if no sequence can draw."""
        self._policy.install_due()
        scheduler, prefills = self._scheduler, 0
        if self._executor.ready is not None:
            self._executor.ready.refresh()
        while (prefills < self._cfg.prefills_per_iteration or not scheduler.running) and self._prefill():
            prefills += 1
        rows = self._redrawn(self._ready())
        if not rows:
            return None
        rows.sort(key=self._executor.buckets.reach, reverse=True)
        self._counts["dispatches"] += 1
        self._counts["idle_rows"] += min(self._cfg.max_num_seqs - len(rows), scheduler.waiting)
        waiting, drafts = scheduler.waiting > 0, self._drafts(rows)
        began = time.monotonic(), self._executor.runner.steps.traces
        if drafts or (tiles := self.tiles(rows)) is None:
            return Drawing(rows, self._executor.decode(rows, waiting=waiting, **drafts), None, began=began)
        keys = tiles.keys(self._block_ends, self._cfg.steps_per_dispatch)
        out = self._executor.decode(tiles.rows, waiting=waiting, tiles=tiles)
        return Drawing(tiles.rows, out, keys, began=began)

    def _ready(self) -> list[Sequence]:
        """Return the sequences that can draw, with pages for the tokens of a dispatch."""
        rows, copies = self._scheduler.to_decode(self._cfg.steps_per_dispatch)
        self.moves.run(copies)
        return rows

    def _redrawn(self, rows: list[Sequence]) -> list[Sequence]:
        """Verify earlier rollouts, while others take the rows that this frees; returns what is left to decode."""
        for _ in range(_PASSES):
            able = [one for one in rows if one.group.request.earlier and self._executor.redrawing(one)]
            shape = self._executor.decoding(rows) if able else None
            room = {one: self._room(one, MOST) for one in able}
            chosen = [] if shape is None else self._earlier.choose(room, shape.rows)
            if not chosen:
                return rows
            for redraw in chosen:
                self._redraw(redraw)
            self._prefill()
            rows = self._ready()
        return [one for one in rows if one.sample >= len(one.group.request.earlier)] or rows

    def _redraw(self, redraw: Redraw) -> None:
        """Make one dispatch, and record its tokens."""
        rows = [one for one in redraw.sequences if not one.ended]
        if len(rows) < len(redraw.sequences):
            return  # ended by another's agent loop: the next pass knows
        began, traces = time.monotonic(), self._executor.runner.steps.traces
        self._counts["dispatches"] += 1
        out = jax.device_get(self._executor.redraw(redraw))
        seconds = time.monotonic() - began
        known = seconds if traces == self._executor.runner.steps.traces else None
        drawn = [out["tokens"][: out["counts"][row], row] for row in range(len(rows))]
        self._earlier.measured(redraw, drawn, known)
        self._record(Drawing(rows, out, None, redraw), out)
        self._seconds["device"] += seconds

    def tiles(self, rows: list[Sequence]) -> Tiles | None:
        """Return the rows arranged by what they have in common; None: the engine shares no keys."""
        size, shape = self._cfg.cascade, self._executor.decoding(rows)
        if size is None or shape is None:
            return None
        return make_tiles(rows, shape.rows, size, self._block_ends, self._cfg.page_size)

    def _drafts(self, rows: list[Sequence]) -> dict[str, Any]:
        """Return drafts for a dispatch, and the tokens that each row has pages for; nothing: it has no drafts."""
        if self._speculation is None:
            return {}
        decoding = self._executor.decoding
        with_drafts, without = decoding(rows, with_drafts=True), decoding(rows)
        if with_drafts is None or without is None:
            return {}
        if (drafts := self._speculation.propose(rows, rows=with_drafts.rows, plain_rows=without.rows)) is None:
            return {}
        most = self._cfg.steps_per_dispatch * drafts.chunk
        return {"drafts": drafts, "room": [self._room(sequence, most) for sequence in rows]}

    def _room(self, sequence: Sequence, most: int) -> int:
        """Return the tokens, at most so many, that a sequence has pages for, free ones that it takes now included."""
        kv_cache = self._scheduler.kv_cache
        kv_cache.reserve_free(sequence, sequence.cached + min(most, sequence.remaining))
        return min(most, len(sequence.pages) * kv_cache.page_size - sequence.cached)

    def _prefill(self) -> bool:
        """Make one dispatch; returns False if there is nothing to prefill, or no room for it."""
        if self._segments is not None:
            self._segments.start()
        chosen, copies = self._scheduler.to_prefill(self._executor.prefill_room)
        self.moves.run(copies)
        if work := [(sequence, count) for sequence, count in chosen if count]:
            self._counts["dispatches"] += 1
            recorded = self.moves.prefill(work)
            routing, scores = self._routing_of(work, recorded[0]), jax.device_get(recorded[1])
        else:
            routing, scores = {}, None
        for sequence, count in chosen:
            if sequence.ended:
                continue  # ended by another's agent loop, in this very loop
            of_prompt = None if scores is None else TokenScores.of(scores, 0, slice(count))
            sequence.prefilled(count, routing.get(sequence), of_prompt)
            self._counts["prefill_tokens"] += count
            if not sequence.unfilled:
                self._scheduler.kv_cache.remember(sequence)
                if self._segments is not None:
                    self._segments.learn(sequence)
                if sequence.is_prefix:
                    self._lifecycle.fan_out(sequence)
        return bool(chosen)

    def _routing_of(self, work: list[tuple[Sequence, int]], routing: Any) -> dict[Sequence, np.ndarray]:
        """Return the routing of each prefilled chunk, [tokens, layers, top_k]; nothing if it is not recorded."""
        if routing is None:
            return {}
        found = np.asarray(jax.device_get(routing))  # ends the overlap of this dispatch with the host
        chunks = {one: found[:, row, :count].swapaxes(0, 1) for row, (one, count) in enumerate(work)}
        self._count_experts(*chunks.values())
        return chunks

    def _count_experts(self, *routing: np.ndarray) -> None:
        """Count the experts of tokens, for replicas of the popular ones."""
        if self._expert_slots is not None:
            for chunk in routing:
                self._expert_slots.count(chunk)

    def _record(self, drawing: Drawing, out: dict[str, Any]) -> None:
        """Give the sequences the tokens that a dispatch has drawn; `out`: its arrays on the host."""
        rows, spoilt, all_logprobs = drawing.rows, False, out["chosen"].logprobs()
        aborted = self._lifecycle.abort_draws()
        if drawing.keys is not None:
            for name, keys in zip(self._keys, drawing.keys, strict=True):
                self._keys[name] += keys * int(out["steps"])
        drafted = out.get("drafted")
        if self._speculation is not None and drafted is not None and drawing.redraw is None:
            self._speculation.measured([one for one in rows if one is not None], out)
        for index, sequence in enumerate(rows):
            if sequence is None or sequence.ended or sequence in aborted:
                continue  # idle; or aborted while the device drew, or with another sample of its request
            broken = bool(out["broken"][index])
            count = int(out["counts"][index]) - broken
            self._counts["generation_tokens"] += count
            cut = self._extend(sequence, index, count, all_logprobs, out)
            if sequence.ended:
                continue
            if broken and not cut and drafted is not None and drafted[index]:
                self._refuse(sequence)  # possibly a drafted token's: continues without drafts
            elif broken and not cut:
                spoilt = True
                self._fail_not_finite(sequence)
            elif cut or out["stopped"][index]:
                self._lifecycle.generated(sequence, "stop")
            elif sequence.remaining <= 0:
                self._lifecycle.generated(sequence, "length")
        if spoilt:
            self._zero_free_pages()

    def _extend(
        self, sequence: Sequence, index: int, count: int, all_logprobs: np.ndarray, out: dict[str, Any]
    ) -> bool:
        """Append the tokens of a row; returns True if a stop string or the grammar ends them."""
        tokens, logprobs = out["tokens"][:count, index].tolist(), all_logprobs[:count, index].tolist()
        routing = out["routing"][:count, :, index] if "routing" in out else None
        if routing is not None:
            self._count_experts(routing)
        kept = out["kept"][:count, index] if "kept" in out else None
        scored = "scores" in out and sequence.group.request.scores is not None
        scores = TokenScores.of(out["scores"], slice(count), index) if scored else None
        version = sequence.group.version(self._policy.version)
        sequence.extend(tokens, logprobs, version, self._policy.approximations, routing, kept, scores)
        cut = sequence.cut_at_stop_string()
        self._lifecycle.extended(sequence)
        if "drafted" in out:
            self._scheduler.kv_cache.trim(sequence)
        try:
            return sequence.constraints.advance(tokens) or cut
        except UserError as error:
            self._lifecycle.fail(sequence, str(error))
            return cut

    def _refuse(self, sequence: Sequence) -> None:
        """Draft no more for a sequence."""
        self._earlier.refuse(sequence)
        if self._speculation is not None:
            self._speculation.refuse(sequence)

    def _fail_not_finite(self, sequence: Sequence) -> None:
        for one in sequence.group.sequences:
            one.spoil_cache()
        self._lifecycle.fail(
            sequence,
            f"the logits for token {sequence.drawn} of its completion are not all numbers "
            f"(weights of version {sequence.group.version(self._policy.version)})",
        )

    def _zero_free_pages(self) -> None:
        """Overwrite NaNs: they would spoil the next holder of the page, though masked (0 x NaN is NaN)."""
        kv_cache = self._scheduler.kv_cache
        kv_cache.forget()
        self._executor.zero(kv_cache.pool.free_pages())
