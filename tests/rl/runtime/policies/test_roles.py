"""Several policies in one episode: each has the update of its own tokens, whatever happens to a worker or a trainer."""

import contextlib
import dataclasses
import functools
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axlearn_like.config import ConfigError, to_text
from axlearn_like.input.shuffle import derived_seed
from axlearn_like.layers.wrappers.base import plain_config
from axlearn_like.run.directory import RunDirectory
from axlearn_like.tokenizers.protocol import answer_text
from mesh import UserError
from rl.controller.leasing import LEASES_PER_POLICY
from rl.environments.environment import row_of
from rl.experiment import RLExperiment
from rl.parameter_server.client import ParameterServerClient, connect_local
from rl.protocol.messages import Episode, Group, Lease, Prompt, Rollout, Score, Seat, Turn
from rl.protocol.players import Player, seats_of
from rl.rollout.agent_loops.episodes import episode_seed
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request, StopConditions
from rl.runtime.policies.adapters import adapter_limits, adapter_source, are_adapters
from rl.runtime.policies.configs import check_policies
from rl.runtime.policies.controllers import Controllers
from rl.runtime.policies.role_configs import resume_together
from rl.runtime.policies.roles import PolicyRoles
from rl.runtime.policies.runs import open_policy_runs
from rl.runtime.policies.trainers import PolicyTrainers
from rl.runtime.policies.worker import PoliciesWorker
from rl.runtime.run import RLRun
from tests.rl.rollout.test_worker import Called, same
from tests.rl.runtime.policies.role_games import TURN_TOKENS, TURNS, Duel, duel, first_role, points
from tests.rl.runtime.ray.experiments import assert_same_outcome, events, metrics, parameters
from tests.rl.tiny import tiny_experiment


def run(path: Path, cfg: RLExperiment.Config, **how: Any) -> dict[str, Any] | None:
    return RLRun(cfg.build(), say=lambda line: None).run(path, **{"runtime": "inprocess", "progress": False, **how})


