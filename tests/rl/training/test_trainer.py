"""Updates go the right way, agree with the sampler, and come out the same when a run is killed and resumed."""

import dataclasses
import math
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.layers.base import Params
from axlearn_like.learner import AdamW
from axlearn_like.operations.step_metrics import without_clock
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from mesh import UserError, make_mesh, shard_batch
from mesh.programs.shared import forget_programs
from rl.audit.alarms import raised_alarms
from rl.controller.controller import Controller
from rl.evaluation.evaluator import Evaluation
from rl.experiment import RLExperiment
from rl.objective.presets import grpo
from rl.parameter_server.client import ParameterServerClient, connect_local
from rl.protocol.messages import Group, Lease
from rl.rollout.engine import Request
from rl.rollout.sampling import Sampler
from rl.rollout.worker import RolloutWorker
from rl.training.packing import Packing
from rl.training.spec import FirstVersion, TrainerServices
from rl.training.trainer import PolicyTrainer
from tests.bounds import within
from tests.elsewhere import elsewhere
from tests.rl.parameter_server.small import publish, pull
from tests.rl.tiny import make_group, tiny_experiment, tiny_params, tiny_run
from tests.rl.training.whole_groups import pack_groups

pytestmark = pytest.mark.slow

STEPS = 4
SAVE_EVERY = 2  # of the tiny experiment


def config(**changes: Any) -> RLExperiment.Config:
    """Return a config with a temperature other than 1, so that code that ignores it fails."""
    return tiny_experiment(num_steps=STEPS, sampler=Sampler.Config(temperature=0.7), evaluation=None).set(**changes)


class Address:
    """Address of a role; after a restart another instance may answer there."""

    def __init__(self, role: Any):
        self.role = role

    def __getattr__(self, name: str) -> Any:
        return getattr(self.role, name)


@dataclasses.dataclass
class Roles:
    """Everything a run has in memory; all of it is lost in a crash."""

    experiment: RLExperiment
    run: RunDirectory
    controller: Controller
    weights: ParameterServerClient
    trainer: PolicyTrainer
    worker: RolloutWorker
    address: Address

    @staticmethod
    def make(path: Path, cfg: RLExperiment.Config, initial: Params | None = None) -> "Roles":
        experiment, run = cfg.build(), tiny_run(path, cfg)
        controller = experiment.make_controller(run)
        weights = connect_local(experiment.make_parameter_server())
        address: Any = Address(controller)
        if initial is None:
            trainer = experiment.make_trainer(run, TrainerServices(address, weights))
        else:
            runtime: Any = {"run": run, "services": TrainerServices(address, weights)}
            trainer = experiment.trainer_cfg.build(
                **runtime, first=FirstVersion(lambda abstract: put(initial, abstract))
            )
        verifier = experiment.make_verifier()
        worker = experiment.make_worker("worker-0", run, address, weights, verifier)
        trainer.start()
        return Roles(experiment, run, controller, weights, trainer, worker, address)

    def advance(self, step: int) -> None:
        with jax.set_mesh(make_mesh()):
            while self.trainer.step < step:
                while self.worker.run_once():
                    pass
                assert self.trainer.run_once()
                self.trainer.settle()

    def pulled(self, version: int) -> Params:
        return pull(self.weights, self.trainer.state["params"], version)

    def crash(self) -> None:
        """Stop without saving.

        Writes under way in the background may finish, so that which step survives is not left to chance.
        """
        self.trainer._session.tiers.wait()
        self.trainer._session.close()
        self.run.close()

    def rows(self) -> list[dict[str, Any]]:
        """The metrics, without what a clock said."""
        return [without_clock(row) for row in read_rows(self.run.metrics_path)]

    def submit(self, rewards: list[float], lengths: list[int]) -> list[Group]:
        """The groups of the next batch, by hand: sample i of each prompt is `lengths[i]` tokens of its own range."""
        groups: list[Group] = []
        while (lease := self.controller.lease("hand")) is not None and lease.step == self.trainer.step:
            groups += (mine := hand_made(lease, rewards, lengths))
            assert self.controller.submit(lease.id, tuple(mine))
        return groups


def hand_made(lease: Lease, rewards: list[float], lengths: list[int]) -> list[Group]:
    completions = [[40 * i + t for t in range(length)] for i, length in enumerate(lengths)]
    return [make_group(prompt, completions, rewards, version=lease.version) for prompt in lease.prompts]


def put(params: Params, abstract: Params) -> Params:
    return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), params, abstract)


