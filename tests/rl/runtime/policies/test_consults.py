"""One policy learns among frozen ones that its environment lets speak: their tokens are given, and nobody's loss."""

import dataclasses
from pathlib import Path
from typing import Any, override

import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.tokenizers.protocol import answer_text
from mesh import UserError
from rl.environments.environment import Consult, Environment
from rl.environments.roles import check_alone
from rl.experiment import RLExperiment
from rl.parameter_server.client import ParameterServerClient
from rl.protocol.messages import Episode, Group, Lease, Prompt, Rollout, Score, Turn
from rl.rollout.agent_loops.commands import child_sample
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from rl.rollout.sampling import Sampler
from rl.runtime.policies.adapters import adapter_limits, adapter_source
from rl.runtime.policies.configs import check_policies
from rl.tasks.encoding import encode_prompt
from tests.rl.runtime.policies.role_games import Duel, duel, points
from tests.rl.runtime.policies.test_roles import by_hand, run
from tests.rl.runtime.ray.experiments import metrics, parameters
from tests.rl.tiny import tiny_experiment

TURNS, TOKENS = 2, 3


class Talk(Environment):
    """The policy and another one speak in turn; what the policy is paid for its ASCII, and for the other's."""

    class Config(Environment.Config):
        other: str = "base"
        weight: float = 1.0  # pay for the other's points: 1 where both win together, -1 where one does
        max_turn_tokens: int | None = TOKENS
        pure: bool = True

    def __init__(self, cfg: Config, *, shared: Any = None):
        super().__init__(cfg, shared=shared)
        self._other, self._weight, self._turn = cfg.other, cfg.weight, 0

    @override
    def reset(self, row: Any) -> str:
        return ""

    @override
    def step(self, action: str) -> Consult:
        self._turn += 1
        return Consult(self._other, f"{self._turn}?", TOKENS, reward=points(action))

    @override
    def hear(self, answer: str) -> tuple[str, float, bool]:
        return f"<{answer}>", self._weight * points(answer), self._turn == TURNS


def talk(other: str, weight: float = 1.0, policies: dict[str, dict[str, Any]] | None = None, **changes: Any) -> Any:
    cfg = duel({"a": {}} if policies is None else policies)
    game, tasks = Talk.Config(other=other, weight=weight, consults=(other,)), _tasks(cfg)
    for family in tasks.families:
        family.environment = game
    return cfg.set(max_new_tokens=40, **changes)


def _tasks(cfg: RLExperiment.Config) -> Any:
    return cfg.tasks


class ByHand:
    """The episodes of a lease, drawn turn by turn with plain requests: no agent loop, no spawning, no environment."""

    def __init__(self, experiment: RLExperiment, weights: dict[str, ParameterServerClient], base: Any):
        self._cfg, self._experiment = experiment.cfg, experiment
        self._source = adapter_source(experiment.cfg.policy, weights["a"])
        limits = adapter_limits(experiment.cfg.policy, 4)
        self.engine: RolloutEngine = experiment.make_engine(adapters=limits, model=plain_config(experiment.cfg.policy))
        self.engine.set_weights(base(self.engine), 0, rewind=True)
        self._game = _tasks(experiment.cfg).families[0].environment

    def groups(self, lease: Lease) -> tuple[Group, ...]:
        for loaded in self.engine.adapters:
            self.engine.unload_adapter(loaded)
        (other,) = [seat for seat in lease.seats if not seat.learns]
        for version in {lease.version, other.version} if other.policy else {lease.version}:
            self.engine.load_adapter(f"a{version}", self._source.take(version)[0], version)
        name = f"a{other.version}" if other.policy else None
        return tuple(self._group(lease, prompt, name) for prompt in lease.prompts)

    def _group(self, lease: Lease, prompt: Prompt, other: str | None) -> Group:
        tokenizer, found, scores = self._experiment.tokenizer, [], []
        for sample in range(lease.samples):
            whole, turns = _empty(prompt, sample), list[Turn]()
            for turn in range(TURNS):
                before = len(whole.tokens)
                whole = self._draw(prompt, whole, f"a{lease.version}", before + TOKENS)
                paid = points(answer_text(tokenizer, whole.tokens[before:].tolist()))
                turns.append(Turn(len(whole.tokens), paid))
                asked = dataclasses.replace(prompt, tokens=encode_prompt(f"{turn + 1}?", tokenizer))
                child = self._draw(asked, _empty(asked, child_sample(sample, turn)), other, TOKENS)
                answer = answer_text(tokenizer, child.tokens.tolist())
                turns[-1] = dataclasses.replace(turns[-1], reward=paid + self._game.weight * points(answer))
                if turn < TURNS - 1:
                    whole = _given(whole, tokenizer.encode(f"<{answer}>"), lease.version)
            found.append(dataclasses.replace(whole, episode=Episode(tuple(turns)), finish_reason="stop"))
            scores.append(Score(sum(turn.reward for turn in turns)))
        return Group(prompt, tuple(found), tuple(scores))

    def _draw(self, prompt: Prompt, rollout: Rollout, adapter: str | None, most: int) -> Rollout:
        stop = StopConditions(tokens=self._experiment.engine_cfg.stop_tokens, max_new_tokens=most)
        asked = Request(prompt, 1, self._cfg.seed, stop=stop, adapter=adapter, partial=(rollout,))
        return self.engine.generate([asked])[0]