class ByHand:
    """The episodes of a lease, played turn by turn with plain requests: no agent loop, no environment."""

    def __init__(self, experiment: RLExperiment, weights: Mapping[str, ParameterServerClient], base: Any):
        cfg = experiment.cfg
        self._experiment, self._base, self._adapters = experiment, base, are_adapters(cfg.policy)
        self._placed: dict[tuple[str, int], Any] = {}
        limits = adapter_limits(cfg.policy, len(weights) + 4) if self._adapters else None
        self.engine: RolloutEngine = experiment.make_engine(adapters=limits, model=plain_config(cfg.policy))

        def source(client: ParameterServerClient) -> Any:
            if self._adapters:
                return adapter_source(cfg.policy, client)
            return experiment.make_prefetcher(self.engine, client, "hand")

        self._sources = {name: source(client) for name, client in weights.items()}
        self._tasks = cfg.tasks.build()

    def groups(self, lease: Lease) -> tuple[Group, ...]:
        """Return the groups of the policy that leased."""
        (role,) = [seat.role for seat in lease.seats if seat.policy == lease.policy and seat.learns]
        if self._adapters:
            self._load(lease)
        else:
            self._placed = {
                (seat.policy, seat.version): self._sources[seat.policy].take(seat.version)[0] for seat in lease.seats
            }
        games = [
            _Game(self._row(prompt), prompt, sample) for prompt in lease.prompts for sample in range(lease.samples)
        ]
        seats = {seat.role: seat for seat in lease.seats}
        for _ in range(TURNS):
            self._turn(games, seats)
        found = []
        for n, prompt in enumerate(lease.prompts):
            own = games[n * lease.samples : (n + 1) * lease.samples]
            rollouts = tuple(
                dataclasses.replace(one.played[role], episode=Episode(tuple(one.turns[role])), finish_reason="stop")
                for one in own
            )
            scores = tuple(Score(sum(turn.reward for turn in one.turns[role])) for one in own)
            found.append(Group(prompt, rollouts, scores))
        return tuple(found)

    def _load(self, lease: Lease) -> None:
        if self.engine.version < 0:
            self.engine.set_weights(self._base(self.engine.cfg.mesh), 0, rewind=True)
        for loaded in self.engine.adapters:
            self.engine.unload_adapter(loaded)
        for seat in lease.seats:
            if seat.policy and (name := f"{seat.policy}{seat.version}") not in self.engine.adapters:
                adapter, _ = self._sources[seat.policy].take(seat.version)
                self.engine.load_adapter(name, adapter, seat.version)

    def _drawn(self, requests: list[Request], seats: list[Seat]) -> list[Rollout]:
        """Draw requests, of whole models those of one after those of another."""
        if self._adapters:
            return self.engine.generate(requests)
        found: dict[int, Rollout] = {}
        for (policy, version), placed in self._placed.items():
            self.engine.invalidate_weights()
            self.engine.set_weights(placed, version, rewind=True)
            own = [n for n, seat in enumerate(seats) if (seat.policy, seat.version) == (policy, version)]
            found |= dict(zip(own, self.engine.generate([requests[n] for n in own]), strict=True))
        return [found[n] for n in range(len(requests))]

    def _row(self, prompt: Prompt) -> Any:
        return row_of(self._tasks.problem(prompt.id), episode_seed(self._experiment.cfg.seed, prompt.id))

    def _turn(self, games: list["_Game"], seats: Mapping[str, Seat]) -> None:
        """Draw the next action of each game, and pay for it."""
        given = [self._given(one.played[one.mover], one.shown, seats[one.mover].version) for one in games]
        requests = [self._request(one, game.prompt, seats[game.mover]) for one, game in zip(given, games, strict=True)]
        drawn = self._drawn(requests, [seats[game.mover] for game in games])
        for game, before, after in zip(games, given, drawn, strict=True):
            game.played[game.mover] = after
            action = answer_text(self._experiment.tokenizer, after.tokens[len(before.tokens) :].tolist())
            game.pay(len(after.tokens), points(action))
            game.shown = f"<{len(action)}>"

    def _given(self, rollout: Rollout, text: str, version: int) -> Rollout:
        tokens = np.asarray(self._experiment.tokenizer.encode(text), np.int32)
        size = len(tokens)
        added = {
            "tokens": tokens,
            "logprobs": np.zeros(size, np.float32),
            "versions": np.full(size, version, np.int32),
            "action_mask": np.zeros(size, bool),
        }
        whole = {name: np.concatenate([getattr(rollout, name), array]) for name, array in added.items()}
        return dataclasses.replace(rollout, finish_reason="abort", **whole)

    def _request(self, rollout: Rollout, prompt: Prompt, seat: Seat) -> Request:
        most = len(rollout.tokens) + TURN_TOKENS
        return Request(
            prompt,
            1,
            derived_seed("role", self._experiment.cfg.seed, seat.role) % 2**32,
            stop=StopConditions(tokens=self._experiment.engine_cfg.stop_tokens, max_new_tokens=most),
            adapter=f"{seat.policy}{seat.version}" if seat.policy and self._adapters else None,
            partial=(rollout,),
        )


class _Game:
    """A game of two: what each has seen and drawn, and what its turns were paid."""

    def __init__(self, row: Any, prompt: Prompt, sample: int):
        nothing = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32, "action_mask": bool}
        empty: dict[str, Any] = {name: np.zeros(0, dtype) for name, dtype in nothing.items()}
        self.prompt, self.mover, self.shown = prompt, first_role(row), ""
        self.played = {role: Rollout(prompt.id, sample, **empty, finish_reason="abort") for role in ("east", "west")}
        self.turns: dict[str, list[Turn]] = {role: [] for role in self.played}
        self._owed = dict.fromkeys(self.played, 0.0)

    def pay(self, end: int, reward: float) -> None:
        """Pay the mover for an action that ends there; the other pays, now or with its first action."""
        other = "west" if self.mover == "east" else "east"
        self.turns[self.mover].append(Turn(end, reward + self._owed.pop(self.mover, 0.0)))
        if turns := self.turns[other]:
            turns[-1] = dataclasses.replace(turns[-1], reward=turns[-1].reward - reward)
        else:
            self._owed[other] -= reward
        self.mover = other


