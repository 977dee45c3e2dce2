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
from functools import partial
from typing import Any, Literal

from axlearn_like.config import Configurable
from axlearn_like.layers.base import Params
from axlearn_like.layers.wrappers.adapters import Adapter
from mesh import UserError
from rl.protocol.messages import Rollout
from rl.rollout.config import EngineConfig
from rl.rollout.engine_core import EngineCore
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.model_runner.adapter_slots import LoadedAdapter
from rl.rollout.model_runner.dispatches import compilations, compile_page_programs, run_idle
from rl.rollout.model_runner.processes.followers import Followers
from rl.rollout.model_runner.processes.pulls import GroupReceiver, Pulled
from rl.rollout.model_runner.shapes.listed import ReadyPrograms, Shape, listed_programs
from rl.rollout.model_runner.weights import PlacedWeights
from rl.rollout.request import OnTokens, Request, RequestOutput
from rl.rollout.sampling import Sampler
from rl.rollout.sequence import SequenceGroup
from rl.rollout.validation import validate

Swap = Literal["keep_cache", "recompute", "drain"]


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
    """

    class Config(EngineConfig["RolloutEngine"]):
        """See `EngineConfig`."""

    def __init__(
        self,
        cfg: Config,
        *,
        decode: Callable[[Any], str] | None = None,
        followers: Followers | None = None,
        adapters: AdapterLimits | None = None,
    ):
        """Build the engine, without weights.

        Args:
            cfg: sizes and defaults.
            decode: gives the text of tokens; without it requests cannot have stop strings.
            followers: the other processes of an engine whose mesh goes over several, of which this one leads.
            adapters: room for LoRA adapters that requests name; None: there is none.
        """
        if adapters is not None and followers is not None:
            raise UserError("an engine of several processes has no adapters; expected one process")
        self.cfg, self._has_text = cfg, decode is not None
        self.paused = False
        self._core = EngineCore(cfg, decode, followers, adapters)
        self._runner, self._lifecycle = self._core.runner, self._core.lifecycle
        Sampler.check(cfg.sampler, self._runner.vocab, "RolloutEngine.sampler")
        self._submitted, self._aborted = 0, 0
        self._kept: list[RequestOutput] = []  # of other requests, that finished during `generate`
        self._in_step = False
        self._swap_seconds = 0.0

    @property
    def kernel(self) -> dict[str, Any]:
        """The kernel of attention, its block sizes and what its self-test has found; empty: attention is by XLA."""
        return self._runner.kernel_choice

    # ---- weights

    @property
    def version(self) -> int:
        """The version of the weights in place, or -1."""
        return self._core.version

    @property
    def weights_like(self) -> Params:
        """Shapes, types and shardings of arrays that `place` can use with the least copying."""
        return self._runner.weights_like

    def place(self, params: Params, approximations: tuple[str, ...] = ()) -> PlacedWeights:
        """Put the trainer's arrays into the form that `set_weights` takes without copying.

        Another thread may call it while the engine draws. `approximations`: tags for rollouts drawn with them.

        Raises:
            UserError: other arrays than the model has, or the engine has several processes (see `place_pulled`).
        """
        if not self._core.executor.alone:
            raise UserError("an engine of several processes takes its weights from a parameter server only")
        return PlacedWeights(self._runner.place(params), (*approximations, *self._runner.approximations))

    def place_pulled(self, pulled: Pulled, receiver: GroupReceiver) -> PlacedWeights:
        """Put slices that all processes of the engine have pulled into the form that `set_weights` takes.

        On the thread of the engine, between two steps.

        Raises:
            WeightsError: they are not what the trainer had.
        """
        return receiver.place(pulled, self._core.executor)

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
        newest = self._core.newest_version
        if version < newest and not rewind:
            where = "which is in place" if newest == self.version else "which is to come next"
            raise UserError(f"weights of version {version} are older than version {newest}, {where}")
        began = time.monotonic()
        placed = params if isinstance(params, PlacedWeights) else self.place(params)
        if swap == "drain":
            self._core.install_when_drained(placed, version)
        else:
            self._core.install(placed, version, recompute=swap == "recompute")
        self._swap_seconds += time.monotonic() - began

    def compilations(self) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
        """Keep to a short list of programs from now on (shapes/listed.py); returns functions that compile them.

        Those of the first list are called before the first request, in any threads, and need no weights. They fit every
        request. Those of the second may be called beside the engine's use, or before it.
        """
        runner = self._runner
        ready = self._core.executor.ready = ReadyPrograms(listed_programs(runner.buckets, self.cfg))

        def compile_one(shape: Shape, compile_it: Callable[[], None]) -> None:
            compile_it()
            ready.add(shape)

        pairs = zip(ready.listed, compilations(runner, ready.listed), strict=True)
        found = [partial(compile_one, *pair) for pair in pairs]
        return [*found[: ready.NEEDED], partial(compile_page_programs, runner)], found[ready.NEEDED :]

    def run_idle(self) -> None:
        """Call the programs of `compilations` that are compiled, with weights in place and before the first request."""
        if (ready := self._core.executor.ready) is not None:
            ready.refresh()
            run_idle(self._runner, ready.compiled)

    def invalidate_weights(self) -> None:
        """Forget which version the weights in place are: they may be of a trainer that died before it saved them."""
        self._core.version = -1

    def sleep(self) -> None:
        """Give back the memory of weights and cache, until `set_weights`: a trainer on the same devices can use it.

        Compiled programs stay.

        Raises:
            UserError: a request is unfinished; its keys and values would be lost.
        """
        if self._lifecycle.groups:
            raise UserError(f"the engine cannot sleep: {len(self._lifecycle.groups)} requests are unfinished")
        self._core.sleep()

    def reset(self) -> None:
        """Drop all requests and the cache, after a step that has raised: its arrays may be gone.

        Weights, adapters and compiled programs stay. Weights that waited for running requests are installed by the
        next step.

        Raises:
            UserError: the engine has several processes, of which the others may have stopped elsewhere.
        """
        if not self._core.executor.alone:
            raise UserError("an engine of several processes cannot be reset")
        self._kept.clear()
        self._core.reset()
        self._lifecycle = self._core.lifecycle

    # ---- adapters

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """The adapters that requests can name."""
        return self._core.adapters.loaded

    def load_adapter(self, name: str, adapter: Adapter) -> LoadedAdapter:
        """Load an adapter, or replace the one of this name, between two dispatches; nothing is compiled for it.

        Unfinished requests keep the one that they began with.

        Raises:
            UserError: it does not fit the model or the room for adapters, or all slots are taken; nothing has changed.
                Or a request's own code called it, within a step.
        """
        self._check_between_steps("load_adapter")
        return self._core.load_adapter(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; its slot is free when those that use it have ended.

        Raises:
            UserError: there is none of this name, or a request's own code called it, within a step.
        """
        self._check_between_steps("unload_adapter")
        self._core.unload_adapter(name)

    def _check_between_steps(self, method: str) -> None:
        if self._in_step:
            raise UserError(f"{method} was called within a step, by a request's own code; call it between steps")

    # ---- other processes

    @property
    def leaving(self) -> bool:
        """True if another process of the engine was asked to end: what is under way should be handed back."""
        return self._core.executor.leaving

    def close(self) -> None:
        """End the loops of the engine's other processes."""
        self._core.executor.close()

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
            cache_tokens=self._core.scheduler.kv_cache.pool.total * cfg.page_size,
            has_text=self._has_text,
        )
        adapter = None if request.adapter is None else self._core.adapters.find(request.adapter, f"{request.name}: ")
        due = None if request.deadline is None else time.monotonic() + request.deadline
        sampler = request.sampler or cfg.sampler
        group = SequenceGroup(self._submitted, request, sampler, stop, due, on_tokens, adapter)
        self._submitted += 1
        self._lifecycle.start(group)
        return group.number

    def abort(self, number: int) -> None:
        """End a request; its unfinished rollouts come out with finish reason "abort", and can be continued."""
        if (group := self._lifecycle.groups.get(number)) is not None:
            self._aborted += 1
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
            return self._core.iterate(paused=self.paused)
        finally:
            self._in_step = False

    def _check_weights(self) -> None:
        if self._runner.params is None:
            raise UserError("the engine has no weights yet; call set_weights first")

    # ---- figures

    def stats(self) -> dict[str, float]:
        """Return counts since the start (tokens, requests, compilations ...), current states, and seconds by use."""
        own = {"requests": self._submitted, "aborted": self._aborted, "swap_seconds": self._swap_seconds}
        return {**self._core.stats(), **own}
