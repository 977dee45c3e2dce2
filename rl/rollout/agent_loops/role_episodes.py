"""Episodes of several roles as agent loops: each role is a completion of its own, which waits until it is its turn.

A role's completion has the problem, what the role was shown, and its own actions: the others' tokens are in it as far
as the environment shows them, as given tokens. Its draws depend on the role's request alone, so an episode that is
played again, by whichever worker and for whichever role, has the same bits.
"""

import dataclasses
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import Any

from axlearn_like.tokenizers.chat import end_of_answer
from axlearn_like.tokenizers.protocol import Tokenizer
from rl.environments.environment import Environment, Row, checked_figures
from rl.environments.roles import NextRole, RoleEnvironment, checked_next
from rl.environments.thread import Call, EnvironmentThread
from rl.environments.turns import Turns
from rl.protocol.messages import Episode, EpisodeEnd, FinishReason, Problem, Turn
from rl.rollout.agent_loops.commands import AgentLoop, Command, Completion, Generate, Observe, Wait
from rl.rollout.agent_loops.episode_loop import GRACE_S

Commands = Generator[Command, Any, FinishReason | None]


class RolePlay:
    """The episodes of a problem's samples. `episodes` has the record of each role and sample once that is over."""

    def __init__(
        self,
        cfg: RoleEnvironment.Config,
        make: Callable[[], Environment],
        tokenizer: Tokenizer,
        problem: Problem,
        row: Row,
        opened: Callable[[EnvironmentThread], None] = lambda thread: None,
    ):
        """Store the parts; see `EpisodeLoop`."""
        self._cfg, self._make, self._tokenizer = cfg, make, tokenizer
        self._problem, self._row, self._opened = problem, row, opened
        self._tables: dict[int, _Table] = {}  # sample -> its episode
        self.episodes: dict[str, dict[int, Episode]] = {role: {} for role in sorted(cfg.players)}

    def loop(self, role: str) -> AgentLoop:
        """Return the agent loop of a role, for the request that draws it."""

        def play(completion: Completion) -> Commands:
            if completion.sample not in self._tables:
                name = f"episode-{self._problem.id}-{completion.sample}"
                thread = EnvironmentThread(self._make, self._cfg.deadline_s, name)
                self._opened(thread)
                self._tables[completion.sample] = _Table(self._cfg, thread)
            table = self._tables[completion.sample]
            try:
                yield from self._act(table, role, completion)
            except Exception as error:
                table.end("error", error=f"{type(error).__name__}: {error}"[:500])
            except GeneratorExit:  # the request of the role has ended
                table.end("error", error=f"the request of role {role!r} has ended")
                raise
            if not len(completion.output_tokens):  # a rollout has a token at least: one that nobody drew
                yield Observe([end_of_answer(self._tokenizer)])
            self.episodes[role][completion.sample] = table.record(role, len(completion.output_tokens))
            return "length" if table.ended == "truncated" else "stop"

        return play

    def _act(self, table: "_Table", role: str, completion: Completion) -> Generator[Command, Any, None]:
        cfg, text = self._cfg, Turns(self._tokenizer, self._problem, self._cfg.role())
        if not table.begun:
            table.begun = True
            yield from table.call(lambda environment: environment.reset(self._row))
        while (seen := (yield Wait(table.turn(role)))) is not None:
            given = text.observation(seen)
            if (yield Observe(given)) != len(given):
                table.end("truncated")
                return
            first = len(completion.output_tokens)
            reason = yield Generate(cfg.max_turn_tokens, cfg.stop_strings())
            if table.ended is not None:  # failure of another role
                return
            drawn = completion.output_tokens[first:].tolist()
            if drawn:
                messages = ({"role": cfg.role(), "content": seen},) if seen else ()
                table.acted(role, first + len(drawn), messages)
            if reason == "length" and len(drawn) != cfg.max_turn_tokens:  # no room is left
                table.end("truncated")
                return
            action = text.action(drawn)
            yield from table.call(lambda environment, act=action: environment.step(act))


class _Table:
    """One episode, of which all roles know: whose turn it is, and what each is paid. Used by the engine's thread."""

    def __init__(self, cfg: RoleEnvironment.Config, thread: EnvironmentThread):
        self._cfg, self._thread, self._roles = cfg, thread, sorted(cfg.players)
        self._turns: dict[str, list[Turn]] = {role: [] for role in self._roles}
        self._owed = dict.fromkeys(self._roles, 0.0)  # paid before the first action
        self._futures: dict[str, Future[str | None]] = {role: Future() for role in self._roles}
        self._error, self._figures = "", tuple[tuple[str, float], ...]()
        self.begun = False
        self.ended: EpisodeEnd | None = None

    def turn(self, role: str) -> Future[str | None]:
        """Return what the role is shown when it is its turn; None: the episode is over."""
        return self._futures[role]

    def acted(self, role: str, end: int, messages: tuple[Mapping[str, Any], ...]) -> None:
        """Record an action, which is paid what its role was owed before its first one."""
        self._turns[role].append(Turn(end, self._owed[role], messages))
        self._owed[role] = 0.0
        self._futures[role] = Future()

    def call(self, call: Call) -> Generator[Command, Any, None]:
        """Call the environment, pay the roles, and tell the one whose turn it is."""
        move = checked_next((yield self._wait(call)), self._futures)
        self._pay(move)
        if move.done or sum(len(turns) for turns in self._turns.values()) >= self._cfg.max_turns:
            self._figures = checked_figures((yield self._wait(lambda environment: dict(environment.figures()))))
            self.end("done" if move.done else "truncated")
        elif self.ended is None:
            self._futures[move.role].set_result(move.observation)

    def end(self, how: EpisodeEnd, error: str = "") -> None:
        """End the episode for all roles, unless it is over."""
        if self.ended is not None:
            return
        self.ended, self._error = how, error
        for role, future in self._futures.items():
            if future.done():  # shown, and not acted upon
                self._futures[role] = future = Future()
            future.set_result(None)
        self._thread.close()

    def record(self, role: str, tokens: int) -> Episode:
        """Return the record of a role whose completion has so many tokens."""
        turns = self._turns[role]
        if not turns and self._owed[role]:  # paid without an action
            turns.append(Turn(tokens, self._owed[role]))
        assert self.ended is not None
        return Episode(tuple(turns), None, self.ended, self._error, self._figures)

    def _pay(self, move: NextRole) -> None:
        for role, reward in move.rewards.items():
            if turns := self._turns[role]:
                turns[-1] = dataclasses.replace(turns[-1], reward=turns[-1].reward + reward)
            else:
                self._owed[role] += reward

    def _wait(self, call: Call) -> Wait:
        return Wait(self._thread.call(call), self._cfg.deadline_s + GRACE_S)
