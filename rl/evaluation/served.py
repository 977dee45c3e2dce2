"""A policy behind an endpoint that speaks OpenAI's chat completions: its answers, and its episodes in environments."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, override

import numpy as np

from axlearn_like.config import REQUIRED, ConfigBase, Configurable
from axlearn_like.input.shuffle import derived_seed
from axlearn_like.run.progress import Progress
from mesh.errors import UserError
from mesh.programs.interruptible import map_in_threads
from rl.environments.environment import Consult, Environment, checked_consult, checked_observation, checked_step, row_of
from rl.environments.roles import check_alone
from rl.environments.scoring import score_rollouts
from rl.environments.thread import EnvironmentThread
from rl.evaluation.samples import Row, Samples, record_of
from rl.evaluation.standalone import answer_rows, evaluate
from rl.protocol.messages import Episode, EpisodeEnd, FinishReason, Problem, Rollout, Turn
from rl.protocol.protocols import ScoreSource
from rl.rollout.agent_loops.episodes import episode_seed
from rl.tasks.encoding import messages_of
from rl.tasks.mixture import TaskMixture
from rl.tasks.skipped import SkippedProblems
from rl.verification.endpoint import URL_FORM, EndpointClient, is_endpoint, reached
from rl.verification.service import Verifier

Messages = list[dict[str, Any]]
_REASONS: dict[EpisodeEnd, FinishReason] = {"done": "stop", "truncated": "length", "error": "stop"}
_TOO_LONG = "context_length_exceeded"  # code of OpenAI's for a chat that has no room
_TOKENS: dict[str, Any] = dict.fromkeys(("tokens", "logprobs", "versions", "action_mask"), np.zeros(0, np.int32))
_TOKENIZER: Any = None  # episodes have texts, and no tokens to read


class ServedPolicy(Configurable):
    """A policy at an endpoint: an answer is the next message of a chat, an episode a chat with the environment."""

    class Config(ConfigBase["ServedPolicy"]):
        url: str = REQUIRED  # address, such as http://127.0.0.1:8000/v1
        model: str = REQUIRED  # name of the model there
        key_variable: str | None = None  # environment variable that holds the key
        max_new_tokens: int = 512  # limit of an answer's tokens, or of an action's
        temperature: float = 1.0
        at_once: int = 8  # chats side by side
        timeout_s: float = 120.0  # seconds of an attempt
        attempts: int = 3

        @override
        def reaches(self) -> tuple[str, ...]:
            return (reached(str(self.url), self.key_variable),)

        @override
        def check_fields(self) -> None:
            self.require_least(1, "max_new_tokens", "at_once", "attempts")
            self.require_least(0, "temperature")
            self.require("url", is_endpoint(self.url), URL_FORM)

    def __init__(self, cfg: Config, *, tasks: TaskMixture, verifier: ScoreSource):
        self._cfg, self._tasks, self._verifier = cfg, tasks, verifier
        patience: dict[str, Any] = {"timeout_s": cfg.timeout_s, "attempts": cfg.attempts, "pause_s": 0.5}
        self._endpoint = EndpointClient("axl eval", cfg.url, cfg.key_variable, **patience)
        self._shared: dict[str, Any] = {}
        self.at_once, self.skipped = cfg.at_once, SkippedProblems()

    def answers(self, problems: Sequence[Problem], count: int, seed: int) -> Iterator[Row]:
        """Answer problems `count` times each, with draws of `seed`, and yield a row each (UserError: no answer)."""
        for problem in problems:
            environment = self._tasks.environment(problem.id)
            if isinstance(environment, Environment.Config) and problem.family not in self._shared:
                self._shared[problem.family] = environment.share()
        asked = [(problem, sample, seed) for problem in problems for sample in range(count)]
        played = map_in_threads(lambda one: self._played(*one), asked, self._cfg.at_once)
        rollouts = [
            Rollout(problem.id, sample, **_TOKENS, finish_reason=_REASONS[episode.ended], episode=episode)
            for (problem, sample, _), (episode, _) in zip(asked, played, strict=True)
        ]
        answers, scores = score_rollouts(self._verifier, rollouts, _TOKENIZER)
        shown = [{"messages": messages, "ended": episode.ended} for episode, messages in played]
        yield from answer_rows(problems, rollouts, answers, scores, shown)

    def _played(self, problem: Problem, sample: int, seed: int) -> tuple[Episode, Messages]:
        """Return the episode of a sample, and its messages; without an environment it has the answer alone."""
        talk = _Talk(self._endpoint, self._cfg, messages_of(problem), derived_seed("served", seed, problem.id, sample))
        environment = self._tasks.environment(problem.id)
        if not isinstance(environment, Environment.Config):
            return Episode(answer=talk.say(self._cfg.max_new_tokens)), talk.messages
        turns: list[Turn] = []
        make: Callable[[], Environment] = lambda: environment.build(shared=self._shared[problem.family])  # noqa: E731
        thread = EnvironmentThread(make, environment.deadline_s, f"served-{problem.id}-{sample}")

        def call(act: Callable[[Environment], Any]) -> Any:
            return thread.call(act).result(environment.deadline_s)

        try:
            seen = call(lambda one: one.reset(row_of(problem, episode_seed(seed, problem.id))))
            while len(turns) < environment.max_turns:
                talk.hear(environment.role(), checked_observation(seen))
                action = talk.say(environment.max_turn_tokens or self._cfg.max_new_tokens, environment.stop_strings())
                step = call(lambda one, said=action: one.step(said))
                while isinstance(step, Consult):
                    told = talk.aside(checked_consult(step, ()))
                    step = call(lambda one, said=told: one.hear(said))
                step = checked_step(step)
                turns.append(Turn(0, step.reward))
                if step.done:
                    answer = action if step.answer is None else step.answer
                    return Episode(tuple(turns), answer if environment.verify else None), talk.messages
                seen = step.observation
            return Episode(tuple(turns), ended="truncated"), talk.messages
        except UserError as error:
            if _TOO_LONG not in str(error) or not turns:
                raise
            return Episode(tuple(turns), ended="truncated"), talk.messages
        except Exception as error:  # whatever an environment does wrong ends its episode
            return Episode(tuple(turns), ended="error", error=f"{type(error).__name__}: {error}"[:500]), talk.messages
        finally:
            thread.close()


def evaluate_served(
    cfg: ServedPolicy.Config,
    tasks_cfg: TaskMixture.Config,
    verifier: Verifier.Config,
    folder: Path,
    *,
    most: int | None,
    default: int,
    **drawn: Any,
) -> dict[str, Any]:
    """Evaluate the policy at an endpoint in a folder, or go on with it; returns the figures.

    Args:
        most: problems of each task; None: all of a table, `default` of an endless one.
        drawn: `count`, `ks` and `seed` of `evaluate`.

    Raises:
        UserError: no model is named, or the endpoint refuses.
    """
    if not isinstance(cfg.model, str):
        raise UserError(f"{cfg.url}: which model? expected --set model=NAME, as {cfg.url}/models names it")
    cfg.check()
    check_alone(tasks_cfg)
    tasks = tasks_cfg.build()
    problems = tasks.for_evaluation(most, default)
    record = {"policy": f"{cfg.model} at {cfg.url}", "max_new_tokens": cfg.max_new_tokens}
    record |= {"temperature": cfg.temperature, **record_of(tasks_cfg, tasks, verifier)}
    record |= {"problems": len(problems), "samples": drawn["count"], "seed": drawn["seed"]}
    opened = Samples(folder, record)
    with Progress(len(problems), title="problems") as shown, verifier.build() as scoring:
        served = cfg.build(tasks=tasks, verifier=scoring)
        return evaluate(opened, problems, tasks, served, **drawn, progress=shown.update)


class _Talk:
    """A chat with the endpoint."""

    def __init__(self, endpoint: EndpointClient, cfg: ServedPolicy.Config, messages: Sequence[Any], seed: int):
        self.messages: Messages = [dict(message) for message in messages]
        self._endpoint, self._cfg, self._seed, self._draws = endpoint, cfg, seed, 0

    def hear(self, role: str, text: Any) -> None:
        """Append an observation: to the message before, if that is of the same role."""
        if not isinstance(text, str):
            raise UserError("an endpoint takes texts; expected an environment whose observations are no tokens")
        if text and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += text
        elif text:
            self.messages.append({"role": role, "content": text})

    def say(self, most: int, strings: Sequence[str] = ()) -> str:
        """Return the policy's next message of at most so many tokens, and append it."""
        text = self._drawn(self.messages, most, strings)
        self.messages.append({"role": "assistant", "content": text})
        return text

    def aside(self, consult: Consult) -> Any:
        """Return what the policy answers to a question of the environment's, outside of the chat."""
        asked, most = [{"role": "user", "content": consult.prompt}], consult.max_new_tokens or self._cfg.max_new_tokens
        drawn = [self._drawn(asked, most, consult.strings) for _ in range(consult.samples or 1)]
        return drawn[0] if consult.samples is None else drawn

    def _drawn(self, messages: Messages, most: int, strings: Sequence[str]) -> str:
        body = {"model": self._cfg.model, "messages": messages, "max_tokens": most, "n": 1}
        body |= {"temperature": self._cfg.temperature, "seed": derived_seed("draw", self._seed, self._draws) % 2**31}
        self._draws += 1
        if strings:
            body["stop"] = list(strings)
        read: Callable[[Any], str] = lambda reply: str(reply["choices"][0]["message"]["content"] or "")  # noqa: E731
        try:
            return self._endpoint.post("chat/completions", body, read)
        except RuntimeError as error:
            raise UserError(str(error)) from error
