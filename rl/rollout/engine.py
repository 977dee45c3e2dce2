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
from typing import Any

from axlearn_like.config import Configurable
from axlearn_like.layers.base import Params
from axlearn_like.layers.wrappers.adapters import Adapter
from mesh import UserError
from rl.protocol.messages import Rollout
from rl.rollout.config import EngineConfig
from rl.rollout.kv_cache.manager import KVCacheManager
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.model_runner.adapter_slots import AdapterSlots, LoadedAdapter
from rl.rollout.model_runner.executor import Executor
from rl.rollout.model_runner.processes.remote_runners import RemoteRunners
from rl.rollout.model_runner.runner import ModelRunner
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.request import OnTokens, Request, RequestOutput, StopConditions
from rl.rollout.sampling import Sampler
from rl.rollout.scheduling.dispatcher import Dispatcher
from rl.rollout.scheduling.lifecycle import Lifecycle
from rl.rollout.scheduling.policy import InstalledPolicy, Swap
from rl.rollout.scheduling.scheduler import Scheduler
from rl.rollout.scheduling.spawning import Spawning
from rl.rollout.sequence import SequenceGroup
from rl.rollout.speculation.earlier import EarlierRollouts
from rl.rollout.validation import validate


class RolloutEngine(Configurable):
    """`set_weights`, then `submit` and `step`, or simply `generate`. One thread at a time.

    >>> import numpy as np
    >>> from flax import nnx
    >>> from axlearn_like.layers.base import split
    >>> from models.tiny import tiny
    >>> from rl.protocol.messages import Prompt
    >>> from rl.rollout.engine import RolloutEngine
    >>> from rl.rollout.request import Request
    >>> policy = tiny(vocab_size=32, dim=32, num_layers=1)
    >>> cfg = RolloutEngine.Config(model=policy, stop_tokens=(), max_num_seqs=4)
    >>> engine = cfg.set(max_prompt_tokens=8, max_new_tokens=4).build()
    >>> engine.set_weights(split(policy.build(rngs=nnx.Rngs(0)))[1], version=0)
    >>> prompt = Prompt(id=7, family="mine", tokens=np.array([5, 6, 7], np.int32))
    >>> rollouts = engine.generate([Request(prompt, samples=2, seed=0)])
    >>> [(rollout.sample_id, rollout.tokens.size, rollout.finish_reason) for rollout in rollouts]
    [(0, 4, 'length'), (1, 4, 'length')]

    Attributes:
        paused: no dispatch is made.
        scheduler: order, rows and pages of sequences.
        lifecycle: unfinished requests.
        executor: packs batches, and calls the model runners of all processes.
        speculation: drafts; None: there are none.
        earlier: drafts of requests that bring them.
    """

    class Config(EngineConfig["RolloutEngine"]):
        """See `EngineConfig`."""

    def __init__(
        self,
        cfg: Config,
        *,
        decode: Callable[[Any], str] | None = None,
        remote_runners: RemoteRunners | None = None,
        adapters: AdapterLimits | None = None,
    ):
        """Build the engine, without weights.

        Args:
            decode: gives the text of tokens; without it requests cannot have stop strings.
            remote_runners: the other processes of an engine whose mesh goes over several, of which this one leads.
            adapters: room for LoRA adapters that requests name; None: there is none.
        """
        if adapters is not None and remote_runners is not None:
            raise UserError("an engine of several processes has no adapters; expected one process")
        if cfg.tiers is not None and remote_runners is not None:
            raise UserError("RolloutEngine.tiers: an engine of several processes has none; expected one process")
        if cfg.replicas is not None and remote_runners is not None:
            raise UserError("RolloutEngine.replicas: an engine of several processes has none; expected one process")
        if cfg.kvcomm is not None and remote_runners is not None:
            raise UserError("RolloutEngine.kvcomm: an engine of several processes has none; expected one process")
        self.cfg, self._has_text = cfg, decode is not None
        self.paused = False
        self.runner = ModelRunner(cfg, adapters=adapters)
        Sampler.check(cfg.sampler, self.runner.vocab, "RolloutEngine.sampler")
        self.executor = Executor(self.runner, remote_runners)
        self.speculation = None if cfg.speculation is None else cfg.speculation.build()
        tiers = None if cfg.tiers is None else cfg.tiers.build()
        kvcomm = None if cfg.kvcomm is None else cfg.kvcomm.build()
        kv_cache = KVCacheManager(cfg.pool_pages, cfg.page_size, cfg.enable_prefix_caching, tiers, kvcomm)
        self.scheduler = Scheduler(kv_cache, cfg.max_num_seqs, cfg.keep_completions)
        self.earlier = EarlierRollouts(self.runner.vocab, cfg.max_num_seqs)
        spawning = Spawning(self.scheduler, self._validate)
        self.lifecycle = Lifecycle(self.scheduler, self.runner.vocab, decode, spawning, self._ended)
        self._slots = AdapterSlots(0 if adapters is None else adapters.slots, lambda: self.lifecycle.adapters)
        self._policy = InstalledPolicy(self.executor, self.scheduler, self.lifecycle)
        parts = self.executor, self.scheduler, self.lifecycle, self._policy
        self.dispatcher = Dispatcher(cfg, *parts, self.speculation, self.earlier)
        self._submitted, self._aborted = 0, 0
        self._kept: list[RequestOutput] = []  # outputs of other requests that finished during `generate`
        self._in_step = False
        self._swap_seconds = 0.0

    # ---- weights

    @property
    def version(self) -> int:
        """The version of the weights in place, or -1."""
        return self._policy.version

    def place(self, params: Params, approximations: tuple[str, ...] = ()) -> PlacedWeights:
        """Put the trainer's arrays into the form that `set_weights` takes without copying.

        Another thread may call it while the engine draws. `approximations`: tags for rollouts drawn with them.

        Raises:
            UserError: other arrays than the model has, or the engine has several processes (see `GroupReceiver.place`).
        """
        if not self.executor.alone:
            raise UserError("an engine of several processes takes its weights from a parameter server only")
        return PlacedWeights(self.runner.place(params), (*approximations, *self.runner.approximations))

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
        self._check_between_steps("set_weights")
        self._policy.check(version, rewind=rewind)
        began = time.monotonic()
        placed = params if isinstance(params, PlacedWeights) else self.place(params)
        self._policy.switch(placed, version, swap)
        self._swap_seconds += time.monotonic() - began

    def invalidate_weights(self) -> None:
        """Forget which version the weights in place are: they may be of a trainer that died before it saved them."""
        self._policy.version = -1

    def sleep(self) -> None:
        """Give back the memory of weights and cache, until `set_weights`: a trainer on the same devices can use it.

        Compiled programs stay.

        Raises:
            UserError: a request is unfinished; its keys and values would be lost.
        """
        if self.lifecycle.groups:
            raise UserError(f"the engine cannot sleep: {len(self.lifecycle.groups)} requests are unfinished")
        self._policy.sleep()

    def reset(self) -> None:
        """Drop all requests and the cache, after a step that has raised: its arrays may be gone.

        Weights, adapters and compiled programs stay. Weights that waited for running requests are installed by the
        next step.

        Raises:
            UserError: the engine has several processes, of which the others may have stopped elsewhere.
        """
        if not self.executor.alone:
            raise UserError("an engine of several processes cannot be reset")
        self._kept.clear()
        self.lifecycle.clear()
        self.runner.clear()

    # ---- adapters

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """The adapters that requests can name."""
        return self._slots.loaded

    def load_adapter(self, name: str, adapter: Adapter, version: int = 0) -> LoadedAdapter:
        """Load an adapter, or replace the one of this name, between two dispatches; nothing is compiled for it.

        Unfinished requests keep the one that they began with. Rollouts record `version` for the tokens that it draws.

        Raises:
            UserError: it does not fit the model or the room for adapters, or all slots are taken; nothing has changed.
                Or a request's own code called it, within a step.
        """
        self._check_between_steps("load_adapter")
        loaded, old = self._slots.load(name, adapter, version, self.runner.bank)
        if old is not None:
            self.scheduler.kv_cache.forget_adapter(old.key)
        return loaded

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; its slot is free when those that use it have ended.

        Raises:
            UserError: there is none of this name, or a request's own code called it, within a step.
        """
        self._check_between_steps("unload_adapter")
        self.scheduler.kv_cache.forget_adapter(self._slots.drop(name).key)

    def _ended(self, group: SequenceGroup) -> None:
        self.earlier.forget(group)
        if self.speculation is not None:
            self.speculation.remember(group)

    def _check_between_steps(self, method: str) -> None:
        if self._in_step:
            raise UserError(f"{method} was called within a step, by a request's own code; call it between steps")

    # ---- requests

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> int:
        """Queue a request; returns its number. `on_tokens` gets the tokens of each sample, dispatch by dispatch.

        Raises:
            UserError: it can never be carried out, or the queue is full.
        """
        cfg, unfinished = self.cfg, self.lifecycle.submitted
        if cfg.max_queue is not None and unfinished >= cfg.max_queue:
            limit = f"RolloutEngine.max_queue={cfg.max_queue}"
            raise UserError(f"{request.name}: {unfinished} requests are unfinished ({limit})")
        stop = self._validate(request)
        adapter, *others = (
            None if name is None else self._slots.find(name, f"{request.name}: ")
            for name in (request.adapter, *request.policies.values())
        )
        policies = dict(zip(request.policies, others, strict=True))
        due = None if request.deadline is None else time.monotonic() + request.deadline
        sampler = request.sampler or cfg.sampler
        numbers = self._submitted, request, sampler, stop, due, on_tokens, adapter
        group = SequenceGroup(*numbers, policies=policies)
        self._submitted += 1
        self.lifecycle.start(group)
        return group.number

    def _validate(self, request: Request) -> StopConditions:
        """Return the stop conditions of a request in full, if it can be carried out."""
        tokens = self.scheduler.kv_cache.tokens
        return validate(request, self.cfg, vocab=self.runner.vocab, cache_tokens=tokens, has_text=self._has_text)

    def abort(self, number: int) -> None:
        """End a request; its unfinished rollouts come out with finish reason "abort", and can be continued."""
        if (group := self.lifecycle.groups.get(number)) is not None:
            self._aborted += 1
            self.lifecycle.end_group(group, "abort")

    def abort_all(self) -> list[RequestOutput]:
        """End all requests and return what they have: what a worker hands back when it must go."""
        for number in list(self.lifecycle.groups):
            self.abort(number)
        return self._take_kept() + self.lifecycle.collect()

    def pause(self) -> None:
        """Make no dispatch until `resume`; requests may be submitted and aborted."""
        self.paused = True

    def resume(self) -> None:
        """End a pause."""
        self.paused = False

    @property
    def busy(self) -> bool:
        """True with a request unfinished, or an output not handed out yet."""
        return bool(self._kept) or not self.lifecycle.idle

    @property
    def unfinished(self) -> int:
        """Sequences that have not ended; of a prompt that is not in the cache yet, as many as its samples."""
        return sum(group.unfinished for group in self.lifecycle.groups.values())

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
            self._kept += [one for one in self.lifecycle.collect() if one.number not in numbers]
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
        if self.lifecycle.groups:
            self._check_weights()
        if self._in_step:
            raise UserError("step was called within a step, by a request's own code")
        self._in_step = True
        try:
            return self.dispatcher.iterate(paused=self.paused)
        finally:
            self._in_step = False

    def _check_weights(self) -> None:
        if self.runner.params is None:
            raise UserError("the engine has no weights yet; call set_weights first")

    # ---- figures

    def stats(self) -> dict[str, float]:
        """Return counts since the start (tokens, requests, compilations ...), current states, and seconds by use.

        `idle_rows` counts the rows that a dispatch of decoding leaves empty while as many sequences wait, for their
        prompts to be prefilled or for pages; sequences that wait for a tool (`suspended`) are not among them.
        """
        return {
            "requests": self._submitted,
            "aborted": self._aborted,
            "failed": self.lifecycle.failed,
            "adapters": len(self._slots.loaded),
            "compilations": self.runner.steps.traces,
            **self.scheduler.stats(),
            **self.dispatcher.stats(),
            "swap_seconds": self._swap_seconds,
        }