def score(roles: Roles, groups: list[Group]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The trainer's log-probabilities of all tokens, [g, n, t], and the batch they are in."""
    cfg = roles.trainer.cfg
    batch, _ = pack_groups(
        groups,
        cfg.objective.build(),
        max_prompt_tokens=cfg.max_prompt_tokens,
        max_new_tokens=cfg.max_new_tokens,
        row_multiple=cfg.row_multiple,
    )
    with jax.set_mesh(roles.trainer._mesh):
        return np.asarray(roles.trainer.diff.logprobs(roles.trainer.state["params"], shard_batch(batch))), batch


def host(params: Params) -> dict[str, bytes]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


@pytest.fixture(scope="module", params=[0, 1], ids=["staleness 0", "staleness 1"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Roles:
    if request.param == 0:
        forget_programs()  # so that those of these runs can be counted
    roles = Roles.make(tmp_path_factory.mktemp("run") / "r", config(staleness=request.param))
    roles.advance(STEPS)
    roles.trainer.close()
    return roles


# ---- a whole run


@pytest.mark.numerics
def compilations(folder: str, mesh: dict[str, int], lengths: list[int] | None) -> dict[str, list[str]]:
    """Return the threads in which each program of two updates was compiled."""
    forget_programs()
    if (devices := math.prod(mesh.values())) > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    programs = ["score", "logprobs", *(["step"] if lengths is None else ["accumulate", "update"])]
    threads: dict[str, list[str]] = {f"jit({name})": [] for name in programs}

    def compiled(event: str, duration_secs: float, **about: Any) -> None:
        del duration_secs
        name = str(about.get("fun_name"))
        if event.endswith("backend_compile_duration") and name in threads:
            threads[name].append(threading.current_thread().name)

    cfg = config()
    cfg.trainer.set(packing=None if lengths is None else Packing.Config(lengths=tuple(lengths), rows=2), mesh=mesh)
    jax.monitoring.register_event_duration_secs_listener(compiled)
    roles = Roles.make(Path(folder) / "r", cfg)
    roles.advance(2)
    found = {name: list(names) for name, names in threads.items()}
    threads.clear()
    roles.crash()
    return found


@pytest.mark.parametrize("lengths", [None, [12]])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_the_first_update_runs_is_compiled_once_and_ahead(tmp_path: Path, devices: int, lengths: list[int] | None):
    """Described arguments are those of the call: else a program would be compiled again."""
    arguments = str(tmp_path), {"fsdp": devices}, lengths
    found = compilations(*arguments) if devices == 1 else elsewhere(compilations, *arguments)
    assert {name: len(threads) for name, threads in found.items()} == dict.fromkeys(found, 1)
    assert found["jit(step)" if lengths is None else "jit(accumulate)"] == ["background"]


def test_trainer_and_sampler_agree_on_every_batch(uninterrupted: Roles):
    """The same weights, other programs, float32: at most 1.2e-5 on a token (measured 2e-6), 1.2e-6 in the mean."""
    rows = uninterrupted.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert within(row["logprob_diff_max"], 1.2e-5)
        assert within(row["logprob_diff_mean"], 1.2e-6)
        assert row["scoring_diff_max"] == 0  # to the bit


@pytest.mark.numerics
def test_staleness_ratio_and_drift_tell_how_old_the_rollouts_are(uninterrupted: Roles):
    bound = uninterrupted.experiment.cfg.staleness
    for step, row in enumerate(uninterrupted.rows()):
        age = min(step, bound)
        assert (row["staleness_mean"], row["staleness_max"], row["version"]) == (age, age, step + 1)
        if age:
            assert row["drift_max"] > 1e-3  # the policy has moved since, and the metric shows it
        else:
            assert within(row["drift_max"], 1.2e-5)


def test_each_program_is_compiled_once(uninterrupted: Roles):
    """Runs of another staleness share them."""
    trainer = uninterrupted.trainer
    assert (trainer._loop.step_fn.step.compiled, trainer.diff._logprobs._cache_size()) == (1, 1)  # pyright: ignore


def test_the_newest_version_is_what_the_trainer_has(uninterrupted: Roles):
    published = uninterrupted.pulled(STEPS)
    assert host(published) == host(uninterrupted.trainer.state["params"])
    assert uninterrupted.weights.directory.latest() == STEPS
    assert uninterrupted.controller.status()["version"] == STEPS
    assert uninterrupted.controller.status()["consumed_steps"] == STEPS


@pytest.mark.parametrize("crash_at", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_killed_run_goes_on_as_if_nothing_had_been(uninterrupted: Roles, crash_at: int, tmp_path: Path):
    """Parameters, optimizer, every metric and every version still held are equal to the bit."""
    staleness = uninterrupted.experiment.cfg.staleness
    cfg = config(staleness=staleness)
    killed = Roles.make(tmp_path / "r", cfg)
    killed.advance(crash_at)
    killed.crash()
    resumed = Roles.make(tmp_path / "r", cfg)
    assert resumed.trainer.step == crash_at // SAVE_EVERY * SAVE_EVERY
    resumed.advance(STEPS)
    resumed.trainer.close()
    assert host(resumed.trainer.state) == host(uninterrupted.trainer.state)
    assert resumed.rows() == uninterrupted.rows()
    for version in resumed.weights.directory.versions():
        one, other = (roles.weights.directory.manifest(version) for roles in (resumed, uninterrupted))
        assert (one.checksum, one.tensors) == (other.checksum, other.tensors)


# ---- one update on groups written by hand


@pytest.fixture
def fresh(tmp_path: Path) -> Roles:
    """Before the first update, with weights under which no distribution is near uniform."""
    cfg = config()
    return Roles.make(tmp_path / "r", cfg, initial=tiny_params(cfg.policy))  # pyright: ignore


@pytest.mark.numerics
def test_an_update_raises_the_better_rollouts_against_the_others(fresh: Roles):
    groups = fresh.submit(rewards=[1.0, 0.0, 0.0, 0.5], lengths=[4, 6, 2, 5])
    before, batch = score(fresh, groups)
    assert fresh.trainer.run_once()
    after, _ = score(fresh, groups)
    gain = np.sum((after - before) * batch["action_mask"], axis=-1)  # [g, n]
    assert np.all(gain[:, 0] > 0.01)
    assert np.all(gain[:, 1] < -0.01) and np.all(gain[:, 2] < -0.01)
    assert np.all(gain[:, 0] > gain[:, 3]) and np.all(gain[:, 3] > gain[:, 1])
    (row,) = fresh.rows()
    assert row["reward"] == pytest.approx(0.375)
    assert row["train_tokens"] == sum(len(g.prompt.tokens) - 1 + 4 + 6 + 2 + 5 for g in groups)


@pytest.mark.parametrize("zero_variance", ["keep", pytest.param("drop", marks=pytest.mark.full)])
def test_a_batch_without_a_gradient_moves_nothing_though_adam_has_momentum(tmp_path: Path, zero_variance: str):
    """Parameters, moments and schedule are the same to the bit; the batch is consumed, counted and alarmed."""
    cfg = config(objective=grpo().set(zero_variance=zero_variance))
    cfg.learner.optimizer = AdamW.Config(weight_decay=0.1)
    roles = Roles.make(tmp_path / "r", cfg)
    roles.submit(rewards=[1.0, 0.0, 0.0, 0.5], lengths=[4, 6, 2, 5])
    assert roles.trainer.run_once()
    before = host({name: roles.trainer.state[name] for name in ("params", "opt_state")})
    for _ in range(2):
        roles.trainer.settle()
        roles.submit(rewards=[0.5] * 4, lengths=[3, 3, 4, 5])
        assert roles.trainer.run_once()
    assert host({name: roles.trainer.state[name] for name in ("params", "opt_state")}) == before
    assert int(roles.trainer.state["step"]) == roles.trainer.step == 3
    rows = roles.rows()
    assert [row["updates"] for row in rows] == [1, 0, 0]
    assert (rows[2]["loss"], rows[2]["zero_variance_fraction"], rows[2]["reward"]) == (0.0, 1.0, 0.5)
    alarm = raised_alarms(rows)["empty_batch"]
    assert (alarm["count"], alarm["first"], alarm["last"]) == (2, 2, 3)
    roles.trainer.settle()
    assert roles.weights.directory.latest() == 3  # they are versions, with the content of the one before
    checksums = {version: roles.weights.directory.manifest(version).checksum for version in (1, 2, 3)}
    assert len(set(checksums.values())) == 1


@pytest.mark.numerics
def test_engine_and_trainer_score_the_same_tokens_alike(fresh: Roles):
    """A float32 step at logits of 16 to 32 is 1.9e-6: at most 8 steps on any token (measured 2), 2 on average (0.4)."""
    engine = fresh.experiment.make_engine()
    engine.set_weights(fresh.pulled(0), 0)
    leases = [fresh.controller.lease("w") for _ in range(2)]
    prompts = [prompt for lease in leases if lease is not None for prompt in lease.prompts]
    with jax.set_mesh(make_mesh()):
        rollouts = engine.generate([Request(prompt, 4, seed=3) for prompt in prompts])
    groups = [
        dataclasses.replace(
            make_group(prompt, [[0]] * 4, [1.0, 0.0, 0.0, 0.0]), rollouts=tuple(rollouts[4 * i : 4 * i + 4])
        )
        for i, prompt in enumerate(prompts)
    ]
    logprobs, batch = score(fresh, groups)
    apart = np.abs(logprobs - batch["logprobs_behaviour"])[batch["action_mask"]]
    assert len(apart) == sum(len(r.tokens) for r in rollouts)
    assert within(apart, 1.6e-5) and within(apart.mean(), 4e-6)
    assert logprobs[batch["action_mask"]].max() > -1 and logprobs[batch["action_mask"]].min() < -6  # far from uniform


def test_checkpoints_are_told_when_they_are_on_disk(tmp_path: Path):
    roles = Roles.make(tmp_path / "r", config())
    roles.advance(STEPS)
    roles.trainer.close()
    saved = [row["step"] for row in read_rows(roles.run.events_path) if row["event"] == "saved"]
    assert sorted(set(saved)) == list(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))


# ---- when others die


def test_an_incomplete_batch_is_waited_for(fresh: Roles):
    lease = fresh.controller.lease("hand")
    assert lease is not None
    fresh.controller.submit(lease.id, tuple(hand_made(lease, [1.0, 0.0, 0.0, 0.0], [2, 2, 2, 2])))
    assert not fresh.trainer.run_once()
    assert (fresh.trainer.step, fresh.rows()) == (0, [])
    fresh.submit(rewards=[1.0, 0.0, 0.0, 0.0], lengths=[2, 2, 2, 2])
    assert fresh.trainer.run_once()
    assert fresh.trainer.step == 1


@pytest.mark.parametrize("left", [[], [1]], ids=["empty", "newest only"])
def test_a_parameter_server_that_restarted_is_filled_again(tmp_path: Path, left: list[int]):
    """The trainer publishes the newest version again, and those before it that workers may still ask for."""
    roles = Roles.make(tmp_path / "r", config(staleness=1))
    roles.submit(rewards=[1.0, 0.0, 0.0, 0.0], lengths=[2, 2, 2, 2])
    assert roles.trainer.run_once()
    roles.trainer.settle()
    versions = {version: roles.pulled(version) for version in (0, 1)}
    directory = roles.weights.directory
    checksums = [directory.manifest(version).checksum for version in (0, 1)]
    directory.rewind(-1)
    for version in left:
        publish(roles.weights, versions[version], version, roles.trainer._publication._pusher)  # pyright: ignore
    assert not roles.trainer.run_once()
    assert [directory.manifest(version).checksum for version in directory.versions()] == checksums
    specs = directory.manifest(0).tensors
    assert {spec.path for spec in specs if spec.unrounded} == {one.path for one in specs if "norm" in one.path} != set()


def test_the_version_under_evaluation_is_published_again_too(tmp_path: Path):
    evaluation = Evaluation.Config(problems_per_family=2, ks=(1,))
    roles = Roles.make(tmp_path / "r", config(evaluation=evaluation, evaluate_every=2))
    roles.advance(3)
    directory = roles.weights.directory
    checksum = directory.manifest(2).checksum
    directory.rewind(-1)
    assert not roles.trainer.run_once()
    roles.trainer.settle()
    assert directory.versions() == [2, 3] and directory.manifest(2).checksum == checksum


def test_a_controller_that_restarted_is_told_where_the_run_is(fresh: Roles):
    fresh.submit(rewards=[1.0, 0.0, 0.0, 0.0], lengths=[2, 2, 2, 2])
    assert fresh.trainer.run_once()
    fresh.trainer.settle()  # while a version is on its way, nothing is published again
    fresh.address.role = successor = fresh.experiment.make_controller(fresh.run)
    assert successor.lease("w") is None
    assert not fresh.trainer.run_once()
    lease = successor.lease("w")
    assert lease is not None and (lease.step, lease.version) == (1, 1)


# ---- what cannot be


def test_rows_that_do_not_divide_are_refused(tmp_path: Path):
    cfg = config()
    cfg.trainer.set(row_multiple=3, microbatches=2)
    with pytest.raises(UserError, match=r"RLExperiment\.trainer\.row_multiple: expected a multiple of .* = 2, got 3"):
        Roles.make(tmp_path / "r", cfg)
