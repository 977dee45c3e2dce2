"""The plan: which prompts each step draws, made ahead of time, and which of its groups the update gets.

Step s draws training problems [s * groups, (s + 1) * groups) of the mixture, whatever has happened before. With a
prompt pool it draws what the pool has chosen by the results of earlier steps (`PromptPool`). With `oversample` it draws
further groups, within limits, for those whose rewards are all equal: they have no gradient (dynamic sampling; DAPO,
arXiv 2503.14476, 3.2); steps are then so many problems apart.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from axlearn_like.tokenizers.protocol import Tokenizer
from rl.controller.config import ControllerConfig
from rl.controller.prefetch import Prefetch
from rl.controller.prompt_pool import PromptPool
from rl.protocol.messages import Group, Prompt
from rl.tasks.mixture import TaskMixture
from rl.tasks.prompts import PromptMaker
from rl.tasks.skipped import SkippedProblems

__all__ = ["EVALUATION", "Key", "Plan"]

Key = tuple[int, int, int]  # step, work item, and with a prompt pool how often the trainer has begun
EVALUATION: Key = (-1, -1, 0)  # key of the evaluations' problems
_AHEAD = 2  # steps beyond those that can be leased, whose prompts are made


class Plan:
    """Prompts by step and work item. Its methods are called under the controller's lock, `made` and `prompts` aside."""

    def __init__(
        self,
        cfg: ControllerConfig[Any],
        tokenizer: Tokenizer,
        skipped: SkippedProblems | None,
        prepare: Callable[[PromptMaker], None] | None,
    ):
        """Build the tasks; `skipped`: record of problems left out; `prepare`: makes the problems of evaluations."""
        self._cfg, self._prepare = cfg, prepare
        self.maker = cfg.prompt_maker(tokenizer, skipped)
        self._tasks: TaskMixture = cfg.tasks.build()
        self._tasks.admission = self.maker
        each: dict[str, Any] = {"groups": cfg.most_groups, "staleness": cfg.staleness}
        self._pool: PromptPool | None = None if cfg.pool is None else cfg.pool.build(tasks=self._tasks, **each)
        self._begins = 0  # number of plans; with a pool, tells their prompts apart
        self.made: Prefetch[Key, tuple[Prompt, ...]] = Prefetch(self._make)  # prompts by key

    def begin(self, step: int, pool: Mapping[str, Any] | None) -> None:
        """Start with this step; `pool`: the state of the prompt pool."""
        if self._pool is not None:
            self._pool, self._begins = self._pool.start(step, pool), self._begins + 1

    def look_ahead(self, first: int, stop: int, evaluates: bool) -> None:
        """Make the prompts of these steps and the next ones, and the problems of evaluations; forget all others."""
        last, begins = min(self._cfg.num_steps, stop + _AHEAD), self._begins
        if (pool := self._pool) is not None:
            last = next((step for step in range(first, last) if not pool.planned(step)), last)
        self.made.keep(lambda key: key == EVALUATION or (first <= key[0] and key[2] == begins))
        items = range(self._cfg.prompts_per_step // self._cfg.groups_per_lease)
        wanted = [self.key(step, item) for step in range(first, last) for item in items]
        self.made.want([EVALUATION] * evaluates + wanted)

    def key(self, step: int, item: int) -> Key:
        """Return the key of the prompts of a work item."""
        return step, item, self._begins

    def prompts(self, step: int, item: int) -> tuple[Prompt, ...]:
        """Return the prompts of one work item of one step."""
        return self.made.get(self.key(step, item)) or ()

    def _make(self, key: Key) -> tuple[Prompt, ...]:
        """Make what has this key; called by one thread, without the controller's lock."""
        if key == EVALUATION:
            if self._prepare is not None:
                self._prepare(self.maker)
            return ()
        step, item, begins = key
        places, pool = range(item * self._cfg.groups_per_lease, (item + 1) * self._cfg.groups_per_lease), self._pool
        if pool is None:
            first = step * self._cfg.most_groups
            return tuple(self.maker.prompt(self._tasks.train(first + place)) for place in places)
        if begins != self._begins or not pool.planned(step):
            return ()  # step of an earlier plan
        drawn = [pool.problem(step, place) for place in places]
        same = pool.cfg.same_noise
        return tuple(dataclasses.replace(self.maker.prompt(one), draw=0 if same else draw) for one, draw in drawn)

    @property
    def depends_on_results(self) -> bool:
        """True if what is drawn depends on rewards."""
        return self._pool is not None or self._cfg.most_groups > self._cfg.prompts_per_step

    def replacements(self, drawn: Sequence[Group]) -> int:
        """Return how many further work items a step needs, of which all that was asked for so far is there.

        All of it, whatever came first: so the same is drawn after any failure.
        """
        lacking = self._cfg.prompts_per_step - sum(not has_no_gradient(group) for group in drawn)
        wanted = min(lacking, self._cfg.most_groups - len(drawn))
        return -(-max(0, wanted) // self._cfg.groups_per_lease)

    def batch(self, drawn: list[Group]) -> list[Group]:
        """Return the groups of an update, in the order of the plan: those without a gradient only to fill it up."""
        if len(drawn) == self._cfg.prompts_per_step:
            return drawn
        by_use = sorted(range(len(drawn)), key=lambda place: (has_no_gradient(drawn[place]), place))
        return [drawn[place] for place in sorted(by_use[: self._cfg.prompts_per_step])]

    def after(self, drawn: Sequence[Group]) -> dict[str, Any]:
        """Return the state of the "pool" once these groups, the next step's, are consumed, and "figures"."""
        figures, state = {"replaced_groups": float(len(drawn) - self._cfg.prompts_per_step)}, {}
        if self._cfg.most_groups > self._cfg.prompts_per_step:
            figures |= drawn_figures(drawn)
        if self._pool is not None:
            pool = self._pool.after(drawn)
            figures, state = {**figures, **pool.figures()}, {"pool": pool.state()}
        return {**state, "figures": figures}

    def consume(self, drawn: Sequence[Group]) -> None:
        """Take in the results of the next step."""
        if self._pool is not None:
            self._pool = self._pool.after(drawn)


def has_no_gradient(group: Group) -> bool:
    """Return True if the scored answers of a group have all the same reward."""
    return len({score.reward for score in group.scores if score.status == "ok"}) < 2


def drawn_figures(drawn: Sequence[Group]) -> dict[str, float]:
    """Return figures of all groups that a step has drawn, of which its update gets those with a gradient.

    Returns:
        `reward_drawn`, the mean reward, which is the policy's own: that of the update's groups is not, as they are
        chosen by their rewards. `tokens_drawn`: sampled.
    """
    rewards = [reward for group in drawn for reward in group.drawn_rewards()]
    tokens = sum(int(rollout.drawn.sum()) for group in drawn for rollout in group.rollouts)
    return {**({"reward_drawn": fmean(rewards)} if rewards else {}), "tokens_drawn": float(tokens)}
