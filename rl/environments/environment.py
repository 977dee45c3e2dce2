"""The interface of an environment: one episode, from `reset` over `step`s to its end.

    class Guess(Environment):
        async def reset(self, row):
            self._secret = row["secret"]
            return "Guess a number."

        async def step(self, action):
            if int(action) == self._secret:
                return "", 1.0, True
            return "higher" if int(action) < self._secret else "lower", 0.0, False

Methods may be plain functions too. Each episode has an object and a thread of its own, so blocking calls hold up nobody
else; whatever ends the episode, `close` is called in that thread.
"""

import abc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, override

import numpy as np

from axlearn_like.config import ConfigBase, Configurable
from axlearn_like.tokenizers.protocol import Tokenizer
from rl.environments.streaming.reader import ActionReader
from rl.protocol.messages import Problem
from rl.protocol.players import Player, player_of
from rl.verification.rewards import check_terms, describe, number

Row = Mapping[str, Any]


class Ask(NamedTuple):
    """An observation as tokens, of an environment that keeps the policy's tokens by itself.

    The action that follows is a `Rollout` of the tokens drawn, in place of a text.
    """

    tokens: np.ndarray  # int32, all of the episode so far as the policy has seen and drawn it, then what is new
    max_new_tokens: int | None = None  # limit of the action; None: the environment's
    strings: tuple[str, ...] = ()  # texts that end the action
    messages: tuple[Mapping[str, Any], ...] = ()  # new messages, as role and content, for those who read the episode


class Step(NamedTuple):
    """Answer of an environment to an action. A plain tuple of the three will do."""

    observation: Any = ""  # text that the policy sees next, or an `Ask`; "" for nothing. It is not learned from.
    reward: float = 0.0  # a finite number, for this action
    done: bool = False  # the episode is over
    answer: str | None = None  # text that the verifier judges, at the end and with `verify`; None: the action


class Consult(NamedTuple):
    """Answer of `reset`, `step` or `hear` by which another policy speaks next; `hear` is called with its text.

    Nobody learns from what it draws. The policy sees of it what the environment shows.
    """

    policy: str | None  # one of the config's `consults`; None: the policy of the episode itself
    prompt: str  # question that it answers
    max_new_tokens: int | None = None  # limit of its answer; None: the engine's
    strings: tuple[str, ...] = ()  # texts that end its answer
    reward: float = 0.0  # a finite number, for the action before
    # Answers, drawn side by side: `hear` gets the list of them; None: one, and its text
    samples: int | None = None


