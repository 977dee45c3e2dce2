"""Fixtures shared by studies of the engine: the policy, engines that hold it, and requests with forced lengths."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx

from axlearn_like.layers.base import Params, split
from rl.protocol.messages import Prompt
from rl.rollout.agent_loops.commands import AgentLoop, single_turn
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from tools.bench.grpo_step.job import GrpoJob
from tools.bench.grpo_step.ours import experiment_config

_QUICK = GrpoJob(prompts=2, group=2, prompt_tokens=8, new_tokens=8, layers=1, dim=32, ffn=64, heads=2, kv_heads=1)
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Bed:
    """A factory of engines and requests of the benchmark's job.

    Args:
        quick: a tiny policy, and studies reduce their work: a smoke test, without meaningful figures.
    """

    def __init__(self, *, quick: bool = False):
        self.quick, self.job = quick, _QUICK if quick else GrpoJob()
        self.policy = experiment_config(self.job).policy
        self._numbers = itertools.count()

    def params(self, seed: int = 0) -> Params:
        """Return a random policy."""

        def create(key: jax.Array) -> Params:
            return split(self.policy.build(rngs=nnx.Rngs(key)))[1]

        return jax.jit(create)(jax.random.key(seed))

    def engine(
        self,
        *,
        max_num_seqs: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        params: Params | None = None,
        **settings: Any,
    ) -> RolloutEngine:
        """Build an engine of our defaults with a policy in place, a random one if none is given.

        Only the limit ends a completion.
        """
        cfg = RolloutEngine.Config(
            model=self.policy,
            stop_tokens=(),
            max_num_seqs=max_num_seqs,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            **settings,
        )
        engine = cfg.build()
        engine.set_weights(self.params() if params is None else params, 0)
        return engine

    def request(
        self, new_tokens: int, *, prompt_tokens: int, samples: int = 1, agent_loop: AgentLoop = single_turn
    ) -> Request:
        """Return the next request: a prompt unlike all before, and exactly `new_tokens` for each sample."""
        number = next(self._numbers)
        letters = np.random.default_rng((self.job.seed, number)).integers(97, 123, prompt_tokens, np.int32)
        prompt = Prompt(number, "letters", letters)
        return Request(
            prompt, samples, self.job.seed, stop=StopConditions(max_new_tokens=new_tokens), agent_loop=agent_loop
        )

    def requests(self, lengths: Iterable[int], *, prompt_tokens: int) -> list[Request]:
        """Return one request for each length, in order."""
        return [self.request(length, prompt_tokens=prompt_tokens) for length in lengths]


class Compilations:
    """A counter of the programs that jax compiles or loads anywhere in this process from now on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == _COMPILED


def after_warm_up[T](rounds: int, job: Callable[[], T]) -> tuple[list[T], int]:
    """Run a job once to warm up and `rounds` times to measure.

    Returns:
        The results of the measured runs, and the number of programs compiled during them.
    """
    compilations = Compilations()
    job()
    compilations.count = 0
    return [job() for _ in range(rounds)], compilations.count
