"""The rollout engine: requests in, rollouts out, with the trainer's own layers.

Continuous batching over a paged cache. A turn (`step`) prefills chunks of new prompts, then draws up to
`steps_per_dispatch` tokens of every running sequence in one dispatch; while the device works, the host hands out what
the turn before has finished. Buckets come in few sizes, so after a warm-up nothing is compiled.

A request's tokens and log-probabilities depend on the request and the weights alone (float32, CPU: to the bit), however
it was batched, chunked, preempted and resumed.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, Literal

import jax

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.layers.base import Params
from mesh import UserError
from rl.roles.messages import Rollout
from rl.rollout.kv_cache.manager import KVCacheManager
from rl.rollout.lifecycle import Lifecycle
from rl.rollout.model_runner.runner import Device, PlacedWeights
from rl.rollout.request import OnTokens, Request, RequestOutput
from rl.rollout.sampling import Sampler
from rl.rollout.scheduler import Scheduler
from rl.rollout.sequence import Sequence, SequenceGroup
from rl.rollout.validation import check_sizes, resolve

Swap = Literal["keep_cache", "recompute", "drain"]


class RolloutEngine(Configurable):
    """`set_weights`, then `submit` and `step`, or simply `generate`. One thread at a time."""

    class Config(ConfigBase["RolloutEngine"]):
        model: ConfigBase = REQUIRED
        stop_tokens: tuple[int, ...] = REQUIRED  # empty: every completion has full length
        max_prompt: int = REQUIRED  # tokens
        max_new: int = REQUIRED  # tokens, the stop token included
        max_num_seqs: int = 64  # sequences that draw tokens at the same time
        page_size: int = 16  # tokens; divides 64
        pages: int | None = None  # None: enough for `max_num_seqs` sequences of full length
        steps_per_dispatch: int = 32  # tokens that each sequence draws before the host looks
        prefill_tokens: int = 512  # of all rows of a prefill dispatch
        prefills_per_iteration: int = 4  # dispatches, while others are drawing
        keep_prefixes: bool = True  # of prompts, for requests that begin alike, as long as the weights stay
        keep_completions: bool = True  # with their completions, for conversations that go on
        max_queue: int | None = None  # requests under way; more are refused
        mesh: dict[str, int] = {}  # {}: one device; {"tensor": n}: n devices
        sampler: Sampler.Config = Sampler.Config()

    def __init__(self, cfg: Config, *, decode: Callable[[Any], str] | None = None):
        """`decode` gives the text of tokens; without it requests cannot have stop strings."""
        self.cfg, self._has_text = cfg, decode is not None
        self.version = -1
        self.paused = False
        check_sizes(cfg)
        longest = cfg.max_prompt + cfg.max_new
        pages = 1 + cfg.max_num_seqs * -(-longest // cfg.page_size) if cfg.pages is None else cfg.pages
        kv_cache = KVCacheManager(pages, cfg.page_size, cfg.keep_prefixes)
        self._scheduler = Scheduler(kv_cache, cfg.max_num_seqs, cfg.keep_completions)
        self._device = Device(cfg, pages=pages, longest=longest)
        Sampler.check(cfg.sampler, self._device.vocab, "RolloutEngine.sampler")
        self._lifecycle = Lifecycle(self._scheduler, self._device.vocab, decode)
        self._submitted = 0
        self._kept: list[RequestOutput] = []  # of others, that finished during `generate`
        self._in_step = False
        self._next_weights: tuple[PlacedWeights, int] | None = None  # to be put in when all have ended
        self._approximations: tuple[str, ...] = ()  # of the weights in place
        self._counts = dict.fromkeys(("prefill_tokens", "tokens", "dispatches", "requests", "aborted"), 0)
        self._seconds = dict.fromkeys(("host", "device", "swap"), 0.0)

    # ---- weights

    @property
    def weights_like(self) -> Params:
        """Buckets, types and shardings of arrays that `place` can use with the least copying."""
        return self._device.like

    def place(self, params: Params, approximations: tuple[str, ...] = ()) -> PlacedWeights:
        """Arrays as the trainer has them made into what `set_weights` puts in at once. May be called by another thread,
        while the engine draws. `approximations`: tags for what will be drawn with them.

        Raises:
            UserError: other arrays than the model has.
        """
        return PlacedWeights(self._device.place(params), approximations)

    def set_weights(
        self, params: Params | PlacedWeights, version: int, *, swap: Swap = "keep_cache", rewind: bool = False
    ) -> None:
        """Put in a policy, between two dispatches.

        Args:
            params: what `place` has made of them, or arrays as the trainer has them.
            version: must not be lower than the one in place, unless `rewind`.
            swap: what happens to running sequences. "keep_cache": the next token is drawn by the new policy, over keys
                and values of the old one (rollouts are tagged "mixed-cache"). "recompute": the same, but keys and
                values are computed again. "drain": they finish first, and nothing new starts until then.

        Raises:
            UserError: other arrays than the model has, or a lower version. The policy in place stays. Or it is called
                by a callback or program of a request, while a dispatch may be under way.
        """
        if self._in_step:
            raise UserError("set_weights was called within a step, by a request's own code; call it between steps")
        coming = self.version if self._next_weights is None else self._next_weights[1]
        if version < coming and not rewind:
            where = "which is in place" if coming == self.version else "which is to come next"
            raise UserError(f"weights of version {version} are older than version {coming}, {where}")
        began = time.monotonic()
        placed = params if isinstance(params, PlacedWeights) else self.place(params)
        if swap == "drain" and self._begun():
            self._next_weights, self._scheduler.draining = (placed, version), True
        else:
            self._put_in(placed, version, recompute=swap == "recompute")
        self._seconds["swap"] += time.monotonic() - began

    def _put_in(self, placed: PlacedWeights, version: int, *, recompute: bool) -> None:
        scheduler = self._scheduler
        self._device.params, self._next_weights = placed.params, None
        self._approximations = placed.approximations
        self.version = scheduler.version = version
        scheduler.draining = False
        scheduler.kv_cache.forget()
        for sequence in [one for group in self._lifecycle.groups.values() for one in group.sequences if one.cached]:
            if recompute:
                scheduler.drop_pages(sequence)
            else:
                sequence.cache_key = None  # on a mixture
                sequence.tags.add("mixed-cache")

    # ---- requests

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> int:
        """Queue a request; returns its number. `on_tokens` is told what each sample has drawn, dispatch by dispatch.

        Raises:
            UserError: it can never be carried out, or the queue is full.
        """
        cfg, under_way = self.cfg, len(self._lifecycle.groups)
        if cfg.max_queue is not None and under_way >= cfg.max_queue:
            limit = f"RolloutEngine.max_queue={cfg.max_queue}"
            raise UserError(f"{request.name}: {under_way} requests are under way ({limit})")
        stop = resolve(
            request,
            cfg,
            vocab=self._device.vocab,
            cache_tokens=self._scheduler.kv_cache.pool.total * cfg.page_size,
            has_text=self._has_text,
        )
        due = None if request.deadline is None else time.monotonic() + request.deadline
        group = SequenceGroup(self._submitted, request, request.sampler or cfg.sampler, stop, due, on_tokens)
        self._submitted += 1
        self._counts["requests"] += 1
        self._lifecycle.begin(group)
        return group.number

    def abort(self, number: int) -> None:
        """End a request; its unfinished rollouts come out with finish reason "abort", to be gone on from if wanted."""
        if (group := self._lifecycle.groups.get(number)) is not None:
            self._counts["aborted"] += 1
            self._lifecycle.cut(group, "abort")

    def abort_all(self) -> list[RequestOutput]:
        """End all requests and return what they have: what a worker hands back when it must go."""
        for number in list(self._lifecycle.groups):
            self.abort(number)
        return self._take_kept() + self._lifecycle.hand_out()

    def pause(self) -> None:
        """No dispatch until `resume`; requests may be submitted and aborted."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    @property
    def busy(self) -> bool:
        """Whether a request is under way or not handed out yet."""
        return bool(self._kept) or not self._lifecycle.idle

    def generate(self, requests: Items[Request], between: Callable[[], None] = lambda: None) -> list[Rollout]:
        """All rollouts of all requests, in order of (request, sample); `between` is called between dispatches.

        What else is under way goes on meanwhile; what of it finishes, the next `step` returns. If `between` raises, the
        requests stay under way.

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
            self._kept += [one for one in self._lifecycle.hand_out() if one.number not in numbers]
            raise
        return numbers

    def _take_kept(self) -> list[RequestOutput]:
        kept, self._kept = self._kept, []
        return kept

    # ---- a turn

    def step(self) -> list[RequestOutput]:
        """One turn; what has finished. Waits a few milliseconds if there is nothing to do but wait."""
        return self._take_kept() + self._step()

    def _step(self) -> list[RequestOutput]:
        if self._lifecycle.groups:
            self._check_weights()
        if self._in_step:
            raise UserError("step was called within a step, by a request's own code")
        self._in_step = True
        try:
            return self._turn()
        finally:
            self._in_step = False

    def _check_weights(self) -> None:
        if self._device.params is None:
            raise UserError("the engine has no weights yet; call set_weights first")

    def _turn(self) -> list[RequestOutput]:
        began = time.monotonic()
        self._lifecycle.poll()
        rows, out = ([], None) if self.paused else self._dispatch()
        launched = time.monotonic()
        finished = self._lifecycle.hand_out()
        handed = time.monotonic()
        if out is not None:
            drawn = jax.device_get(out)
            ready = time.monotonic()
            self._absorb(rows, drawn)
            self._seconds["device"] += ready - handed
            self._seconds["host"] += launched - began + time.monotonic() - ready
        elif not finished and not self._lifecycle.idle:
            time.sleep(0.002)
        return finished

    def _dispatch(self) -> tuple[list[Sequence], dict[str, Any] | None]:
        """Prefill what can be, then start drawing: for whom, and what will be drawn."""
        if self._next_weights is not None and not self._begun():
            self._put_in(*self._next_weights, recompute=False)
        scheduler, prefills = self._scheduler, 0
        while (prefills < self.cfg.prefills_per_iteration or not scheduler.running) and self._prefill():
            prefills += 1
        rows, copies = scheduler.to_decode(self.cfg.steps_per_dispatch)
        self._device.copy(copies)
        if not rows:
            return [], None
        rows.sort(key=self._device.buckets.reach, reverse=True)
        self._counts["dispatches"] += 1
        return rows, self._device.decode(rows, waiting=scheduler.waiting > 0)

    def _prefill(self) -> bool:
        """One dispatch; False if there is nothing to prefill, or no room for it."""
        chosen, copies = self._scheduler.to_prefill(self._device.buckets.prefill)
        self._device.copy(copies)
        if work := [(sequence, count) for sequence, count in chosen if count]:
            self._counts["dispatches"] += 1
            self._device.prefill(work)
        for sequence, count in chosen:
            if sequence.ended:
                continue  # cut by another's program, just now
            sequence.cached += count
            self._counts["prefill_tokens"] += count
            if not sequence.unfilled:
                self._scheduler.kv_cache.remember(sequence)
                if sequence.is_prefix:
                    self._lifecycle.fan_out(sequence)
        return bool(chosen)

    def _begun(self) -> bool:
        return any(group.begun for group in self._lifecycle.groups.values())

    def _absorb(self, rows: list[Sequence], out: dict[str, Any]) -> None:
        """What the dispatch has drawn becomes the sequences'."""
        spoilt, all_logprobs = False, out["chosen"].logprobs()
        for index, sequence in enumerate(rows):
            if sequence.ended:
                continue  # cut while the device drew, or with another sample of its request
            broken = bool(out["broken"][index])
            count = int(out["counts"][index]) - broken
            self._counts["tokens"] += count
            tokens, logprobs = out["tokens"][:count, index].tolist(), all_logprobs[:count, index].tolist()
            sequence.extend(tokens, logprobs, self.version)
            sequence.tags.update(self._approximations)
            cut = sequence.cut_at_stop_string()
            self._lifecycle.tell(sequence)
            if broken and not cut:
                spoilt = True
                self._break(sequence)
            elif cut or out["stopped"][index]:
                self._lifecycle.leave_row(sequence, "stop")
            elif len(sequence.tokens) >= sequence.limit:
                self._lifecycle.leave_row(sequence, "length")
        if spoilt:
            self._clean()

    def _break(self, sequence: Sequence) -> None:
        """Its logits are not numbers: the request fails, and nothing of it is kept."""
        for one in sequence.group.sequences:
            one.cache_key = None
        self._lifecycle.fail(
            sequence,
            f"the logits for token {sequence.drawn} of its completion are not all numbers "
            f"(weights of version {self.version})",
        )

    def _clean(self) -> None:
        """What is not a number would spoil whoever gets its page next, although masked: 0 x NaN is NaN."""
        memory = self._scheduler.kv_cache
        memory.forget()
        self._device.blank(memory.pool.free_pages())

    # ---- figures

    def stats(self) -> dict[str, float]:
        """Counts since the start (tokens, requests, preemptions, programs compiled), states now, and seconds by use."""
        scheduler, pool = self._scheduler, self._scheduler.kv_cache.pool
        return {
            **self._counts,
            "failed": self._lifecycle.failed,
            "reused_tokens": scheduler.reused,
            "preemptions": scheduler.preemptions,
            "programs": self._device.traces,
            "running": len(scheduler.running),
            "waiting": scheduler.waiting,
            "parked": len(scheduler.parked),
            "pages": pool.total,
            "pages_used": pool.used,
            "pages_kept": scheduler.kv_cache.prefix_pages,
            **{f"{use}_seconds": seconds for use, seconds in self._seconds.items()},
        }
