"""Tools that run while their action is drawn, beside the same tools that wait for it: latency, bits, aborts.

Random weights draw from words and whole calls alone, by biases of the logits, so that each text is a valid action. The
tool sleeps; its seconds follow from the measured seconds of drawing.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from axlearn_like.layers.base import split
from axlearn_like.tokenizers.phrases import PhraseTokenizer
from axlearn_like.tokenizers.protocol import completion_text
from mesh.errors import UserError
from models.tiny import tiny
from rl.environments.calls import CallForm, FencedCalls, JsonCalls
from rl.environments.streaming.reader import PartialExecution
from rl.environments.task import EnvironmentTask
from rl.environments.tool_environment import ToolEnvironment
from rl.environments.tools.function import FunctionTool
from rl.environments.tools.python import PythonTool
from rl.protocol.messages import Prompt, Rollout
from rl.rollout.agent_loops.episodes import Episodes
from rl.rollout.engine import RolloutEngine
from rl.rollout.sampling import Sampler
from rl.tasks.encoding import encode_problem
from rl.tasks.mixture import TaskMixture
from rl.tasks.rows.sources import RowFunction
from rl.tasks.rows.task_rows import TaskRows

_WORDS = tuple(f"{word} " for word in "so we look at this and then that one as well".split())
_CALL = '<tool_call>{{"name": "{}", "arguments": {{"query": "{}"}}}}</tool_call>'
_CALLS = tuple(_CALL.format("search", word) for word in ("a", "b", "c", "d", "e", "f", "g"))
_WRONG = tuple(f'<tool_call>{{"name": "{name}", "arguments": {{"query": "' for name in ("serch", "find", "look"))
_CODE = ("```python\n", "\n```\n", "x = 1\n", "x += 2\n", "print(x)\n", "for i in range(9):\n", "    x += i\n", "x\n")
PHRASES = (*_WORDS, *_CALLS, *_WRONG, *_CODE)
_BIAS = 40.0  # logit bias of phrases that may be drawn
_RARE = 2.0  # reduction for calls: about one of 20 tokens of search, one of 24 where some are wrong
_SPARE = 8  # rounds in which something was compiled
RATIOS = (0.5, 1.0, 2.0)  # seconds of tools over those of drawing


class _Search:
    seconds = 0.0  # measured before they are set


def search(query: str) -> str:
    """Search something, slowly."""
    time.sleep(_Search.seconds)
    return f"found {query}"


def questions() -> Iterator[dict[str, Any]]:
    """Yield rows with questions."""
    yield from ({"prompt": f"Question {n}: ", "answer": ""} for n in range(1000))


@dataclasses.dataclass(frozen=True)
class Job:
    """Sizes.

    Attributes:
        rows: episodes at the same time.
        turns, action: actions of an episode, and their tokens.
        dim, layers: dim and layers of the policy: so many that drawing takes longer than what the host does besides.
        dispatch: tokens of a dispatch.
        rounds: rounds of which medians are taken.
    """

    rows: int = 2
    turns: int = 3
    action: int = 64
    dim: int = 768
    layers: int = 6
    dispatch: int = 2
    rounds: int = 3


def partial_execution(quick: bool) -> dict[str, Any]:
    """Return the figures of tools at several speeds, of Python by statements, and of calls that are aborted."""
    job = Job(rows=2, turns=1, action=32, dim=64, layers=1, rounds=1) if quick else Job()
    bench = _Bench(job, JsonCalls.Config(), (*_WORDS, *_CALLS))
    drawing = bench.calibrate()
    found: dict[str, Any] = {"draw_seconds_of_turn": drawing}
    latencies, speeds, bounds, same = [], [], [], True
    for ratio in RATIOS:
        _Search.seconds = ratio * drawing / bench.calls
        pairs = [bench.pair() for _ in range(job.rounds)]
        same = same and all(lazy.rollouts == eager.rollouts for lazy, eager in pairs)
        latencies.append(statistics.median(eager.latency / lazy.latency for lazy, eager in pairs))
        speeds.append(statistics.median(lazy.seconds / eager.seconds for lazy, eager in pairs))
        bounds.append(bench.bound(pairs[0][0], ratio))
    _Search.seconds = 0.05 * drawing / bench.calls
    small = [lazy.seconds / eager.seconds for lazy, eager in (bench.pair() for _ in range(job.rounds))]
    code = _Bench(job, FencedCalls.Config(), _CODE)
    lazy, eager = code.play(None), code.play(PartialExecution.Config(recheck_every=5))
    return {
        "latency_ratio": statistics.mean(latencies),
        "latency_ratios": dict(zip(map(str, RATIOS), latencies, strict=True)),
        "latency_bound": statistics.mean(bounds),
        "latency_bounds": dict(zip(map(str, RATIOS), bounds, strict=True)),
        "speed_ratios": dict(zip(map(str, RATIOS), speeds, strict=True)),
        "small_tools_speed_ratio": statistics.median(small),
        "identical": same and lazy.rollouts == eager.rollouts,
        "watch_cpu_share": bench.watch_share,
        "python_calls_ahead": eager.figure("partial_calls"),
        "calls_of_turn": bench.calls,
        **_aborts(job),
        **found,
    }


def _aborts(job: Job) -> dict[str, Any]:
    """Return the share of tokens that is not drawn where a call that can only fail ends its action."""
    _Search.seconds = 0.0
    bench = _Bench(job, JsonCalls.Config(), (*_WORDS, *_CALLS, *_WRONG))
    whole, cut = bench.play(None), bench.play(PartialExecution.Config(abort_invalid=True))
    return {
        "abort_saved": 1 - cut.drawn / whole.drawn,
        "abort_invalid_share": len(_WRONG) / len(_WRONG + _CALLS),
        "abort_calls_of_turn": (whole.figure("tool_calls")) / sum(len(one.turns) for one in whole.episodes),
    }


@dataclasses.dataclass(frozen=True)
class _Played:
    latency: float  # mean seconds of an episode
    seconds: float
    rollouts: list[tuple[Any, ...]]  # transcripts: tokens, their records, and the turns
    drawn: int
    episodes: list[Any]

    def figure(self, name: str) -> float:
        return sum(dict(one.figures)[name] for one in self.episodes)


class _Bench:
    """One policy and its episodes; `calls`: mean number of calls of a turn."""

    def __init__(self, job: Job, form: CallForm.Config, drawn: Sequence[str]):
        self._job = job
        self._tokenizer = PhraseTokenizer.Config(phrases=PHRASES, vocab_size=259 + len(PHRASES)).build()
        ids = {phrase: self._tokenizer.encode(phrase)[0] for phrase in drawn}
        rare = {*_CALLS, *_WRONG}
        bias = tuple((ids[phrase], _BIAS - _RARE * (phrase in rare)) for phrase in drawn)
        tools = (FunctionTool.Config(function=search, pure=True), PythonTool.Config())
        sizes = {"max_turns": job.turns + 1, "max_turn_tokens": job.action, "deadline_s": 60.0, "verify": False}
        self._environment = ToolEnvironment.Config(tools=tools, calls=form, max_result=40, **sizes)
        policy = tiny(
            vocab_size=self._tokenizer.vocab_size, dim=job.dim, num_layers=job.layers, num_heads=4, num_kv_heads=2
        )
        cfg = RolloutEngine.Config(
            model=policy,
            stop_tokens=(),
            max_prompt_tokens=160,
            max_new_tokens=(job.turns + 1) * job.action * 8,
            max_num_seqs=job.rows,
            steps_per_dispatch=job.dispatch,
            sampler=Sampler.Config(temperature=1.0, logit_bias=bias),
        )
        self.engine = cfg.build(decode=partial(completion_text, self._tokenizer))
        self.engine.set_weights(jax.jit(lambda: split(policy.build(rngs=nnx.Rngs(0)))[1])(), 0)
        self.calls, self._cpu_seconds = 1.0, 0.0
        self._call_ids = [ids[phrase] for phrase in drawn if phrase in rare]

    def calibrate(self) -> float:
        """Return the seconds in which a turn is drawn, and count its calls; compiles before."""
        played = min((self.pair()[0] for _ in range(2)), key=lambda one: one.latency)
        turns = sum(len(one.turns) for one in played.episodes)
        self.calls = max(1.0, played.figure("tool_calls") / turns)
        return played.latency / (turns / len(played.episodes))

    def pair(self) -> tuple[_Played, _Played]:
        """Return episodes of tools that wait, and the same ones of tools that run ahead; nothing was compiled."""
        for _ in range(_SPARE):
            compiled = self.engine.stats()["compilations"]
            found = self.play(None), self.play(PartialExecution.Config())
            if self.engine.stats()["compilations"] == compiled:
                return found
        raise UserError("a program was compiled in every round; expected that all were known by then")

    def bound(self, played: _Played, ratio: float) -> float:
        """Return the least ratio of latencies with these texts: tools start at the end of the dispatch of their call.

        Nothing but drawing and tools takes time, and a dispatch as long as any other. Calls of an episode are made one
        after the other.
        """
        step, seconds = self.engine.cfg.steps_per_dispatch, ratio * self._job.action / self.calls
        lazy = eager = 0.0
        for rollout, episode in zip(played.rollouts, played.episodes, strict=True):
            tokens, mask, first = np.frombuffer(rollout[1], np.int32), np.frombuffer(rollout[4], bool), 0
            for turn in episode.turns:
                drawn = tokens[first : turn.end][mask[first : turn.end]]
                first, free = turn.end, 0.0
                for place in np.flatnonzero(np.isin(drawn, self._call_ids)):
                    free = max(free, min(len(drawn), (place // step + 1) * step)) + seconds
                    lazy += seconds
                lazy, eager = lazy + len(drawn), eager + max(free, len(drawn))
        return eager / lazy

    def play(self, rules: PartialExecution.Config | None) -> _Played:
        """Play an episode in every row, with tools that wait (None) or run ahead."""
        source = TaskRows.Config(rows=RowFunction.Config(function=questions), shuffle=False, label="questions")
        family = EnvironmentTask.Config(source=source, environment=self._environment.clone(partial=rules))
        tasks = TaskMixture.Config(families=(family,), heldout_every=1000).build()
        episodes = Episodes(tasks, self._tokenizer, seed=0)
        problems = [tasks.train(index) for index in range(self._job.rows)]
        prompts = [Prompt(one.id, one.family, encode_problem(one, self._tokenizer)) for one in problems]
        began, cpu = time.perf_counter(), time.process_time()
        for prompt in prompts:
            self.engine.submit(episodes.request(prompt, 1, 0))
        ends, rollouts = list[float](), list[Rollout]()
        while self.engine.busy:
            for output in self.engine.step():
                ends.append(time.perf_counter() - began)
                rollouts += output.rollouts
        self._cpu_seconds += time.process_time() - cpu
        played = sorted(episodes.recorded(rollouts, again=False), key=lambda one: one.prompt_id)
        episodes.close()
        made = [one.episode for one in played]
        drawn = sum(int(one.action_mask.sum()) for one in played)
        return _Played(statistics.mean(ends), max(ends), list(map(_transcript, played)), drawn, made)

    @property
    def watch_share(self) -> float:
        """Return the CPU seconds of watches over those of the process while episodes were played."""
        return self.engine.stats().get("watch_cpu_seconds", 0.0) / self._cpu_seconds


def _transcript(rollout: Rollout) -> tuple[Any, ...]:
    arrays = (rollout.tokens, rollout.logprobs, rollout.versions, rollout.action_mask)
    episode = rollout.episode
    assert episode is not None
    told = [(turn.end, turn.reward, repr(turn.given)) for turn in episode.turns]
    whole = [np.asarray(one).tobytes() for one in arrays]
    return rollout.prompt_id, *whole, rollout.finish_reason, told, episode.answer, episode.ended, episode.error
