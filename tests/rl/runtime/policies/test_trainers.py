"""Trainers of several policies in one process: the bits of each alone, one base, failures that stay one policy's."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from axlearn_like.config import replace
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.parameter_names import only, path_name
from axlearn_like.layers.wrappers.lora import LoRA
from axlearn_like.layers.wrappers.shared_base import Base
from axlearn_like.learner import ParameterGroup
from axlearn_like.operations.step_metrics import without_clock
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from mesh import UserError
from rl.controller.controller import Controller
from rl.experiment import RLExperiment
from rl.objective.presets import maxrl
from rl.parameter_server.client import ParameterServerClient, connect_local
from rl.runtime.policies.base import make_base
from rl.runtime.policies.changes import Change
from rl.runtime.policies.trainers import PolicyTrainers
from rl.training.spec import FirstVersion, TrainerServices
from rl.training.trainer import PolicyTrainer
from tests.rl.tiny import make_group, tiny_experiment, tiny_run

pytestmark = pytest.mark.slow

STEPS, SAVE_EVERY = 3, 2  # SAVE_EVERY: of the tiny experiment
GROUPS = (ParameterGroup.Config(match="*/lora/*"), ParameterGroup.Config(frozen=True))


def config(**changes: Any) -> RLExperiment.Config:
    """A policy that is a LoRA adapter; `rank` and `lr` are edits of their layers."""
    rank, lr = changes.pop("rank", 2), changes.pop("lr", 1e-2)
    cfg = tiny_experiment(num_steps=STEPS, evaluation=None, **changes)
    replace(cfg.policy, Attention.Config, lambda one: LoRA.Config(inner=one, rank=rank))
    cfg.learner.groups = GROUPS
    cfg.learner.schedule.lr = lr
    return cfg


POLICIES = {
    "a": {"seed": 1},
    "b": {"seed": 2, "lr": 3e-3},
    "c": {"seed": 3, "objective": maxrl().set(old_policy="current"), "samples_per_prompt": 2, "rank": 1},
}


@functools.cache
def shared_base() -> Base:
    return make_base(config().build().trainer_cfg, FirstVersion(seed=7))


class Failures:
    """Record of the policies that have failed, as controllers keep it."""

    def __init__(self) -> None:
        self.why: dict[str, str] = {}
        self.steps: dict[str, int | None] = {}

    def fail(self, policy: str, why: str, step: int | None = None) -> None:
        self.why[policy], self.steps[policy] = why, step

    def failed(self) -> Mapping[str, str]:
        return self.why

    def admit(self, policy: str, change: int) -> None:
        self.why.pop(policy, None)

    def dismiss(self, policy: str, change: int) -> None:
        self.steps[policy] = None


@dataclasses.dataclass
class Policy:
    """Roles of one policy beside its trainer."""

    run: RunDirectory
    controller: Controller
    weights: ParameterServerClient
    experiment: RLExperiment

    def feed(self, *, bad: bool = False) -> bool:
        """Submit the groups of all leases, written by hand: other tokens and rewards for each prompt and step."""
        some = False
        while (lease := self.controller.lease("hand")) is not None:
            some, step, groups = True, lease.step, []
            for prompt in lease.prompts:
                rng = np.random.default_rng((prompt.id, step))
                count = self.experiment.cfg.samples_per_prompt
                completions = [rng.integers(0, 256, rng.integers(2, 7)).tolist() for _ in range(count)]
                rewards = [-1.0 if bad else round(float(x), 2) for x in rng.random(count)]
                groups.append(make_group(prompt, completions, rewards, version=lease.version))
            assert self.controller.submit(lease.id, tuple(groups))
        return some


class Fleet:
    """The trainers of some policies, and what is around each."""

    def __init__(self, path: Path, policies: Mapping[str, Mapping[str, Any]]):
        self.policies: dict[str, Policy] = {}
        self.failures, self.path, self.names = Failures(), path, list(policies)
        self.changes: dict[str, Change] = {}
        makers = {name: functools.partial(self._make, name, dict(edits)) for name, edits in policies.items()}
        self.trainers = PolicyTrainers(makers, cast(Any, self.failures), lambda: self.changes, self._join)

    def _join(self, name: str) -> PolicyTrainer:
        if name in self.policies:
            self.policies[name].run.close()
        return self._make(name, dict(POLICIES[name]))

    def _make(self, name: str, edits: dict[str, Any]) -> PolicyTrainer:
        cfg = config(**edits)
        experiment, run = cfg.build(), tiny_run(self.path / "policies" / name, cfg)
        controller, weights = experiment.make_controller(run), connect_local(experiment.make_parameter_server())
        self.policies[name] = Policy(run, controller, weights, experiment)
        others = [self.path / "policies" / other / "checkpoints" / "rl" for other in self.names if other != name]
        first = FirstVersion(seed=cfg.seed, base=shared_base(), beside=others)
        return experiment.trainer_cfg.build(run=run, services=TrainerServices(controller, weights), first=first)

    def advance(self, to: int) -> None:
        """Update each policy to this step, those that have not failed."""
        if not any(policy.controller.status()["version"] >= 0 for policy in self.policies.values()):
            self.trainers.start()
        while going := [n for n in self.policies if n not in self.failures.why and self.trainers.of(n).step < to]:
            for name in going:
                self.policies[name].feed()
            assert self.trainers.run_once()
            self.trainers.settle()

    def run(self, stop: Callable[[], bool] = lambda: False, *, bad: bool = False) -> int:
        """Run the trainers as a runtime does, with groups that come from another thread."""
        ended = threading.Event()

        def feed() -> None:
            while not ended.is_set():
                if not sum(policy.feed(bad=bad) for policy in self.policies.values()):
                    ended.wait(0.01)

        with ThreadPoolExecutor(1) as pool:
            fed = pool.submit(feed)
            try:
                return self.trainers.run(stop)
            finally:
                ended.set()
                fed.result()

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [without_clock(row) for row in read_rows(self.policies[name].run.metrics_path)]

    def bits(self, name: str) -> dict[str, bytes]:
        leaves = jax.tree_util.tree_leaves_with_path(self.trainers.of(name).state)
        return {path_name(path): np.asarray(leaf).tobytes() for path, leaf in leaves}

    def pushes(self, name: str) -> list[tuple[int, int, str]]:
        rows = read_rows(self.policies[name].run.events_path)
        return [(row["version"], row["nbytes"], row["checksum"]) for row in rows if row["event"] == "push"]

    def crash(self) -> None:
        """Stop without saving; writes under way may finish."""
        for name in self.policies:
            self.trainers.of(name)._session.tiers.wait()
        self.trainers.__exit__(None, None, None)
        self.close_runs()

    def close_runs(self) -> None:
        for policy in self.policies.values():
            policy.run.close()


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    fleet = Fleet(tmp_path_factory.mktemp("together"), POLICIES)
    fleet.advance(STEPS)
    fleet.trainers.close()
    return fleet


@pytest.mark.full
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_has_the_bits_that_it_has_alone(together: Fleet, name: str, tmp_path: Path):
    """Parameters, optimizer state, metrics, and every version that is pushed."""
    alone = Fleet(tmp_path, {name: POLICIES[name]})
    alone.advance(STEPS)
    alone.trainers.close()
    assert alone.bits(name) == together.bits(name)
    assert alone.rows(name) == together.rows(name)
    assert alone.pushes(name) == together.pushes(name)
    assert len(alone.rows(name)) == STEPS and len(alone.pushes(name)) == STEPS + 1
    assert len({checksum for _, _, checksum in alone.pushes(name)}) == STEPS + 1, "each update changes the adapter"


@pytest.mark.full
def test_policies_that_join_stop_and_resume_between_two_updates_cost_nobody_a_bit(together: Fleet, tmp_path: Path):
    fleet = Fleet(tmp_path, {name: POLICIES[name] for name in "ab"})
    fleet.advance(1)
    fleet.changes = {"c": Change(1, stopped=False), "b": Change(2, stopped=True)}
    assert not fleet.trainers.run_once() and fleet.trainers.of("c").step == 0
    stopped = fleet.policies.pop("b")
    fleet.advance(2)
    assert [fleet.trainers.of(name).step for name in "abc"] == [2, 1, 2] and "b" in fleet.failures.steps
    fleet.policies["b"], fleet.changes = stopped, {**fleet.changes, "b": Change(3, stopped=False)}
    assert not fleet.trainers.run_once() and fleet.trainers.of("b").step == 1
    fleet.advance(STEPS)
    fleet.trainers.close()
    for name in POLICIES:
        assert fleet.bits(name) == together.bits(name) and fleet.rows(name) == together.rows(name)
    fleet.close_runs()


def test_policies_at_other_learning_rates_share_a_program(together: Fleet):
    steps = {name: together.trainers.of(name)._loop.step_fn for name in POLICIES}
    programs: dict[str, Any] = {name: step.step.step.step for name, step in steps.items()}  # pyright: ignore
    assert programs["a"] is programs["b"] is not programs["c"], "which has another objective"
    assert [{row["lr"] for row in together.rows(name)} for name in "ab"] == [{np.float32(1e-2)}, {np.float32(3e-3)}]


def test_policies_of_one_program_are_updated_by_one_run_of_it(together: Fleet):
    """A loop that is compiled once, by the policy that was first; that of another objective is another one."""
    rows = {name: read_rows(together.policies[name].run.events_path) for name in POLICIES}
    compiled = {name: sum(row["event"] == "compile" for row in rows[name]) for name in POLICIES}
    assert compiled == {"a": 1, "b": 0, "c": 1}
    updates = {name: [row for row in rows[name] if row["event"] == "update"] for name in "ab"}
    for one, other in zip(updates["a"], updates["b"], strict=True):
        ends = one["time"], other["time"]
        assert max(row["time"] - row["seconds"] for row in (one, other)) < min(ends), "both were under way at a time"


def test_the_base_is_held_once_and_never_pushed(together: Fleet):
    held = {leaf.unsafe_buffer_pointer() for leaf in shared_base().values()}
    sizes = {}
    for name in POLICIES:
        model: Any = together.trainers.of(name).cfg.model
        assert model.block.attention.separate, "as the engine multiplies, whose base has no adapter added"
        params = together.trainers.of(name).state["params"]
        leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        factors = only(params, [path for path in leaves if "/lora/" in path])
        rest = [leaf.unsafe_buffer_pointer() for path, leaf in leaves.items() if "/lora/" not in path]
        assert len(rest) == len(held) and set(rest) == held
        sizes[name] = sum(leaf.nbytes for leaf in jax.tree.leaves(factors))
        assert {nbytes for _, nbytes, _ in together.pushes(name)} == {sizes[name]}
        manifest = together.policies[name].weights.directory.manifest(STEPS)
        assert all("/lora/" in tensor.path for tensor in manifest.tensors)
        pulled = together.policies[name].weights.receiver(factors).pull(STEPS)
        jax.tree.map(np.testing.assert_array_equal, pulled, factors)
    assert sizes["a"] == sizes["b"] == 2 * sizes["c"], "by their ranks"


def test_checkpoints_of_all_have_one_copy_of_the_base_on_disk(together: Fleet):
    files: dict[str, set[int]] = {}
    for path in together.path.glob("policies/*/checkpoints/rl/*/frozen/**/*"):
        if path.is_file() and path.name != "commit_success.txt":  # by each checkpoint of its own
            place = str(path).partition("/frozen/")[2]
            files.setdefault(place, set()).add(path.stat().st_ino)
    assert files and all(len(inodes) == 1 for inodes in files.values())


@pytest.mark.full  # `run` stops and goes on below
def test_after_a_cut_in_the_middle_each_goes_on_with_the_same_bits(together: Fleet, tmp_path: Path):
    cut = Fleet(tmp_path, POLICIES)
    cut.advance(STEPS)  # one update more than is saved
    cut.crash()
    resumed = Fleet(tmp_path, POLICIES)
    assert {name: resumed.trainers.of(name).step for name in POLICIES} == dict.fromkeys(POLICIES, SAVE_EVERY)
    resumed.advance(STEPS)
    resumed.trainers.close()
    for name in POLICIES:
        assert resumed.bits(name) == together.bits(name) and resumed.rows(name) == together.rows(name)


def test_one_that_fails_is_named_and_saved_and_the_others_keep_their_bits(together: Fleet, tmp_path: Path):
    """A negative reward, which MaxRL refuses, in its second batch; another fails by what a worker finds."""
    fleet = Fleet(tmp_path, {"a": POLICIES["a"], **{name: {**POLICIES["c"], "seed": 4} for name in ("bad", "worse")}})
    fleet.advance(1)
    fleet.policies["bad"].feed(bad=True)
    assert not fleet.trainers.run_once()
    assert "reward" in fleet.failures.why["bad"] and fleet.trainers.of("bad").step == 1
    assert fleet.failures.steps == {"bad": 1}
    assert (fleet.policies["bad"].run.checkpoints / "rl" / "1").is_dir()
    fleet.failures.fail("worse", "its verifier does not start")
    fleet.advance(STEPS)
    assert fleet.trainers.failed()["worse"] == "its verifier does not start" and fleet.trainers.of("worse").step == 1
    fleet.trainers.close()
    assert fleet.bits("a") == together.bits("a") and fleet.rows("a") == together.rows("a")
    assert fleet.trainers.done() and fleet.trainers.step == STEPS + 2
    fleet.close_runs()
    again = Fleet(tmp_path, {"bad": {**POLICIES["c"], "seed": 4}})
    with pytest.raises(UserError, match=r"all policies have failed:\n  bad: .*reward"):
        again.run(bad=True)


@pytest.mark.full  # a worker's failure is in the test above, too
def test_one_that_a_worker_has_failed_is_updated_no_more(together: Fleet, tmp_path: Path):
    fleet = Fleet(tmp_path, {name: POLICIES[name] for name in ("a", "c")})
    fleet.advance(1)
    fleet.failures.fail("c", "its logits are no numbers")
    fleet.policies["c"].feed()
    fleet.advance(STEPS)
    assert fleet.trainers.done() and fleet.trainers.of("c").step == 1
    fleet.trainers.close()
    assert fleet.bits("a") == together.bits("a")
    fleet.failures.fail("a", "test")
    with pytest.raises(UserError, match="all policies have failed"):
        fleet.trainers.run_once()
    fleet.close_runs()


@pytest.mark.full  # `run` makes all updates of test_runs.py
def test_run_takes_turns_until_each_is_evaluated_or_stopped(together: Fleet, tmp_path: Path):
    """Stopped, it saves; the rest then gives the same bits as updates that are asked for one by one."""
    stopped = Fleet(tmp_path, POLICIES)
    made = stopped.run(stop=lambda: stopped.trainers.step >= 2)
    assert 2 <= made <= 4 and not stopped.trainers.finished, "two of them may be updated at once"
    stopped.close_runs()
    resumed = Fleet(tmp_path, POLICIES)
    assert resumed.trainers.step == made
    assert resumed.run() == STEPS * len(POLICIES) and resumed.trainers.finished
    for name in POLICIES:
        assert resumed.bits(name) == together.bits(name) and resumed.rows(name) == together.rows(name)
        events = read_rows(resumed.policies[name].run.events_path)
        assert [row["reason"] for row in events if row["event"] == "train_end"] == ["stop requested", "done"]
