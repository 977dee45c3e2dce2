"""Episodes as examples for supervised fine-tuning: given actions, played in the environment that RL will use."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, override

import numpy as np

from axlearn_like.config import REQUIRED
from axlearn_like.tokenizers.chat import end_of_answer
from axlearn_like.tokenizers.inside import encode_inside
from mesh.errors import UserError
from rl.environments.environment import Environment, checked_observation, checked_step, row_of
from rl.environments.turns import Turns
from rl.protocol.messages import Problem
from rl.tasks.encoding import encode_problem, encode_solution
from rl.tasks.supervised import ProblemExamples


class Mistake(str):
    """An action that is played for what it leads to, and not learned."""


class Demonstrations(ProblemExamples):
    """Prompts with the actions of a demonstrator and the observations that these lead to.

    The tokens are those of a rollout with these actions, and the loss is on the actions alone, `Mistake`s left out, so
    that supervised fine-tuning and RL see the same form.
    """

    class Config(ProblemExamples.Config):
        # Function that gives the actions of a problem's episode; a pure one.
        actions: Callable[[Problem], Sequence[str]] = REQUIRED

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._actions = cfg.actions
        self._shared: dict[str, Any] = {}

    @override
    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return {"tokens": int32, "loss_mask": bool}."""
        problem = self.problem(index)
        prompt = encode_problem(problem, self.tokenizer)
        pieces = [(prompt, False), *asyncio.run(self._episode(problem, prompt.tolist()))]
        tokens = np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in pieces])
        mask = np.concatenate([np.full(len(tokens), learned) for tokens, learned in pieces])
        return {"tokens": tokens, "loss_mask": mask}

    async def _episode(self, problem: Problem, prompt: Sequence[int]) -> Sequence[tuple[Sequence[int], bool]]:
        """Return the tokens of the turns behind a prompt, and which of them are the policy's."""
        cfg = self.mixture.environment(problem.id)
        if problem.asked_by_environment:
            raise UserError(f"problem {problem.id} is asked by an agent, whose answers cannot be given beforehand")
        actions = self._actions(problem)
        if not isinstance(cfg, Environment.Config):
            (action,) = actions
            return [(encode_solution(problem, action, self.tokenizer)[1].tolist(), True)]
        if problem.family not in self._shared:
            self._shared[problem.family] = cfg.share()
        environment: Environment = cfg.build(shared=self._shared[problem.family])
        turns = Turns(self.tokenizer, problem, cfg.role())
        try:
            row = row_of(problem, problem.id)
            pieces = [(turns.observation(checked_observation(await _awaited(environment.reset(row)))), False)]
            for number, action in enumerate(actions, start=1):
                tokens = self._tokens(action, cfg.stop_strings(), pieces[-1][0] or prompt)
                step = checked_step(await _awaited(environment.step(turns.action(tokens))))
                pieces.append((tokens, not isinstance(action, Mistake)))
                if step.done != (number == len(actions)):
                    when = "before" if step.done else "not with"
                    raise UserError(f"problem {problem.id}: the episode is over {when} its last action, {actions}")
                if not step.done:
                    pieces.append((turns.observation(step.observation), False))
        finally:
            await _awaited(environment.close())
        return pieces

    def _tokens(self, action: str, stop_strings: Sequence[str], behind: Sequence[int]) -> list[int]:
        """Return the tokens of an action behind these, with the one that ends it unless a stop string does."""
        ended = any(action.endswith(string) for string in stop_strings)
        return [*encode_inside(self.tokenizer, action, behind), *([] if ended else [end_of_answer(self.tokenizer)])]


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
