"""A game of two roles for tests, which policies of random weights can play, and experiments that play it."""

from typing import Any, override

from axlearn_like.checkpoint.checkpointer import Checkpointer
from rl.environments.environment import Row
from rl.environments.roles import NextRole, RoleEnvironment
from rl.environments.scoring import NoScorer
from rl.environments.task import EnvironmentTask
from rl.experiment import RLExperiment
from rl.verification.inline import InlineVerifier
from tests.rl.runtime.policies.tiny_policies import tiny_policies, tiny_wholes
from tests.rl.tiny import tiny_tasks

TURNS, TURN_TOKENS = 4, 3


def points(action: str) -> float:
    """Return the share of ASCII in an action."""
    return sum(character.isascii() for character in action) / max(1, len(action))


def first_role(row: Row) -> str:
    """Return who begins."""
    return ("east", "west")[row["seed"] % 2]


class Duel(RoleEnvironment):
    """Two act in turn; what one is paid for its ASCII the other pays."""

    class Config(RoleEnvironment.Config):
        players: dict[str, str] = {"east": "a", "west": "b"}
        max_turns: int = 8
        max_turn_tokens: int | None = TURN_TOKENS
        pure: bool = True
        fails_at: int = 0  # action at which it raises; 0: none

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._turn, self._fails_at, self._role = 0, cfg.fails_at, ""

    @override
    def reset(self, row: Row) -> NextRole:
        self._role = first_role(row)
        return NextRole(self._role)

    @override
    def step(self, action: str) -> NextRole:
        self._turn += 1
        if self._turn == self._fails_at:
            raise KeyError("lost")
        mover, other = self._role, "west" if self._role == "east" else "east"
        self._role = other
        paid = {mover: points(action), other: -points(action)}
        return NextRole(other, f"<{len(action)}>", paid, done=self._turn == TURNS)


def duel(
    policies: dict[str, dict[str, Any]] | None = None, game: Duel.Config | None = None, *, whole: bool = False
) -> RLExperiment.Config:
    """Return the tiny experiment with two policies, adapters or whole models, that play against each other."""
    tasks: Any = tiny_tasks()
    families = tuple(EnvironmentTask.Config(source=one, environment=game or Duel.Config()) for one in tasks.families)
    cfg = (tiny_wholes if whole else tiny_policies)(
        {"a": {}, "b": {"learner.schedule.lr": 3e-3}} if policies is None else policies,
        tasks=tasks.set(families=families),
        max_new_tokens=24,
        num_steps=3,
        evaluation=None,
        verifier=InlineVerifier.Config(scorer=NoScorer.Config()),
    )
    cfg.trainer.checkpoint = Checkpointer.Config(save_every=1, keep=4)
    cfg.parameter_server.keep = 8
    cfg.trainer.logprob_diff_every = 10
    cfg.engine.set(max_num_seqs=32, steps_per_dispatch=TURN_TOKENS)
    return cfg
