"""A worker of several policies gives each the rollouts that it would get alone, whatever happens to the others."""

import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import replace
from axlearn_like.layers.base import Params
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.wrappers.adapters import adapter_of
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from mesh import UserError
from rl.controller.controller import Controller
from rl.controller.fair_share import FairShare
from rl.controller.leasing import LEASES_PER_POLICY
from rl.parameter_server.client import ParameterServerClient, connect_local
from rl.parameter_server.server import ParameterServer
from rl.protocol.messages import Group, Score
from rl.rollout.agent_loops.branching import Branching
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.rollout.sampling import Sampler
from rl.rollout.worker_policy import WorkerFeatures, WorkerPolicy, WorkerServices
from rl.runtime.policies.adapters import adapter_limits, adapter_source, factors_like
from rl.runtime.policies.controllers import Controllers
from rl.runtime.policies.worker import PoliciesWorker
from rl.verification.inline import InlineVerifier
from rl.verification.scorers import FunctionScorer
from tests.rl.parameter_server.small import publish
from tests.rl.rollout.small import assert_same
from tests.rl.rollout.test_worker import CFG, EXPERIMENT, Called, Hesitant, same
from tests.rl.tiny import ascii_share, tiny_experiment, tiny_params

pytestmark = pytest.mark.slow

LORA: Any = CFG.policy.clone()
replace(LORA, Block.Config, lambda block: block.set(attention=LoRA.Config(inner=block.attention, rank=2, alpha=4.0)))
BASE = tiny_params(CFG.policy)  # pyright: ignore
VERSIONS = 3
SEEDS = {"a": 0, "b": 0, "c": 5, "d": 0}
SAMPLERS = {"c": Sampler.Config(temperature=0.7)}
FEATURES = {"b": WorkerFeatures(branching=Branching.Config(at=(2,), ways=2).build())}


@cache
def factors(policy: str, version: int) -> Params:
    """The factors of a version as its trainer publishes them: what it trains and nothing else."""
    rng = np.random.default_rng([ord(policy), version])
    return jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape).astype(leaf.dtype), factors_like(LORA))


class Fleet:
    """Controllers, parameter servers with all versions, and workers to come, for these policies."""

    def __init__(self, path: Path, engine: RolloutEngine, policies: str, **shares: float):
        self._path, self._engine, self.policies = path, engine, policies
        self.servers: dict[str, ParameterServerClient] = {}
        self.verifiers: dict[str, Any] = {}
        self.controllers: dict[str, Controller] = {}
        self.events = {name: EventLog(path / f"{name}.jsonl") for name in policies}
        for number, name in enumerate(policies):
            self.servers[name] = connect_local(EXPERIMENT.make_parameter_server())
            for version in range(VERSIONS):
                publish(self.servers[name], factors(name, version), version)
            cfg = tiny_experiment(seed=SEEDS[name]).build().controller_cfg.set(staleness=1)
            log = self.events[name]
            self.controllers[name] = cfg.build(clock=lambda: 0.0, events=log, first_lease=number * LEASES_PER_POLICY)
            self.controllers[name].begin(0, 0)
            self.controllers[name].published(VERSIONS - 1)  # four steps can be leased, of versions 0, 0, 1 and 2
        self.front = Controllers(self.controllers, FairShare(shares, quantum=8))

    def worker(self, name: str = "w", sources: dict[str, str] | None = None) -> PoliciesWorker:
        """`sources`: the policies whose weights some get in place of their own."""
        parts = {}
        for policy in self.policies:
            weights = adapter_source(LORA, self.servers[(sources or {}).get(policy, policy)])
            verifier = self.verifiers.get(policy) or EXPERIMENT.make_verifier()
            services = WorkerServices(self.front, weights, verifier, self.events[policy], pull_timeout=0.0)
            features, sampler = FEATURES.get(policy, WorkerFeatures()), SAMPLERS.get(policy)
            parts[policy] = WorkerPolicy(EXPERIMENT.tokenizer, SEEDS[policy], services, features, sampler)
        for loaded in self._engine.adapters:  # as in a new process
            self._engine.unload_adapter(loaded)
        self._engine.invalidate_weights()
        return PoliciesWorker(name, self._engine, parts, self.front, lambda: BASE, EventLog(self._path / "fleet.jsonl"))

    def drained(self, worker: PoliciesWorker) -> int:
        """Work until nothing is left; returns the most policies that had leases in hand at a time."""
        most = idle = 0
        while idle < 4:  # turns without work: on a busy machine prompts take their time
            if worker.run_once():
                most, idle = max(most, len({work.lease.policy for work in worker._works})), 0
            else:
                idle += 1
                time.sleep(0.15)
        return most

    def batches(self, policy: str) -> list[Group]:
        steps = [self.controllers[policy].next_batch(step) for step in range(CFG.num_steps)]
        assert all(step is not None for step in steps)
        return [group for step in steps for group in step or ()]

    def rows(self, policy: str, event: str) -> list[dict[str, Any]]:
        return [row for row in read_rows(self.events[policy].path) if row["event"] == event]


