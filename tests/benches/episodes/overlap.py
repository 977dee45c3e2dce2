"""Episodes with tools: tokens a second beside a loop that waits for its tools, and prefixes computed once.

Both ways play the same episodes on one engine, by the code of an RL run, and take turns: actions of `action` tokens,
each answered after the time that the actions of all rows take to be drawn. The engine gets twice as many episodes as it
has rows, so that some can draw while others wait. The loop plays them in two halves: it fills the rows, draws an action
of every row, and waits for all tools together. It keeps the prefixes too: waiting is all that it does worse.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, override

import jax
from flax import nnx

from axlearn_like.layers.base import split
from axlearn_like.tokenizers.bytes import ByteTokenizer
from axlearn_like.tokenizers.protocol import completion_text
from mesh.errors import UserError
from models.tiny import tiny
from rl.environments.environment import Environment, Step
from rl.environments.task import EnvironmentTask
from rl.protocol.messages import Prompt, Rollout
from rl.rollout.agent_loops.episodes import Episodes
from rl.rollout.engine import RolloutEngine
from rl.tasks.encoding import encode_problem
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows

OBSERVATION = "<result>42</result>"
_SPARE = 20  # rounds in which something was compiled
PROMPT = "A question of some length, so that there is a prefix. "


class Delay(Environment):
    """Answers each action after some time, and is over after some."""

    class Config(Environment.Config):
        turns: int = 8
        deadline_s: float = 600.0
        pure: bool = True

    seconds = 0.0  # measured before they are set

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._left = cfg.turns

    @override
    def reset(self, row: Any) -> str:
        return ""

    @override
    async def step(self, action: str) -> Step:
        await asyncio.sleep(Delay.seconds)
        self._left -= 1
        return Step(OBSERVATION, done=self._left == 0)


def overlap(quick: bool) -> dict[str, Any]:
    """Return the figures of `measure`; `quick`: of a tiny job."""
    return measure(1, rows=4, turns=4, action=16, dim=192, layers=2) if quick else measure()


def measure(
    rounds: int = 5, *, rows: int = 8, turns: int = 8, action: int = 32, dim: int = 384, layers: int = 4
) -> dict[str, Any]:
    """Measure both ways `rounds` times, in turn.

    Args:
        rounds: rounds of which medians are taken.
        rows: rows of the engine; there are twice as many episodes.
        turns: actions of an episode.
        action: tokens of an action.
        dim, layers: dim and layers of the policy, whose weights are random.

    Returns:
        `overlap_ratio`: tokens a second with waiting episodes off their rows / those of the loop, median over rounds.
        `prefix_reuse`: of the tokens that turns have in common with the ones before, the share not computed again.
        Seconds of both ways and of a tool, and tokens a second.
    """
    bench = _Halves(rows, turns, action, dim, layers)
    for _ in range(2):  # compiles
        bench.play(2)
        bench.halves()
    Delay.seconds = bench.halves() / (2 * turns)
    measured: list[tuple[float, float, float]] = []
    for _ in range(rounds + _SPARE):
        compiled, before = bench.compilations, bench.engine.stats()["prefill_tokens"]
        seconds, rollouts = bench.play(2)
        reuse = bench.reuse(rollouts, bench.engine.stats()["prefill_tokens"] - before)
        waiting = bench.halves()
        if bench.compilations == compiled:
            measured.append((seconds, waiting, reuse))
        if len(measured) == rounds:
            break
    else:
        raise UserError("a program was compiled in almost every round; expected that all were known by then")
    overlapped, waited, reuses = zip(*measured, strict=True)
    tokens = 2 * rows * turns * action
    return {
        "overlap_ratio": round(statistics.median(w / o for w, o in zip(waited, overlapped, strict=True)), 3),
        "prefix_reuse": round(min(reuses), 4),
        "tokens_per_second": round(tokens / statistics.median(overlapped), 1),
        "tokens_per_second_waiting": round(tokens / statistics.median(waited), 1),
        "seconds": round(statistics.median(overlapped), 3),
        "seconds_waiting": round(statistics.median(waited), 3),
        "tool_seconds": round(Delay.seconds, 4),
        "job": {"rows": rows, "episodes": 2 * rows, "turns": turns, "action_tokens": action, "rounds": rounds},
    }


class _Halves:
    def __init__(self, rows: int, turns: int, action: int, dim: int, layers: int):
        self._rows, self._turns = rows, turns
        self._tokenizer = ByteTokenizer.Config().build()
        self._observed = len(self._tokenizer.encode(OBSERVATION))
        policy = tiny(vocab_size=self._tokenizer.vocab_size, dim=dim, num_layers=layers, num_heads=6, num_kv_heads=2)
        source = TaskRows.Config(rows=RowFunction.Config(function=questions), shuffle=False, label="questions")
        environment = Delay.Config(turns=turns, max_turns=turns, max_turn_tokens=action)
        mixture = TaskMixture.Config(
            families=(EnvironmentTask.Config(source=source, environment=environment),), heldout_every=1000
        )
        self._tasks = mixture.build()
        self._episodes = Episodes(self._tasks, self._tokenizer, seed=0)
        cfg = RolloutEngine.Config(
            model=policy,
            stop_tokens=(),
            max_prompt_tokens=64,
            max_new_tokens=turns * (action + self._observed),
            max_num_seqs=rows,
            pages=1 + 2 * rows * (-(-(64 + turns * (action + self._observed)) // 16)),
            steps_per_dispatch=action,
            keep_completions=False,
            enable_prefix_caching=False,
        )
        self.engine = cfg.build(decode=partial(completion_text, self._tokenizer))
        params = jax.jit(lambda: split(policy.build(rngs=nnx.Rngs(0)))[1])()
        self.engine.set_weights(params, 0)

    def play(self, times_rows: int, first: int = 0) -> tuple[float, list[Rollout]]:
        """Play so many episodes for each row; returns the seconds and the rollouts."""
        prompts = [self._prompt(index) for index in range(first, first + times_rows * self._rows)]
        began = time.perf_counter()
        rollouts = self.engine.generate([self._episodes.request(prompt, 1, 0) for prompt in prompts])
        seconds = time.perf_counter() - began
        found = self._episodes.recorded(rollouts, again=False)
        for rollout in found:
            if rollout.episode is None or rollout.episode.ended != "done":
                raise UserError(f"an episode ended with {rollout.episode}")
        return seconds, found

    def halves(self) -> float:
        """Play the same episodes as `play(2)`, in two halves; returns the seconds."""
        return self.play(1)[0] + self.play(1, first=self._rows)[0]

    @property
    def compilations(self) -> float:
        """Programs compiled so far."""
        return self.engine.stats()["compilations"]

    def reuse(self, rollouts: list[Rollout], prefilled: float) -> float:
        """Return the share of what could be reused that was not prefilled again."""
        new, common = 0, 0
        for rollout in rollouts:
            prompt = len(self._prompt_tokens(rollout.prompt_id)) - 1
            assert rollout.episode is not None
            ends = [turn.end for turn in rollout.episode.turns]
            new += prompt + (len(ends) - 1) * self._observed
            common += sum(prompt + end for end in ends[:-1])
        return 1 - (prefilled - new) / common

    def _prompt(self, index: int) -> Prompt:
        problem = self._tasks.train(index)
        return Prompt(problem.id, problem.family, encode_problem(problem, self._tokenizer))

    def _prompt_tokens(self, problem_id: int) -> Any:
        return encode_problem(self._tasks.problem(problem_id), self._tokenizer)


def questions() -> Iterator[dict[str, Any]]:
    """Yield rows with questions."""
    yield from ({"prompt": f"{PROMPT}{n}", "answer": str(n)} for n in range(1000))