@dataclasses.dataclass
class Fleet:
    """The roles of a run but for its workers."""

    experiment: RLExperiment
    roles: PolicyRoles
    controllers: Controllers
    weights: dict[str, ParameterServerClient]
    trainer: PolicyTrainers

    def worker(self, name: str, controllers: Any = None) -> PoliciesWorker:
        verifiers = self.roles.make_verifier()
        scored = {name: verifiers.of(name) for name in self.roles.names}
        made = self.roles.make_worker(name, controllers or self.controllers, self.weights, scored)
        assert isinstance(made, PoliciesWorker)
        return made

    def batch(self, step: int) -> dict[str, list[Group] | None]:
        return {name: self.controllers.of(name).next_batch(step) for name in self.roles.names}


@contextlib.contextmanager
def fleet(path: Path, cfg: RLExperiment.Config) -> Iterator[Fleet]:
    experiment = cfg.build()
    with RunDirectory.open(path, to_text(cfg)) as whole, open_policy_runs(experiment, whole):
        roles = PolicyRoles(experiment, whole)
        controllers, servers = roles.make_controller(), roles.make_parameter_server()
        weights = {name: connect_local(servers.of(name)) for name in roles.names}
        with roles.make_trainer(controllers, controllers.of, weights) as trainer:
            trainer.start()
            yield Fleet(experiment, roles, controllers, weights, trainer)


def by_hand(path: Path, cfg: RLExperiment.Config, player: Any = ByHand) -> None:
    """Train the policies of a run with groups played by hand."""
    with fleet(path, cfg) as one:
        hand = player(one.experiment, one.weights, one.roles._base_params)
        while not one.trainer.done():
            step = min(one.trainer.of(name).step for name in one.roles.names)
            while not all(one.batch(step).values()):
                lease = one.controllers.lease("hand", timeout=20.0)
                assert lease is not None
                for part in (lease, *lease.beside):
                    assert one.controllers.submit(part.id, hand.groups(part))
            assert one.trainer.run_once(timeout=5.0)
            one.trainer.settle()
        one.trainer.close()


GAMES = {
    "both": duel(),
    "frozen": duel({"a": {}}, Duel.Config(players={"east": "a", "west": "a@-1"})),
    "fixed": duel({"a": {}}, Duel.Config(players={"west": "a", "east": "a@1"})),
    "base": duel({"a": {}}, Duel.Config(players={"west": "a", "east": "base"})),
    "whole models": duel({"a": {"seed": 0}, "b": {"learner.schedule.lr": 3e-3}}, whole=True),
    "frozen model": duel({"a": {}}, Duel.Config(players={"east": "a", "west": "a@-1"}), whole=True),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of both policies, undisturbed."""
    path = tmp_path_factory.mktemp("whole")
    assert run(path, GAMES["both"]) is not None
    return path


@pytest.mark.full
def test_each_role_has_the_update_of_its_own_tokens_played_by_hand(whole: Path, tmp_path: Path):
    by_hand(tmp_path, GAMES["both"])
    for name in "ab":
        assert parameters(whole / "policies" / name) == parameters(tmp_path / "policies" / name)
        rewards = [[row["reward"] for row in metrics(path / "policies" / name)] for path in (whole, tmp_path)]
        assert rewards[0] == rewards[1] and len(rewards[0]) == 3
    a, b = ([row["reward"] for row in metrics(whole / "policies" / name)] for name in "ab")
    assert np.allclose(np.add(a, b), 0.0, atol=1e-6) and any(a)
    assert parameters(whole / "policies" / "a") != parameters(whole / "policies" / "b")


@pytest.mark.slow
@pytest.mark.full  # by the number of requests: test_what_a_lost_worker_had_played_is_played_again_to_the_same_bits
def test_each_episode_is_played_once_for_both(whole: Path):
    drawn = {name: events(whole / "policies" / name, "generate") for name in "ab"}
    assert [row["version"] for row in drawn["a"]] == [row["version"] for row in drawn["b"]] == [0, 0, 1, 1, 2, 2]
    assert [row["tokens"] for row in drawn["a"]] != [row["tokens"] for row in drawn["b"]]


class Dying:
    """Controllers that a worker dies of when it submits a lease of policy b, after the other policy's."""

    def __init__(self, controllers: Controllers):
        self._controllers = controllers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controllers, name)

    def submit(self, lease: int, groups: tuple[Group, ...]) -> bool:
        if lease >= LEASES_PER_POLICY:  # of policy b
            until = time.monotonic() + 60
            while not self._controllers.of("a").status()["verified"] and time.monotonic() < until:
                time.sleep(0.01)  # policy a's is scored and submitted by another thread
            raise SystemExit("killed")
        return self._controllers.submit(lease, groups)