def make_engine(policies: int) -> RolloutEngine:
    return EXPERIMENT.make_engine(adapters=adapter_limits(LORA, policies), max_num_seqs=12, steps_per_dispatch=2)


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return make_engine(3)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Group]]:
    """All batches of each policy as a worker makes them that has no other, on an engine with room for one."""
    engine, found = make_engine(1), {}
    for name in "abc":
        fleet = Fleet(tmp_path_factory.mktemp(name), engine, name)
        assert fleet.drained(fleet.worker()), "leases were in hand"
        found[name] = fleet.batches(name)
    return found


def versions(groups: Iterable[Group]) -> list[int]:
    return sorted({int(v) for group in groups for one in group.rollouts for v in one.versions})


@pytest.mark.parametrize(("policies", "shares"), [("ab", {}), ("abc", {"c": 20.0}), ("cba", {"b": 0.05, "a": 4.0})])
def test_policies_drawn_together_get_the_rollouts_that_each_gets_alone(
    policies: str, shares: dict[str, float], tmp_path: Path, engine: RolloutEngine, alone: dict[str, list[Group]]
):
    fleet = Fleet(tmp_path, engine, policies, **shares)
    assert fleet.drained(fleet.worker()) >= 2, "leases of several policies are in hand at a time"
    for name in policies:
        assert same(fleet.batches(name), alone[name])
        assert versions(fleet.batches(name)) == [0, 1, 2]
    assert len({str([r.tokens.tolist() for g in alone[name] for r in g.rollouts]) for name in "abc"}) == 3


def test_an_adapter_that_nobody_draws_with_gives_its_slot_to_another_policy(
    tmp_path: Path, alone: dict[str, list[Group]]
):
    """More policies than there is room for, as after some were stopped whose adapters are still loaded."""
    engine = make_engine(2)
    fleet = Fleet(tmp_path, engine, "abc")
    fleet.drained(fleet.worker())
    assert len(engine.adapters) == 4, "slots of two policies"
    for name in "abc":
        assert same(fleet.batches(name), alone[name])


def test_rollouts_are_those_of_requests_with_the_policys_seed_sampler_and_adapter(
    engine: RolloutEngine, alone: dict[str, list[Group]]
):
    engine.set_weights(BASE, 0, rewind=True)
    for loaded in engine.adapters:
        engine.unload_adapter(loaded)
    for version in range(VERSIONS):
        engine.load_adapter(str(version), adapter_of(LORA, factors("c", version)), version)
    every = [(group, str(versions([group])[0])) for group in alone["c"]]
    fields: dict[str, Any] = {"samples": CFG.samples_per_prompt, "seed": SEEDS["c"], "sampler": SAMPLERS["c"]}
    expected = engine.generate([Request(group.prompt, adapter=version, **fields) for group, version in every])
    assert_same([rollout for group in alone["c"] for rollout in group.rollouts], expected)


def test_requests_are_drawn_by_the_adapter_that_they_name(
    tmp_path: Path, engine: RolloutEngine, alone: dict[str, list[Group]]
):
    """Policies a and d differ in their adapters alone: with each other's weights they get each other's rollouts."""
    fleet = Fleet(tmp_path, engine, "ad")
    fleet.drained(fleet.worker(sources={"a": "d", "d": "a"}))
    assert same(fleet.batches("d"), alone["a"]) and not same(fleet.batches("a"), alone["a"])
    assert [g.prompt.id for g in fleet.batches("a")] == [g.prompt.id for g in alone["a"]]


@pytest.mark.parametrize("patience", [2, 9])
def test_work_of_a_worker_that_must_go_is_continued_to_the_same_bits(
    patience: int, tmp_path: Path, engine: RolloutEngine, alone: dict[str, list[Group]]
):
    fleet = Fleet(tmp_path, engine, "abc")
    fleet.worker("leaver").run(stop=Called(patience))
    for name in "abc":
        status = fleet.controllers[name].status()
        assert (status["leased"], status["generated"], status["workers"]) == (0, 0, [])
    handed = sum(row["tokens"] for name in "abc" for row in fleet.rows(name, "handed_back"))
    assert handed > 0 or patience < 4
    fleet.drained(fleet.worker("other"))
    for name in "abc":
        assert same(fleet.batches(name), alone[name])