class Environment(Configurable, abc.ABC):
    """One episode. Rewards of its steps add up; with `verify` the verifier's score of the last action is added."""

    class Config(ConfigBase["Environment"]):
        max_turns: int = 8  # actions; an episode that is not done by then is truncated
        # Tokens of an action; None: the rest of the rollout's `max_new_tokens`, which turns and observations share.
        max_turn_tokens: int | None = None
        deadline_s: float = 10.0  # seconds that each call of `reset`, `step` and `close` may take
        verify: bool = False  # the last action is the answer that the verifier judges
        # The same actions on the same row always give the same observations and rewards, and change nothing outside.
        # Then a lost episode can be played again; of others, a repetition is tagged "rerun".
        pure: bool = False
        # Frozen policies that the environment may let speak (`Consult`), of an experiment's `policies`: "NAME@-4", the
        # version of NAME of 4 updates before; "NAME@12", its version 12 once that is made, until then the newest;
        # "NAME@-0", the current one; "base", the model without an adapter
        consults: tuple[str, ...] = ()

        @override
        def check_fields(self) -> None:
            self.require_least(1, "max_turns", "max_turn_tokens")
            self.require("deadline_s", self.deadline_s > 0, "seconds, more than 0")
            self.consulted()
            owner = type(self).__owner__
            hears = owner is None or owner.hear is not Environment.hear
            self.require("consults", hears or not self.consults, "() without a method `hear`, which takes the answers")

        def consulted(self) -> dict[str, Player]:
            """Return the players of `consults` by their texts (ConfigError: a text names none, or one that learns)."""
            found = {text: player_of(text) for text in self.consults}
            fits = all(one is not None and not one.learns for one in found.values())
            self.require("consults", fits, "frozen policies, each as 'NAME@-4', 'NAME@12', 'NAME@-0' or 'base'")
            return {text: one for text, one in found.items() if one is not None}

        def share(self) -> Any:
            """Build what all episodes of a process share; its `close` is called at the end, if it has one."""
            return None

        def share_with(self, tokenizer: Tokenizer) -> Any:
            """Build the same where it needs the policy's tokenizer; `share` by default."""
            return self.share()

        def prepare(self, problem: Problem) -> Problem:
            """Return the problem as the policy is asked it, such as with a description of tools."""
            return problem

        def is_pure(self) -> bool:
            """Return `pure`, or what follows from the parts."""
            return self.pure

        def reader(self, shared: Any, tell: Callable[[Callable[[Any], Any]], Any], row: Row) -> ActionReader | None:
            """Return a reader of the next action, as it is drawn; None: it is read when it is whole.

            Args:
                shared: what `share_with` has built.
                tell: queues a call with the environment, in the thread of its episode.
                row: what `reset` gets.
            """
            return None

        def role(self) -> str:
            """Return the role of observations in a chat template."""
            return "user"

        def stop_strings(self) -> tuple[str, ...]:
            """Return texts that end an action, beside the tokenizer's stop tokens."""
            return ()

    def __init__(self, cfg: Config, *, shared: Any = None):
        """Store the config; `shared` is what `Config.share` has built."""
        self.cfg, self.shared = cfg, shared
        self.asked = 0.0  # time on the monotonic clock at which the call in hand was asked for

    @abc.abstractmethod
    def reset(self, row: Row) -> str | Awaitable[str]:
        """Begin; returns what the policy sees after the question, often nothing ("")."""

    @abc.abstractmethod
    def step(self, action: str) -> Any:
        """Carry out an action; returns (observation, reward, done), or an awaitable of them."""

    def hear(self, answer: Any) -> Any:
        """Go on from the answer, or answers, to a `Consult`, as `step`; before the first action it pays nothing."""
        raise NotImplementedError

    def refuse(self, action: str, why: str) -> Any:
        """Carry out an action that its reader has ended, as it can only fail; returns what `step` would."""
        return self.step(action)

    def close(self) -> Any:
        """Free what the episode holds; called once, however it ends."""

    def figures(self) -> Mapping[str, float]:
        """Return named numbers of the episode for the metrics: `episode/NAME` is their mean."""
        return {}

    def calls_made(self) -> Sequence[tuple[str, float, float]]:
        """Return name, beginning and end of what the episode called, on the monotonic clock, for its timeline."""
        return ()


def row_of(problem: Problem, seed: int) -> Row:
    """Return what `reset` gets: the problem's record, its question and answer, its id, and a seed of the problem's."""
    own = {"problem_id": problem.id, "family": problem.family, "seed": seed}
    return {"question": problem.question, "answer": problem.answer, **problem.entry, **own}


def checked_observation(value: Any, what: str = "observation") -> Any:
    """Return an observation; None is none (TypeError: it is neither text nor tokens)."""
    if value is None or isinstance(value, Ask):
        return value or ""
    if not isinstance(value, str):
        raise TypeError(f"{what} {describe(value)}; expected text")
    return value


def checked_step(value: Any) -> Step:
    """Return what `step` returned (TypeError: not (text, finite number, boolean), nor a `Step` of such)."""
    answer = value.answer if isinstance(value, Step) else None
    parts = value[:3] if isinstance(value, Step) else value
    if not isinstance(parts, tuple) or len(parts) != 3:
        raise TypeError(f"step returned {describe(value)}; expected (observation, reward, done)")
    observation, reward, done = parts
    if answer is not None and not isinstance(answer, str):
        raise TypeError(f"answer {describe(answer)} of a step; expected text, or None")
    return Step(checked_observation(observation), number(reward, "step"), bool(done), answer)


def checked_consult(value: Consult, allowed: Sequence[str]) -> Consult:
    """Return a `Consult` (TypeError: a policy that the config does not allow, or values of other types)."""
    if value.policy is not None and value.policy not in allowed:
        known = ", ".join(map(repr, allowed)) or "none"
        raise TypeError(f"the environment consulted {value.policy!r}; its `consults` are: {known}")
    if not isinstance(value.prompt, str):
        raise TypeError(f"prompt {describe(value.prompt)} of a Consult; expected text")
    return value._replace(reward=number(value.reward, "Consult"))


def checked_figures(value: Mapping[Any, Any]) -> tuple[tuple[str, float], ...]:
    """Return figures by name (TypeError: a name is no text, a value no finite number, or there are too many)."""
    return tuple(sorted(check_terms(value).items()))