def drain(worker: PoliciesWorker, one: Fleet) -> None:
    """Work until the first batches are complete."""
    until = time.monotonic() + 300
    while not all(one.batch(0).values()):
        worker.run_once(timeout=0.5)
        assert time.monotonic() < until


@pytest.mark.slow
def test_what_a_lost_worker_had_played_is_played_again_to_the_same_bits(tmp_path: Path):
    with fleet(tmp_path / "whole", GAMES["both"]) as one:
        worker = one.worker("w")
        drain(worker, one)
        assert isinstance(worker._engine, RolloutEngine)
        expected, requests = one.batch(0), worker._engine.stats()["requests"]
        assert requests == 2 * 4  # a request for each role of four prompts, though two policies lease them
    with fleet(tmp_path / "killed", GAMES["both"]) as one:
        dying, engine = one.worker("dying", Dying(one.controllers)), worker._engine
        dying._engine = engine
        with pytest.raises(SystemExit):
            drain(dying, one)
        one.controllers.leave("dying")  # as its silence tells
        counts = [one.controllers.of(name).status()["verified"] for name in "ab"]
        assert counts[0] > 0 and counts[1] == 0
        for loaded in engine.adapters:
            engine.unload_adapter(loaded)
        leaver = one.worker("leaver")
        leaver._engine = engine
        leaver.run(stop=Called(2))  # hands back in the middle of its episodes
        other = one.worker("other")
        other._engine = engine
        drain(other, one)
        found = one.batch(0)
    for name in "ab":
        assert same(found[name] or [], expected[name] or [])
        assert [g.scores for g in found[name] or []] == [g.scores for g in expected[name] or []]


def test_checkpoints_without_a_partner_are_set_aside_and_none_is_deleted(tmp_path: Path):
    folders = {name: tmp_path / name / "checkpoints" / "rl" for name in "abc"}
    for name, steps in {"a": (1, 2, 3), "b": (1,), "c": (3,)}.items():
        for step in steps:
            (folders[name] / str(step)).mkdir(parents=True)
            (folders[name] / str(step) / "weights").write_text(f"{name}{step}")
    kept = folders["a"].with_name("rl-unmatched")
    for _ in range(2):  # as resumed, interrupted, and resumed
        resume_together(folders, {"a": ("b",), "b": ("a",), "c": ()})
        assert [sorted(path.name for path in folders[name].iterdir()) for name in "abc"] == [["1"], ["1"], ["3"]]
        assert {path.name: (path / "weights").read_text() for path in kept.iterdir()} == {"2": "a2", "3": "a3"}
    shutil.rmtree(folders["b"] / "1")
    resume_together(folders, {"a": ("b",)})
    assert (kept / "1" / "weights").read_text() == "a1" and not list(folders["a"].iterdir())


@pytest.mark.full
def test_policies_resume_together_to_the_same_bits(whole: Path, tmp_path: Path):
    def done() -> int:
        return sum(len(metrics(tmp_path / "policies" / name)) for name in "ab")

    assert run(tmp_path, GAMES["both"], stop=lambda: done() >= 4) is None
    assert 4 <= done() < 6
    shutil.rmtree(tmp_path / "policies" / "b" / "checkpoints" / "rl" / "2")  # the trainer died before it was written
    assert run(tmp_path, GAMES["both"]) is not None
    for name in "ab":
        assert_same_outcome(tmp_path / "policies" / name, whole / "policies" / name)


@pytest.mark.full
def test_an_environment_that_always_fails_ends_the_policies_that_play_in_it(tmp_path: Path):
    with pytest.raises(UserError, match=r"all policies have failed:\n  a: .*KeyError: 'lost'") as failed:
        run(tmp_path, duel(game=Duel.Config(fails_at=3)).set(num_steps=20))  # 256 failures end a policy
    assert "policy 'a', which plays in its episodes, has failed" in str(failed.value)