def _empty(prompt: Prompt, sample: int) -> Rollout:
    ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Rollout(prompt.id, sample, ids, numbers, ids, np.zeros(0, bool), "abort")


def _given(rollout: Rollout, tokens: Any, version: int) -> Rollout:
    size = len(tokens)
    added = (np.asarray(tokens, np.int32), np.zeros(size, np.float32), np.full(size, version), np.zeros(size, bool))
    names = ("tokens", "logprobs", "versions", "action_mask")
    whole = {
        name: np.concatenate([own := getattr(rollout, name), more]).astype(own.dtype)
        for name, more in zip(names, added, strict=True)
    }
    return dataclasses.replace(rollout, finish_reason="abort", **whole)


@pytest.mark.full
@pytest.mark.parametrize("other", ["a@-1", "a@1", "base"])
def test_a_run_is_that_of_episodes_drawn_by_hand(other: str, tmp_path: Path) -> None:
    cfg = talk(other)
    assert run(tmp_path / "run", cfg) is not None
    by_hand(tmp_path / "hand", cfg, ByHand)
    found, expected = (parameters(tmp_path / folder / "policies" / "a") for folder in ("run", "hand"))
    assert found == expected


@pytest.mark.full
@pytest.mark.parametrize(("other", "weight"), [("a@0", -1.0), ("base", 1.0)])
def test_the_side_that_learns_improves_against_and_with_a_frozen_one(other: str, weight: float, tmp_path: Path) -> None:
    sharp = Sampler.Config(temperature=0.05)  # the frozen head of random weights is all but flat
    cfg = talk(other, weight, {"a": {"learner.schedule.lr": 0.03}}, num_steps=32, sampler=sharp)
    cfg.trainer.checkpoint.save_every = 16
    assert run(tmp_path, cfg) is not None
    rewards = [row["reward"] for row in metrics(tmp_path / "policies" / "a")]
    first, last = np.mean(rewards[:8]), np.mean(rewards[-8:])
    assert last - first > 0.3, [round(reward, 2) for reward in rewards]


REFUSED: list[tuple[RLExperiment.Config, str]] = [
    (talk("base", policies={}), r"consults: expected \(\) without `policies` of the experiment"),
    (talk("b@-1"), r"policies\['a'\].tasks: role 'b@-1': there is no policy 'b'"),
    (talk("a@-1", policies={"a": {"controller.weights": "newest"}}), "controller.weights: expected 'pinned'"),
    (talk("a@-6"), "parameter_server.keep: expected 9 or more"),
    (duel({"a": {}, "b": {}}, Duel.Config(consults=("base",))), r"consults: expected \(\) in a game of roles"),
]


@pytest.mark.parametrize(("cfg", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_policies_that_cannot_be_consulted_are_refused(cfg: RLExperiment.Config, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_policies(cfg, "inprocess")


def test_whole_models_and_single_policies_cannot_consult() -> None:
    whole = tiny_experiment(policies={"a": {}})
    with pytest.raises(ConfigError, match="expected no `consults`, which whole models have none of"):
        check_policies(whole.set(tasks=talk("a@-1").tasks), "inprocess")
    with pytest.raises(ConfigError, match=r"consults: expected \(\) where a policy answers alone"):
        check_alone(talk("base").tasks)
    with pytest.raises(ConfigError, match="players: expected no roles where a policy answers alone"):
        check_alone(duel().tasks)
