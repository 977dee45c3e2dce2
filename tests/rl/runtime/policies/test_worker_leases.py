"""Leases that wait for each other or for weights: episodes of one problem, third versions, another trainer's."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import replace
from axlearn_like.layers.decoder import Block
from axlearn_like.layers.wrappers.adapters import Adapter, adapter_of
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from axlearn_like.tokenizers.protocol import completion_text
from rl.protocol.messages import Group, Lease, Prompt, PullStats, Rollout
from rl.rollout.agent_loops.episodes import Episodes
from rl.rollout.engine import RolloutEngine
from rl.rollout.sampling import Sampler
from rl.rollout.worker_policy import WorkerFeatures, WorkerPolicy, WorkerServices
from rl.runtime.policies.adapters import adapter_limits, factors_like
from rl.runtime.policies.worker import PoliciesWorker
from rl.tasks.encoding import encode_problem
from tests.rl.environments.toys import TOKENIZER, Slow, tasks
from tests.rl.rollout.agent_loops.test_episodes import MAX_NEW, POLICY, Judge
from tests.rl.rollout.small import assert_same
from tests.rl.tiny import tiny_params

LORA = POLICY.clone()
replace(LORA, Block.Config, lambda block: block.set(attention=LoRA.Config(inner=block.attention, rank=2)))
TASKS = tasks(Slow.Config())
SEEDS = {"p": 3, "q": 4}


class Listed:
    """A source of these leases, which keeps what is submitted."""

    def __init__(self, *leases: Lease):
        self.left, self.found = list(leases), dict[int, list[Rollout]]()

    def lease(self, worker: str, timeout: float = 0.0) -> Lease | None:
        return self.left.pop(0) if self.left else None

    def submit(self, lease: int, groups: tuple[Group, ...]) -> bool:
        self.found[lease] = [rollout for group in groups for rollout in group.rollouts]
        return True

    def generated(self, lease: int) -> bool:
        return True

    renew = generated


class Made:
    """Weights of a policy that are here already, others of a version each time that it is taken."""

    def __init__(self, policy: str):
        self._seed, self._taken = SEEDS[policy], Counter[int]()

    def take(self, version: int, timeout: float = 0.0) -> tuple[Adapter, PullStats]:
        rng = np.random.default_rng([self._seed, version, self._taken[version]])
        self._taken[version] += 1
        random = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), factors_like(LORA))
        return adapter_of(LORA, random), PullStats()


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    sizes: dict[str, Any] = {"max_num_seqs": 16, "page_size": 8, "steps_per_dispatch": 4, "prefill_tokens": 64}
    sizes |= {"max_prompt_tokens": 8, "max_new_tokens": MAX_NEW, "sampler": Sampler.Config()}
    cfg = RolloutEngine.Config(model=POLICY, stop_tokens=(TOKENIZER.eos,), **sizes)
    return cfg.build(decode=partial(completion_text, TOKENIZER), adapters=adapter_limits(LORA, 2))


def drawn(engine: RolloutEngine, path: Path, *leases: Lease) -> dict[int, list[Rollout]]:
    source: Any = Listed(*leases)
    for loaded in engine.adapters:  # as in a new process
        engine.unload_adapter(loaded)
    parts = {}
    for name, seed in SEEDS.items():
        weights: Any = Made(name)
        services = WorkerServices(source, weights, Judge(), EventLog(path / f"{name}.jsonl"))
        features = WorkerFeatures(episodes=Episodes.of(TASKS, TOKENIZER, seed))
        parts[name] = WorkerPolicy(TOKENIZER, seed, services, features)
    worker = PoliciesWorker("w", engine, parts, source, lambda: tiny_params(POLICY), EventLog(path / "fleet.jsonl"))
    while worker.run_once():
        pass
    worker.close()
    return source.found


def lease(number: int, policy: str, index: int, draw: int = 0, **fields: Any) -> Lease:
    problem = TASKS.build().train(index)
    prompt = Prompt(problem.id, problem.family, encode_problem(problem, TOKENIZER), draw)
    form: dict[str, Any] = {"samples": 2, "version": 0, "seconds": 60.0, "policy": policy, **fields}
    return Lease(number, step=draw, prompts=(prompt,), **form)


@pytest.mark.full
def test_episodes_are_the_same_in_any_company_and_when_a_problem_is_drawn_twice(engine: RolloutEngine, tmp_path: Path):
    leases = [lease(0, "p", 0), lease(1, "p", 0, draw=1), lease(2, "q", 0), lease(3, "q", 1), lease(4, "p", 1)]
    together = drawn(engine, tmp_path, *leases)
    assert sorted(together) == list(range(5))
    for one in leases:
        alone = drawn(engine, tmp_path, one)[one.id]
        assert_same(together[one.id], alone)
        assert all(rollout.episode is not None for rollout in alone)
        assert [rollout.episode for rollout in together[one.id]] == [rollout.episode for rollout in alone]
    assert len({rollout.tokens.tobytes() for found in together.values() for rollout in found}) == 10


@pytest.mark.slow
def test_a_third_version_of_a_policy_waits_for_its_own_and_not_for_anothers(engine: RolloutEngine, tmp_path: Path):
    leases = [
        lease(3 * n + version, policy, version, version=version)
        for n, policy in enumerate("pq")
        for version in range(3)
    ]
    together = drawn(engine, tmp_path, *leases)
    for one in leases:
        assert_same(together[one.id], drawn(engine, tmp_path, one)[one.id])
        assert {int(v) for rollout in together[one.id] for v in rollout.versions} == {one.version}
    assert len(engine.adapters) <= engine.runner.bank.limits.slots == 4  # pyright: ignore


@pytest.mark.slow
def test_a_version_that_another_trainer_has_made_again_is_another_adapter(engine: RolloutEngine, tmp_path: Path):
    one, same, other = (lease(number, "p", 0, draw=0, incarnation=n) for number, n in enumerate((7, 7, 8)))
    found = drawn(engine, tmp_path, one, same, other)
    assert_same(found[1], found[0])
    assert [rollout.tokens.tobytes() for rollout in found[2]] != [rollout.tokens.tobytes() for rollout in found[0]]
    assert [row["version"] for row in read_rows(tmp_path / "p.jsonl") if row["event"] == "pull"] == [0, 0]