@pytest.mark.full
@pytest.mark.parametrize("game", ["frozen", "fixed", "base", "whole models", "frozen model"])
def test_opponents_are_those_that_the_seats_name(game: str, tmp_path: Path):
    assert run(tmp_path / "run", GAMES[game]) is not None
    by_hand(tmp_path / "hand", GAMES[game])
    for name in GAMES[game].policies:
        found, expected = (parameters(tmp_path / folder / "policies" / name) for folder in ("run", "hand"))
        assert found == expected


REFUSED: list[tuple[RLExperiment.Config, str]] = [
    (duel({}), "players: expected `policies` of the experiment, which play the roles"),
    (duel({"a": {}}), r"policies\['a'\].tasks: role 'west': there is no policy 'b'"),
    (duel({"a": {}, "b": {}, "c": {}}), r"policies\['c'\].tasks: policy 'c' learns in no role of its episodes"),
    (duel({"a": {}, "b": {"seed": 3}}), r"policies\['a'\].seed: expected 3 of policy 'b', with which it plays"),
    (duel({"a": {}, "b": {"num_steps": 9}}), r"policies\['a'\].num_steps: expected 9 of policy 'b'"),
    (
        duel({"a": {}}, Duel.Config(players={"east": "a", "west": "base"}), whole=True),
        r"policies\['a'\].tasks: role 'west': whole models have no base; expected a version of one, such as 'a@0'",
    ),
    (
        duel(
            {"a": {}, "b": {}, "c": {"controller.weights": "in_flight", "tasks": tiny_experiment().tasks}}, whole=True
        ),
        r"policies\['c'\].controller.weights: expected 'pinned' or 'newest': requests keep the weights",
    ),
    (duel({"a": {"tasks": tiny_experiment().tasks}, "b": {}}), r"tasks: expected the tasks of policy"),
    (duel({"a": {}, "b": {"controller.weights": "newest"}}), r"policies\['b'\].controller.weights: expected 'pinned'"),
    (duel({"a": {}, "b": {"trainer.checkpoint.keep": 2}}), r"policies\['b'\].trainer.checkpoint.keep: expected 3 or"),
    (
        duel({"a": {}}, Duel.Config(players={"east": "a", "west": "a@-6"})),
        r"parameter_server.keep: expected 9 or more: episodes ask for 7 versions of policy 'a' before its newest",
    ),
]


@pytest.mark.parametrize(("cfg", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_policies_that_cannot_play_together_are_refused(cfg: RLExperiment.Config, message: str):
    with pytest.raises(ConfigError, match=message):
        check_policies(cfg, "inprocess")


@pytest.mark.parametrize(
    ("players", "message"),
    [
        ({}, "players: expected a player for each role"),
        ({"east": "base"}, "players: expected a policy that learns"),
        ({"east": "a", "west": "a"}, "expected each policy to learn in one role; name another, or 'NAME@-0'"),
        ({"east": "a", "west": "a@x"}, r"expected a policy as 'NAME', 'NAME@-4' or 'NAME@12'.*role 'west', got 'a@x'"),
        ({"east": "a", "west": "base@3"}, r"or 'base', for role 'west', got 'base@3'"),
    ],
)
def test_players_that_are_none_are_refused(players: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        Duel.Config(players=players).check_fields()


def test_seats_are_versions_of_the_lease_and_those_before_it():
    players = Duel.Config(players={"a": "p", "b": "p@-2", "c": "p@3", "d": "base", "e": "q", "f": "q@-0"}).parsed()
    assert players["b"] == Player("p", back=2) and players["c"] == Player("p", version=3)
    lease = functools.partial(Lease, 0, 0, (), 1, seconds=1.0)
    for version, expected in ((1, (1, 0, 1, 0, 1, 1)), (7, (7, 5, 3, 0, 7, 7))):
        seats = seats_of(players, lease(version=version), {"p": 11, "q": 12})
        assert tuple(seat.version for seat in seats) == expected
        assert [seat.policy for seat in seats] == ["p", "p", "p", "", "q", "q"]
        assert [seat.learns for seat in seats] == [True, False, False, False, True, False]
        assert [seat.incarnation for seat in seats] == [11, 11, 11, 0, 12, 12]
