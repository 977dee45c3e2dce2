"""The core of the rollout engine: weights in place, scheduler, cache and model runner, iteration by iteration."""

import contextlib
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import jax
import numpy as np

from axlearn_like.layers.wrappers.adapters import Adapter
from mesh import UserError
from rl.rollout.config import EngineConfig
from rl.rollout.decoding.scores import TokenScores
from rl.rollout.kv_cache.manager import KVCacheManager
from rl.rollout.lifecycle import Lifecycle
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.model_runner.adapter_slots import AdapterSlots, LoadedAdapter
from rl.rollout.model_runner.executor import Executor
from rl.rollout.model_runner.processes.followers import Followers
from rl.rollout.model_runner.runner import ModelRunner
from rl.rollout.model_runner.tiles import KeysRead, make_tiles
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.request import RequestOutput
from rl.rollout.scheduler import Scheduler
from rl.rollout.sequence import Sequence

Rows = Items[Sequence | None]  # of a dispatch; None: an idle row between others


class EngineCore:
    """One iteration prefills chunks of new prompts, and draws tokens of every running sequence in one dispatch."""

    def __init__(
        self,
        cfg: EngineConfig[Any],
        decode: Callable[[Any], str] | None,
        followers: Followers | None = None,
        adapters: AdapterLimits | None = None,
    ):
        """`decode` gives the text of tokens; `followers`: other processes over which the mesh goes."""
        self._cfg, self._decode = cfg, decode
        self.version = -1
        self.runner = ModelRunner(cfg, adapters=adapters)
        self.executor = Executor(self.runner, followers)
        self.adapters = AdapterSlots(0 if adapters is None else adapters.slots, self._busy_adapters)
        self._speculation = None if cfg.speculation is None else cfg.speculation.build()
        self.scheduler, self.lifecycle = self._without_requests()
        self._next_weights: tuple[PlacedWeights, int] | None = None  # for when all running requests have ended
        self._approximations: tuple[str, ...] = ()  # of the weights in place
        self._counts = dict.fromkeys(("prefill_tokens", "generation_tokens", "dispatches", "idle_rows"), 0)
        self._step_keys: KeysRead | None = None  # of the dispatch under way
        counted = () if cfg.cascade is None else ("cascade_keys_read", "cascade_keys_alone")
        self._keys = dict.fromkeys(counted, 0)
        self._seconds = dict.fromkeys(("host", "device"), 0.0)

    def _without_requests(self) -> tuple[Scheduler, Lifecycle]:
        cfg = self._cfg
        kv_cache = KVCacheManager(cfg.pool_pages, cfg.page_size, cfg.enable_prefix_caching)
        scheduler = Scheduler(kv_cache, cfg.max_num_seqs, cfg.keep_completions)
        lifecycle = Lifecycle(scheduler, self.runner.vocab, self._decode)
        if self._speculation is not None:
            lifecycle.on_end = self._speculation.remember
        return scheduler, lifecycle

    def reset(self) -> None:
        """Drop all requests and the cache. Weights, adapters and compiled programs stay."""
        for group in list(self.lifecycle.groups.values()):
            with contextlib.suppress(Exception):  # the state may be broken; what counts is that agent loops are closed
                self.lifecycle.end_group(group, "abort")
        old, failed = self.scheduler, self.lifecycle.failed
        self.scheduler, self.lifecycle = self._without_requests()
        self.scheduler.version, self.lifecycle.failed = self.version, failed
        self.scheduler.preemptions, self.scheduler.reused = old.preemptions, old.reused
        self._step_keys = None
        self.runner.clear()

    # ---- weights

    @property
    def newest_version(self) -> int:
        """The version in place, or the one that comes when all running requests have ended."""
        return self.version if self._next_weights is None else self._next_weights[1]

    def install_when_drained(self, placed: PlacedWeights, version: int) -> None:
        """Switch to a policy when all requests that have started have ended; no other starts until then."""
        if self._started():
            self._next_weights, self.scheduler.draining = (placed, version), True
        else:
            self.install(placed, version, recompute=False)

    def install(self, placed: PlacedWeights, version: int, *, recompute: bool) -> None:
        """Switch to a policy now. `recompute`: keys and values of running sequences are computed again."""
        scheduler = self.scheduler
        self.executor.install(placed)
        self._next_weights = None
        self._approximations = placed.approximations
        self.version = scheduler.version = version
        scheduler.draining = False
        scheduler.kv_cache.forget()
        for sequence in [one for group in self.lifecycle.groups.values() for one in group.sequences if one.cached]:
            if recompute:
                scheduler.drop_pages(sequence)
            else:
                sequence.mix_cache()

    def load_adapter(self, name: str, adapter: Adapter) -> LoadedAdapter:
        """Put an adapter into the bank, in the place of one of this name; unfinished requests keep theirs.

        Raises:
            UserError: there is no bank, no slot is free, or the adapter does not fit; nothing has changed.
        """
        bank = self.runner.bank
        if bank is None:
            raise UserError(f"adapter {name!r}: this engine has no room for adapters")
        try:
            bank.check(adapter)
        except UserError as error:
            raise UserError(f"adapter {name!r}: {error}") from None
        loaded, old = self.adapters.take(name, adapter.rank)
        bank.put(loaded.slot, adapter)
        if old is not None:
            self.scheduler.kv_cache.forget_adapter(old.key)
        return loaded

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter. Raises UserError if there is none of this name."""
        self.scheduler.kv_cache.forget_adapter(self.adapters.drop(name).key)

    def _busy_adapters(self) -> set[LoadedAdapter]:
        return {group.adapter for group in self.lifecycle.groups.values() if group.adapter is not None}

    def sleep(self) -> None:
        """Give back the memory of weights and cache, until `install`. Nothing may be unfinished."""
        self.scheduler.kv_cache.forget()
        self.executor.sleep()
        self.version, self._next_weights = -1, None

    def _started(self) -> bool:
        return any(group.started for group in self.lifecycle.groups.values())

    # ---- an iteration

    def iterate(self, *, paused: bool) -> list[RequestOutput]:
        """Run one iteration; returns what has finished. Sleeps for 2 ms if there is nothing to do but wait."""
        began = time.monotonic()
        self.lifecycle.poll()
        rows, out = ([], None) if paused else self._dispatch()
        launched = time.monotonic()
        finished = self.lifecycle.collect()
        handed = time.monotonic()
        if out is not None:
            drawn = jax.device_get(out)
            ready = time.monotonic()
            self._record(rows, drawn)
            self._seconds["device"] += ready - handed
            self._seconds["host"] += launched - began + time.monotonic() - ready
        elif not finished and not self.lifecycle.idle:
            time.sleep(0.002)
        return finished

    def _dispatch(self) -> tuple[Rows, dict[str, Any] | None]:
        """Prefill, then start drawing; returns the sequence of each row that draws, and their tokens to come."""
        if self._next_weights is not None and not self._started():
            self.install(*self._next_weights, recompute=False)
        scheduler, prefills = self.scheduler, 0
        if self.executor.ready is not None:
            self.executor.ready.refresh()
        while (prefills < self._cfg.prefills_per_iteration or not scheduler.running) and self._prefill():
            prefills += 1
        rows, copies = scheduler.to_decode(self._cfg.steps_per_dispatch)
        self.executor.copy(copies)
        if not rows:
            return [], None
        rows.sort(key=self.executor.buckets.reach, reverse=True)
        self._counts["dispatches"] += 1
        self._counts["idle_rows"] += min(self._cfg.max_num_seqs - len(rows), scheduler.waiting)
        how = self._drafts(rows) or self._tiles(rows)
        placed: Rows = how["tiles"].rows if "tiles" in how else rows
        return placed, self.executor.decode(placed, waiting=scheduler.waiting > 0, **how)

    def _tiles(self, rows: list[Sequence]) -> dict[str, Any]:
        """Return the rows arranged by what they have in common; nothing: the engine shares no keys."""
        size, shape = self._cfg.cascade, self.executor.decoding(rows)
        if size is None or shape is None:
            return {}
        ends = self.runner.cache.block_ends
        tiles = make_tiles(rows, shape.rows, size, ends, self._cfg.page_size)
        self._step_keys = tiles.keys(ends, self._cfg.steps_per_dispatch)
        return {"tiles": tiles}

    def _drafts(self, rows: list[Sequence]) -> dict[str, Any]:
        """Return drafts for a dispatch, and the tokens that each row has pages for; nothing: it has no drafts."""
        if self._speculation is None:
            return {}
        kv_cache, decoding = self.scheduler.kv_cache, self.executor.decoding
        with_drafts, without = decoding(rows, with_drafts=True), decoding(rows)
        if with_drafts is None or without is None:
            return {}
        if (drafts := self._speculation.propose(rows, rows=with_drafts.rows, plain_rows=without.rows)) is None:
            return {}
        most = self._cfg.steps_per_dispatch * drafts.chunk
        for sequence in rows:
            kv_cache.reserve_free(sequence, sequence.cached + min(most, sequence.remaining))
        room = [min(most, len(sequence.pages) * kv_cache.page_size - sequence.cached) for sequence in rows]
        return {"drafts": drafts, "room": room}

    def _prefill(self) -> bool:
        """Make one dispatch; returns False if there is nothing to prefill, or no room for it."""
        chosen, copies = self.scheduler.to_prefill(self.executor.prefill_room)
        self.executor.copy(copies)
        if work := [(sequence, count) for sequence, count in chosen if count]:
            self._counts["dispatches"] += 1
            recorded = self.executor.prefill(work)
            routing, scores = self._routing_of(work, recorded[0]), jax.device_get(recorded[1])
        else:
            routing, scores = {}, None
        for sequence, count in chosen:
            if sequence.ended:
                continue  # by another's agent loop, in this very loop
            of_prompt = None if scores is None else TokenScores.of(scores, 0, slice(count))
            sequence.prefilled(count, routing.get(sequence), of_prompt)
            self._counts["prefill_tokens"] += count
            if not sequence.unfilled:
                self.scheduler.kv_cache.remember(sequence)
                if sequence.is_prefix:
                    self.lifecycle.fan_out(sequence)
        return bool(chosen)

    def _routing_of(self, work: list[tuple[Sequence, int]], routing: Any) -> dict[Sequence, np.ndarray]:
        """Return the routing of each prefilled chunk, [tokens, layers, top_k]; nothing if it is not recorded."""
        if routing is None:
            return {}
        found = np.asarray(jax.device_get(routing))  # it ends the overlap of this dispatch with the host
        return {one: found[:, row, :count].swapaxes(0, 1) for row, (one, count) in enumerate(work)}

    def _record(self, rows: Rows, out: dict[str, Any]) -> None:
        """Give the sequences the tokens that the dispatch has drawn."""
        spoilt, all_logprobs = False, out["chosen"].logprobs()
        if self._step_keys is not None:
            for name, keys in zip(self._keys, self._step_keys, strict=True):
                self._keys[name] += keys * int(out["steps"])
            self._step_keys = None
        drafted = out.get("drafted")
        if self._speculation is not None and drafted is not None:
            self._speculation.measured([one for one in rows if one is not None], out)
        for index, sequence in enumerate(rows):
            if sequence is None or sequence.ended:
                continue  # idle; or aborted while the device drew, or with another sample of its request
            broken = bool(out["broken"][index])
            count = int(out["counts"][index]) - broken
            self._counts["generation_tokens"] += count
            cut = self._extend(sequence, index, count, all_logprobs, out)
            if sequence.ended:
                continue
            if broken and not cut and self._speculation is not None and drafted is not None and drafted[index]:
                self._speculation.refuse(sequence)  # they may be a drafted token's: it goes on from here without
            elif broken and not cut:
                spoilt = True
                self._fail_not_finite(sequence)
            elif cut or out["stopped"][index]:
                self.lifecycle.generated(sequence, "stop")
            elif sequence.remaining <= 0:
                self.lifecycle.generated(sequence, "length")
        if spoilt:
            self._zero_free_pages()

    def _extend(
        self, sequence: Sequence, index: int, count: int, all_logprobs: np.ndarray, out: dict[str, Any]
    ) -> bool:
        """Append the tokens of a row; returns True if a stop string or the grammar ends them."""
        tokens, logprobs = out["tokens"][:count, index].tolist(), all_logprobs[:count, index].tolist()
        routing = out["routing"][:count, :, index] if "routing" in out else None
        kept = out["kept"][:count, index] if "kept" in out else None
        scored = "scores" in out and sequence.group.request.scores is not None
        scores = TokenScores.of(out["scores"], slice(count), index) if scored else None
        sequence.extend(tokens, logprobs, self.version, self._approximations, routing, kept, scores)
        cut = sequence.cut_at_stop_string()
        self.lifecycle.extended(sequence)
        if "drafted" in out:
            self.scheduler.kv_cache.trim(sequence)
        try:
            return sequence.constraints.advance(tokens) or cut
        except UserError as error:
            self.lifecycle.fail(sequence, str(error))
            return cut

    def _fail_not_finite(self, sequence: Sequence) -> None:
        """Fail a request whose logits are not numbers, and cache nothing of it."""
        for one in sequence.group.sequences:
            one.spoil_cache()
        self.lifecycle.fail(
            sequence,
            f"the logits for token {sequence.drawn} of its completion are not all numbers "
            f"(weights of version {self.version})",
        )

    def _zero_free_pages(self) -> None:
        """Overwrite NaNs: they would spoil the next holder of the page, though masked (0 x NaN is NaN)."""
        kv_cache = self.scheduler.kv_cache
        kv_cache.forget()
        self.executor.zero(kv_cache.pool.free_pages())

    # ---- figures

    def stats(self) -> dict[str, float]:
        """Return counts since the start, current states, and seconds by use.

        `idle_rows` counts the rows that a dispatch of decoding leaves empty while as many sequences wait, for their
        prompts to be prefilled or for pages; sequences that wait for a tool (`suspended`) are not among them.
        """
        scheduler, pool = self.scheduler, self.scheduler.kv_cache.pool
        return {
            **self._counts,
            "failed": self.lifecycle.failed,
            "prefix_cache_hit_tokens": scheduler.reused,
            "preemptions": scheduler.preemptions,
            "compilations": self.runner.steps.traces,
            "loaded_programs": self.runner.stored.loaded,
            "running": len(scheduler.running),
            "waiting": scheduler.waiting,
            "suspended": len(scheduler.suspended),
            "pages": pool.total,
            "pages_used": pool.used,
            "adapters": len(self.adapters.loaded),
            "prefix_cache_pages": scheduler.kv_cache.prefix_pages,
            **self._keys,
            **({} if self._speculation is None else self._speculation.stats()),
            **{f"{use}_seconds": seconds for use, seconds in self._seconds.items()},
        }
