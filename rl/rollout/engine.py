"""The rollout engine: requests in, rollouts out, with the trainer's own layers.

Continuous batching over a paged cache. An iteration (`step`) prefills chunks of new prompts, then draws up to
`steps_per_dispatch` tokens of every running sequence in one dispatch; while the device works, the host hands out what
the previous iteration has finished. Shapes come in few sizes, so after a warm-up nothing is compiled.

A request's tokens and log-probabilities depend on the request and the weights alone (float32, CPU: to the bit), however
it was batched, chunked, preempted and resumed.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, Literal

import jax

from axlearn_like.config import Configurable
from axlearn_like.layers.base import Params
from mesh import UserError
from rl.roles.messages import Rollout
from rl.rollout.config import EngineConfig
from rl.rollout.kv_cache.manager import KVCacheManager
from rl.rollout.lifecycle import Lifecycle
from rl.rollout.model_runner.runner import ModelRunner
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.request import OnTokens, Request, RequestOutput
from rl.rollout.sampling import Sampler
from rl.rollout.scheduler import Scheduler
from rl.rollout.sequence import Sequence, SequenceGroup
from rl.rollout.validation import validate

Swap = Literal["keep_cache", "recompute", "drain"]


class RolloutEngine(Configurable):
    """`set_weights`, then `submit` and `step`, or simply `generate`. One thread at a time."""

    class Config(EngineConfig["RolloutEngine"]):
        """See `EngineConfig`."""

    def __init__(self, cfg: Config, *, decode: Callable[[Any], str] | None = None):
        """`decode` gives the text of tokens; without it requests cannot have stop strings."""
        self.cfg, self._has_text = cfg, decode is not None
        self.version = -1
        self.paused = False
        cfg.check()
        kv_cache = KVCacheManager(cfg.pool_pages, cfg.page_size, cfg.keep_prefixes)
        self._scheduler = Scheduler(kv_cache, cfg.max_num_seqs, cfg.keep_completions)
        self._runner = ModelRunner(cfg)
        Sampler.check(cfg.sampler, self._runner.vocab, "RolloutEngine.sampler")
        self._lifecycle = Lifecycle(self._scheduler, self._runner.vocab, decode)
        self._submitted = 0
        self._kept: list[RequestOutput] = []  # of other requests, that finished during `generate`
        self._in_step = False
        self._next_weights: tuple[PlacedWeights, int] | None = None  # for when all running requests have ended
        self._approximations: tuple[str, ...] = ()  # of the weights in place
        self._counts = dict.fromkeys(("prefill_tokens", "tokens", "dispatches", "requests", "aborted"), 0)
        self._seconds = dict.fromkeys(("host", "device", "swap"), 0.0)

    # ---- weights

    @property
    def weights_like(self) -> Params:
        """Shapes, types and shardings of arrays that `place` can use with the least copying."""
        return self._runner.weights_like

    def place(self, params: Params, approximations: tuple[str, ...] = ()) -> PlacedWeights:
        """Put the trainer's arrays into the form that `set_weights` takes without copying.

        Another thread may call it while the engine draws. `approximations`: tags for rollouts drawn with them.

        Raises:
            UserError: other arrays than the model has.
        """
        return PlacedWeights(self._runner.place(params), approximations)

    def set_weights(
        self, params: Params | PlacedWeights, version: int, *, swap: Swap = "keep_cache", rewind: bool = False
    ) -> None:
        """Switch to a policy, between two dispatches.

        Args:
            params: the result of `place`, or arrays as the trainer has them.
            version: must not be lower than the one in place, unless `rewind`.
            rewind: accept a lower version.
            swap: what happens to running sequences. "keep_cache": the new policy draws the next token over keys and
                values of the old one (rollouts are tagged "mixed-cache"). "recompute": the same, but keys and values
                are computed again. "drain": they finish first, and nothing new starts until then.

        Raises:
            UserError: other arrays than the model has, or a lower version: the policy in place stays. Or a callback or
                agent loop of a request called it, while a dispatch may be running.
        """
        if self._in_step:
            raise UserError("set_weights was called within a step, by a request's own code; call it between steps")
        coming = self.version if self._next_weights is None else self._next_weights[1]
        if version < coming and not rewind:
            where = "which is in place" if coming == self.version else "which is to come next"
            raise UserError(f"weights of version {version} are older than version {coming}, {where}")
        began = time.monotonic()
        placed = params if isinstance(params, PlacedWeights) else self.place(params)
        if swap == "drain" and self._started():
            self._next_weights, self._scheduler.draining = (placed, version), True
        else:
            self._install(placed, version, recompute=swap == "recompute")
        self._seconds["swap"] += time.monotonic() - began

    def invalidate_weights(self) -> None:
        """Forget which version the weights in place are: they may be of a trainer that died before it saved them."""
        self.version = -1

    def _install(self, placed: PlacedWeights, version: int, *, recompute: bool) -> None:
        scheduler = self._scheduler
        self._runner.params, self._next_weights = placed.params, None
        self._approximations = placed.approximations
        self.version = scheduler.version = version
        scheduler.draining = False
        scheduler.kv_cache.forget()
        for sequence in [one for group in self._lifecycle.groups.values() for one in group.sequences if one.cached]:
            if recompute:
                scheduler.drop_pages(sequence)
            else:
                sequence.mix_cache()

    # ---- requests

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> int:
        """Queue a request; returns its number. `on_tokens` gets the tokens of each sample, dispatch by dispatch.

        Raises:
            UserError: it can never be carried out, or the queue is full.
        """
        cfg, unfinished = self.cfg, len(self._lifecycle.groups)
        if cfg.max_queue is not None and unfinished >= cfg.max_queue:
            limit = f"RolloutEngine.max_queue={cfg.max_queue}"
            raise UserError(f"{request.name}: {unfinished} requests are unfinished ({limit})")
        stop = validate(
            request,
            cfg,
            vocab=self._runner.vocab,
            cache_tokens=self._scheduler.kv_cache.pool.total * cfg.page_size,
            has_text=self._has_text,
        )
        due = None if request.deadline is None else time.monotonic() + request.deadline
        group = SequenceGroup(self._submitted, request, request.sampler or cfg.sampler, stop, due, on_tokens)
        self._submitted += 1
        self._counts["requests"] += 1
        self._lifecycle.start(group)
        return group.number

    def abort(self, number: int) -> None:
        """End a request; its unfinished rollouts come out with finish reason "abort", and can be continued."""
        if (group := self._lifecycle.groups.get(number)) is not None:
            self._counts["aborted"] += 1
            self._lifecycle.end_group(group, "abort")

    def abort_all(self) -> list[RequestOutput]:
        """End all requests and return what they have: what a worker hands back when it must go."""
        for number in list(self._lifecycle.groups):
            self.abort(number)
        return self._take_kept() + self._lifecycle.collect()

    def pause(self) -> None:
        """Make no dispatch until `resume`; requests may be submitted and aborted."""
        self.paused = True

    def resume(self) -> None:
        """End a pause."""
        self.paused = False

    @property
    def busy(self) -> bool:
        """True with a request unfinished, or an output not handed out yet."""
        return bool(self._kept) or not self._lifecycle.idle

    def generate(self, requests: Items[Request], between: Callable[[], None] = lambda: None) -> list[Rollout]:
        """Return all rollouts of all requests, in order of (request, sample); calls `between` between dispatches.

        Other requests run on; their outputs are returned by the next `step`. If `between` raises, the requests stay
        unfinished.

        Raises:
            UserError: a request that cannot be carried out (then none is), or the engine has no weights.
        """
        self._check_weights()
        numbers = self._submit_all(requests)
        wanted = set(numbers)
        finished: dict[int, RequestOutput] = {}
        while len(finished) < len(numbers):
            for one in self._step():
                if one.number in wanted:
                    finished[one.number] = one
                else:
                    self._kept.append(one)
            between()
        return [rollout for number in numbers for rollout in finished[number].rollouts]

    def _submit_all(self, requests: Items[Request]) -> list[int]:
        numbers: list[int] = []
        try:
            for request in requests:
                numbers.append(self.submit(request))
        except UserError:
            for number in numbers:
                self.abort(number)
            self._kept += [one for one in self._lifecycle.collect() if one.number not in numbers]
            raise
        return numbers

    def _take_kept(self) -> list[RequestOutput]:
        kept, self._kept = self._kept, []
        return kept

    # ---- an iteration

    def step(self) -> list[RequestOutput]:
        """Run one iteration; returns what has finished. Sleeps for 2 ms if there is nothing to do but wait."""
        return self._take_kept() + self._step()

    def _step(self) -> list[RequestOutput]:
        if self._lifecycle.groups:
            self._check_weights()
        if self._in_step:
            raise UserError("step was called within a step, by a request's own code")
        self._in_step = True
        try:
            return self._iterate()
        finally:
            self._in_step = False

    def _check_weights(self) -> None:
        if self._runner.params is None:
            raise UserError("the engine has no weights yet; call set_weights first")

    def _iterate(self) -> list[RequestOutput]:
        began = time.monotonic()
        self._lifecycle.poll()
        rows, out = ([], None) if self.paused else self._dispatch()
        launched = time.monotonic()
        finished = self._lifecycle.collect()
        handed = time.monotonic()
        if out is not None:
            drawn = jax.device_get(out)
            ready = time.monotonic()
            self._record(rows, drawn)
            self._seconds["device"] += ready - handed
            self._seconds["host"] += launched - began + time.monotonic() - ready
        elif not finished and not self._lifecycle.idle:
            time.sleep(0.002)
        return finished

    def _dispatch(self) -> tuple[list[Sequence], dict[str, Any] | None]:
        """Prefill, then start drawing; returns the sequences that draw, and their tokens to come."""
        if self._next_weights is not None and not self._started():
            self._install(*self._next_weights, recompute=False)
        scheduler, prefills = self._scheduler, 0
        while (prefills < self.cfg.prefills_per_iteration or not scheduler.running) and self._prefill():
            prefills += 1
        rows, copies = scheduler.to_decode(self.cfg.steps_per_dispatch)
        self._runner.copy(copies)
        if not rows:
            return [], None
        rows.sort(key=self._runner.buckets.reach, reverse=True)
        self._counts["dispatches"] += 1
        return rows, self._runner.decode(rows, waiting=scheduler.waiting > 0)

    def _prefill(self) -> bool:
        """Make one dispatch; returns False if there is nothing to prefill, or no room for it."""
        chosen, copies = self._scheduler.to_prefill(self._runner.buckets.prefill)
        self._runner.copy(copies)
        if work := [(sequence, count) for sequence, count in chosen if count]:
            self._counts["dispatches"] += 1
            self._runner.prefill(work)
        for sequence, count in chosen:
            if sequence.ended:
                continue  # by another's agent loop, in this very loop
            sequence.prefilled(count)
            self._counts["prefill_tokens"] += count
            if not sequence.unfilled:
                self._scheduler.kv_cache.remember(sequence)
                if sequence.is_prefix:
                    self._lifecycle.fan_out(sequence)
        return bool(chosen)

    def _started(self) -> bool:
        return any(group.started for group in self._lifecycle.groups.values())

    def _record(self, rows: list[Sequence], out: dict[str, Any]) -> None:
        """Give the sequences the tokens that the dispatch has drawn."""
        spoilt, all_logprobs = False, out["chosen"].logprobs()
        for index, sequence in enumerate(rows):
            if sequence.ended:
                continue  # aborted while the device drew, or with another sample of its request
            broken = bool(out["broken"][index])
            count = int(out["counts"][index]) - broken
            self._counts["tokens"] += count
            tokens, logprobs = out["tokens"][:count, index].tolist(), all_logprobs[:count, index].tolist()
            sequence.extend(tokens, logprobs, self.version, self._approximations)
            cut = sequence.cut_at_stop_string()
            self._lifecycle.extended(sequence)
            if broken and not cut:
                spoilt = True
                self._fail_not_finite(sequence)
            elif cut or out["stopped"][index]:
                self._lifecycle.generated(sequence, "stop")
            elif sequence.remaining <= 0:
                self._lifecycle.generated(sequence, "length")
        if spoilt:
            self._zero_free_pages()

    def _fail_not_finite(self, sequence: Sequence) -> None:
        """Fail a request whose logits are not numbers, and cache nothing of it."""
        for one in sequence.group.sequences:
            one.spoil_cache()
        self._lifecycle.fail(
            sequence,
            f"the logits for token {sequence.drawn} of its completion are not all numbers "
            f"(weights of version {self.version})",
        )

    def _zero_free_pages(self) -> None:
        """Overwrite NaNs: they would spoil the next holder of the page, though masked (0 x NaN is NaN)."""
        kv_cache = self._scheduler.kv_cache
        kv_cache.forget()
        self._runner.zero(kv_cache.pool.free_pages())

    # ---- figures

    def stats(self) -> dict[str, float]:
        """Return counts since the start (tokens, requests, programs ...), current states, and seconds by use."""
        scheduler, pool = self._scheduler, self._scheduler.kv_cache.pool
        return {
            **self._counts,
            "failed": self._lifecycle.failed,
            "reused_tokens": scheduler.reused,
            "preemptions": scheduler.preemptions,
            "programs": self._runner.traces,
            "running": len(scheduler.running),
            "waiting": scheduler.waiting,
            "parked": len(scheduler.parked),
            "pages": pool.total,
            "pages_used": pool.used,
            "pages_kept": scheduler.kv_cache.prefix_pages,
            **{f"{use}_seconds": seconds for use, seconds in self._seconds.items()},
        }
