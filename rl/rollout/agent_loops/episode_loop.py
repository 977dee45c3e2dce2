"""An environment as an agent loop: act, wait for the observation without a row of the batch, read it, act again.

What the policy draws stays as it was drawn; observations are given tokens, which the loss leaves out. Whatever an
environment does wrong (it raises, hangs, or returns what is no step) ends its episode as an "error" that carries no
reward, and nothing else.
"""

import dataclasses
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from axlearn_like.tokenizers.protocol import Tokenizer, answer_text, completion_text
from rl.environments.environment import Ask, Environment, Row, checked_figures, checked_observation
from rl.environments.streaming.events import Invalid
from rl.environments.thread import EnvironmentThread
from rl.environments.turns import Turns
from rl.protocol.messages import Episode, EpisodeEnd, FinishReason, Problem, Rollout, Turn
from rl.protocol.segments import SegmentedText
from rl.rollout.agent_loops.commands import Abort, Command, Completion, Generate, Observe, Wait
from rl.rollout.agent_loops.consulting import heard, opened
from rl.rollout.decoding.stop_strings import INCOMPLETE
from rl.tasks.encoding import encode_parts

__all__ = ["GRACE_S", "EpisodeLoop"]

Steps = Generator[Command, Any, tuple[EpisodeEnd, str | None]]

GRACE_S = 0.25  # seconds after the deadline for a coroutine to be cancelled, before its thread is given up
_numbers = itertools.count()


class EpisodeLoop:
    """The agent loop of a problem's samples. `episodes` has each sample's record once its episode is over."""

    def __init__(
        self,
        cfg: Environment.Config,
        make: Callable[[], Environment],
        tokenizer: Tokenizer,
        problem: Problem,
        row: Row,
        opened: Callable[[EnvironmentThread], None] = lambda thread: None,
        shared: Any = None,
    ):
        """Store the parts.

        Args:
            cfg: limits of an episode.
            row: for `reset`.
            opened: is given each episode's thread.
            shared: what the episodes of a process share.
        """
        self._cfg, self._make, self._tokenizer = cfg, make, tokenizer
        self._problem, self._row, self._opened, self._shared = problem, row, opened, shared
        self.episodes: dict[int, Episode] = {}

    def __call__(self, completion: Completion) -> Generator[Command, Any, FinishReason | None]:
        """Play one episode."""
        name = f"episode-{next(_numbers)}"
        thread = EnvironmentThread(self._make, self._cfg.deadline_s, name)
        self._opened(thread)
        turns: list[Turn] = []
        try:
            ended, answer = yield from self._play(thread, completion, turns)
            named, called = yield self._wait(thread, lambda one: (dict(one.figures()), list(one.calls_made())))
            completion.trace(called)
            episode = Episode(tuple(turns), answer, ended, figures=checked_figures(named))
        except Exception as error:
            episode = Episode(tuple(turns), ended="error", error=f"{type(error).__name__}: {error}"[:500])
            if not len(completion.output_tokens):  # a rollout has a token at least
                yield Generate(1)
        finally:
            thread.close()
        self.episodes[completion.sample] = episode
        return "length" if episode.ended == "truncated" else "stop"

    def _play(self, thread: EnvironmentThread, completion: Completion, turns: list[Turn]) -> Steps:
        cfg, text = self._cfg, Turns(self._tokenizer, self._problem, self._cfg.role())
        ask = partial(self._wait, thread)
        first = yield ask(lambda environment: environment.reset(self._row))
        seen = checked_observation((yield from opened(first, cfg, ask, self._tokenizer)))
        given, segments = _first(seen, text, completion, self._tokenizer)
        while (yield Observe(given, segments)) == len(given) and len(turns) < cfg.max_turns:
            first = len(completion.output_tokens)
            limit, strings = _limits(seen, cfg)
            reader = cfg.reader(self._shared, thread.call, self._row)
            watch = None if reader is None else TextWatch(self._tokenizer, reader)
            reason: FinishReason = yield Generate(limit, strings, watch)
            drawn = completion.output_tokens[first:].tolist()
            end = first + len(drawn)
            if reason == "length" and len(drawn) != limit:  # no room is left
                turns += [Turn(end, 0.0, _messages(seen, cfg))] if drawn else []
                break
            asked = isinstance(seen, Ask)
            action: Any = _drawn(completion.rollout(), first, reason) if asked else text.action(drawn)
            if watch is not None and watch.why:
                refused = watch.why
                done = yield self._wait(
                    thread, lambda environment, act=action, why=refused: environment.refuse(act, why)
                )
            else:
                done = yield self._wait(thread, lambda environment, act=action: environment.step(act))
            step = yield from heard(done, cfg, ask, self._tokenizer)
            turns.append(Turn(end, step.reward, _messages(seen, cfg)))
            if step.done:
                judged = answer_text(self._tokenizer, drawn) if step.answer is None else step.answer
                return "done", judged if cfg.verify else None
            seen = step.observation
            given, segments = _given(seen, text, completion) if len(turns) < cfg.max_turns else [], ()
        return "truncated", None

    def _wait(self, thread: EnvironmentThread, call: Callable[[Environment], Any]) -> Wait:
        return Wait(thread.call(call), self._cfg.deadline_s + GRACE_S)