def test_when_there_is_no_more_time_whole_rollouts_are_handed_back_from_another_thread(
    tmp_path: Path, engine: RolloutEngine, alone: dict[str, list[Group]]
):
    fleet = Fleet(tmp_path, engine, "ac")
    fleet.verifiers["a"] = verifier = Hesitant(
        InlineVerifier.Config(scorer=FunctionScorer.Config(function=ascii_share))
    )
    worker = fleet.worker()
    verifier.meanwhile = worker.abandon
    fleet.drained(worker)
    assert same(fleet.batches("a"), alone["a"]) and same(fleet.batches("c"), alone["c"])
    (row,) = fleet.rows("a", "handed_back")
    (again,) = [one for one in fleet.rows("a", "generate") if one["tokens"] == 0]  # they only had to be scored
    assert row["tokens"] > 0 and again["step"] == row["step"]


def test_run_joins_works_and_ends_with_the_run(tmp_path: Path, engine: RolloutEngine, alone: dict[str, list[Group]]):
    fleet = Fleet(tmp_path, engine, "abc")
    lost = [fleet.front.lease("w"), fleet.front.lease("w")]  # by a former process of this name
    thread = threading.Thread(target=fleet.worker("w").run)
    thread.start()
    for name in "abc":
        assert fleet.controllers[name].next_batch(CFG.num_steps - 1, timeout=1e6) is not None
        assert same(fleet.batches(name), alone[name])
    fleet.front.stop()
    thread.join(60)
    assert not thread.is_alive() and fleet.front.status()["workers"] == []
    assert all(one is not None and not fleet.front.renew(one.id) for one in lost)


class Refusing(InlineVerifier):
    """A verifier that gives up."""

    def __init__(self):
        pass

    def score(self, *args: Any, **kwargs: Any) -> list[Score]:
        raise RuntimeError("this scorer is broken")


BROKEN: list[tuple[Callable[[Fleet], None], str]] = [
    (lambda fleet: publish_scaled(fleet, np.nan), "are not all numbers"),
    (lambda fleet: publish_scaled(fleet, 1e25), "drawing ended with 'error' after 0 tokens; are the policy's weights"),
    (lambda fleet: fleet.verifiers.update(b=Refusing()), "this scorer is broken"),
    (lambda fleet: fleet.servers["b"].directory.rewind(0), "version 1 not published"),
]


def publish_scaled(fleet: Fleet, scale: float) -> None:
    """Publish version 1 of policy b again, with factors of another size."""
    server = connect_local(EXPERIMENT.make_parameter_server())
    for version in range(VERSIONS):
        factor = np.float32(scale if version == 1 else 1)
        publish(server, jax.tree.map(lambda leaf: leaf * factor, factors("b", version)), version)  # noqa: B023
    fleet.servers["b"] = server


@pytest.mark.parametrize(("harm", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_policy_that_fails_is_named_and_leaves_the_bits_of_the_others(
    harm: Callable[[Fleet], None], message: str, tmp_path: Path, engine: RolloutEngine, alone: dict[str, list[Group]]
):
    fleet = Fleet(tmp_path, engine, "abc")
    harm(fleet)
    fleet.drained(fleet.worker())
    assert list(fleet.front.failed()) == ["b"] and message in fleet.front.failed()["b"]
    for name in "ac":
        assert same(fleet.batches(name), alone[name])
    assert fleet.controllers["b"].next_batch(2) is None
    assert not engine.busy


def test_a_slept_engine_gets_the_base_again_and_a_sleeping_worker_has_no_leases(
    tmp_path: Path, engine: RolloutEngine, alone: dict[str, list[Group]]
):
    fleet = Fleet(tmp_path, engine, "ac")
    worker = fleet.worker()
    for _ in range(3):
        assert worker.run_once()
        worker.sleep()
        assert engine.version == -1 and all(one.status()["leased"] == 0 for one in fleet.controllers.values())
    fleet.drained(worker)
    for name in "ac":
        assert same(fleet.batches(name), alone[name])


def test_room_is_for_two_versions_of_each_policy_and_for_what_it_adapts():
    limits = adapter_limits(LORA, 4)
    assert (limits.slots, limits.rank) == (8, 2)
    assert limits.match and all("attention/" in path for path in limits.match)
    with pytest.raises(UserError, match="has no LoRA layers"):
        adapter_limits(CFG.policy, 4)


def test_a_codec_that_rounds_factors_is_refused():
    server = ParameterServer.Config(codec="int8").build()
    with pytest.raises(UserError, match="parameter_server.codec='int8': expected 'raw' or 'delta' with several polic"):
        adapter_source(LORA, connect_local(server))