def _first(seen: str | Ask, text: Turns, completion: Completion, tokenizer: Tokenizer) -> Any:
    """Return the tokens of the first observation, and their segments if it has some."""
    if isinstance(seen, SegmentedText) and tokenizer.chat_template is None and not len(completion.output_tokens):
        return encode_parts(seen, tokenizer)
    return _given(seen, text, completion), ()


def _given(seen: str | Ask, text: Turns, completion: Completion) -> list[int]:
    if not isinstance(seen, Ask):
        return text.observation(seen)
    before = np.concatenate([completion.prompt, completion.output_tokens])
    if not np.array_equal(seen.tokens[: len(before)], before):
        raise ValueError("the tokens of the request do not begin with those of the episode so far")
    return seen.tokens[len(before) :].tolist()


def _messages(seen: str | Ask, cfg: Environment.Config) -> tuple[Mapping[str, Any], ...]:
    if isinstance(seen, Ask):
        return seen.messages
    return ({"role": cfg.role(), "content": seen},) if seen else ()


def _limits(seen: str | Ask, cfg: Environment.Config) -> tuple[int | None, tuple[str, ...]]:
    """Return the most tokens of an action, and the strings that end it."""
    if not isinstance(seen, Ask):
        return cfg.max_turn_tokens, cfg.stop_strings()
    limits = [limit for limit in (cfg.max_turn_tokens, seen.max_new_tokens) if limit is not None]
    return min(limits, default=None), (*cfg.stop_strings(), *seen.strings)


def _drawn(whole: Rollout, first: int, reason: FinishReason) -> Rollout:
    cut = {name: getattr(whole, name)[first:] for name in ("tokens", "logprobs", "versions", "action_mask")}
    return dataclasses.replace(whole, finish_reason=reason, routing=None, candidate_tokens=None, **cut)


_LONGEST = 3  # tokens that may lack the rest of a character


class TextReader(Protocol):
    """Reader of the text of a draw, which comes in pieces."""

    def read(self, text: str) -> Invalid | None:
        """Read more text; returns the first place at which it can only fail, however the text was cut."""
        ...


class TextWatch:
    """Watch by a reader of text. Bytes that are no character yet wait for the next ones."""

    def __init__(self, tokenizer: Tokenizer, reader: TextReader):
        self._tokenizer, self._reader = tokenizer, reader
        self._tokens: list[int] = []
        self._read, self._length = 0, 0  # tokens whose text was read, and its characters
        self.why = ""  # reason for which the reader has ended the draw; "": it has not

    def feed(self, tokens: Sequence[int]) -> Abort | None:
        """Read tokens; the draw is kept up to the token in which the reader finds that it can only fail."""
        self._tokens += tokens
        known = len(self._tokens)
        while known > self._read and self._text(self._read, known).endswith(INCOMPLETE):
            if len(self._tokens) - known == _LONGEST:  # bytes of no character
                known = len(self._tokens)
                break
            known -= 1
        first, before, text = self._read, self._length, self._text(self._read, known)
        self._read, self._length = known, before + len(text)
        if not text or (invalid := self._reader.read(text)) is None:
            return None
        self.why = invalid.why
        ends = range(first + 1, known)
        enough = (end for end in ends if before + len(self._text(first, end).rstrip(INCOMPLETE)) >= invalid.end)
        return Abort(next(enough, known), "invalid_call")

    def _text(self, first: int, end: int) -> str:
        return completion_text(self._tokenizer, self._tokens[first:end])
