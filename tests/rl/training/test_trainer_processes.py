"""The policy trainer as two real processes over one mesh: one decision, one checkpoint, one version."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.operations.step_metrics import without_clock
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.metrics import read_rows
from axlearn_like.training.alignment.reference import FrozenCopy
from mesh import UserError, enable_compilation_cache, make_mesh, shard_batch
from mesh.batches import local_rows
from mesh.devices import configure_cpu_devices
from mesh.distributed import ProcessGroup, join
from rl.experiment import RLExperiment
from rl.objective.presets import grpo, ppo, reinforce_pp
from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.server import ParameterServer
from rl.protocol.headers import GroupHeader, digest_of_headers, header_of
from rl.protocol.messages import Group, RolloutData, contents_of
from rl.runtime.run import RLRun
from rl.training.batching import PackedRows, PaddedRows, arrange, fill_packed, fill_padded
from rl.training.critic import Critic
from rl.training.packing import Packing
from rl.training.spec import FirstVersion, TrainerServices
from rl.training.steps.score import local_rollouts
from rl.training.steps.take import AgreedBatch, TakeStep
from rl.training.trainer import PolicyTrainer
from tests.elsewhere import elsewhere, in_two_processes, to_host
from tests.rl.parameter_server.test_any_mesh_to_any_mesh import endpoints, reach
from tests.rl.parameter_server.test_server import Deployment
from tests.rl.tiny import make_group, make_prompt, tiny_experiment, tiny_params, tiny_run

pytestmark = pytest.mark.timeout(900)  # several processes that compile: a busy machine takes long

STEPS = 5
SAVE_EVERY = 2  # of the tiny experiment


def config(processes: int = 2, layout: str = "padded", **changes: Any) -> RLExperiment.Config:
    """`layout`: padded or packed rows; "critic": PPO on packed rows; "reference": a penalty by token to version 0."""
    cfg = tiny_experiment(num_steps=STEPS, evaluation=None, staleness=1).set(**changes)
    cfg.trainer.set(mesh={"data": 2, "fsdp": 2}, processes=processes)
    if layout == "reference":
        cfg.objective = reinforce_pp(reward_kl=0.1)
        cfg.trainer.reference = FrozenCopy.Config()
    elif layout != "padded":
        cfg.trainer.set(packing=Packing.Config(lengths=(12, 6)))
    if layout == "critic":
        learner = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-2), clip_norm=1.0)
        cfg.objective = ppo(Critic.Config(learner=learner))
    return cfg


class Scripted:
    """A controller that has every batch ready: made up, the same wherever it is asked for. Notes what it is told."""

    def __init__(self, forget: int | None = None):
        """`forget`: the step of which it has no batch when it is first asked."""
        self._forget = forget
        self.told: list[list[Any]] = []
        self.given: list[int] = []  # bytes, each time that contents were asked for
        self._version = -1

    def begin(self, step: int, first_version: int, held: int | None = None, pool: Any = None) -> None:
        self.told.append(["begin", step, first_version])
        self._version = step

    def status(self) -> dict[str, Any]:
        return {"version": self._version, "evaluating": None}

    def next_batch(self, step: int, timeout: float = 0.0) -> list[Group] | None:
        if step == self._forget:
            self._forget = None
            return None
        return [made_up(4 * step + i, version=step) for i in range(4)]

    def headers(self, step: int, timeout: float = 0.0) -> list[GroupHeader] | None:
        groups = self.next_batch(step, timeout)
        return None if groups is None else [header_of(group) for group in groups]

    def contents(self, step: int, wanted: Mapping[int, tuple[int, ...]]) -> RolloutData | None:
        groups = self.next_batch(step)
        found = None if groups is None else contents_of(groups, wanted)
        self.given += [] if found is None else [nbytes_of(found)]
        return found

    def plan_after(self, step: int) -> dict[str, Any]:
        return {}

    def consumed(self, step: int) -> dict[str, float]:
        self.told.append(["consumed", step])
        return {}

    def finish(self, step: int) -> None:
        self.told.append(["finish", step])

    def published(self, version: int) -> None:
        self.told.append(["published", version])
        self._version = max(self._version, version)

    def evaluation(self, version: int) -> dict[str, float] | None:
        return None

    def missing(self, step: int) -> str:
        return f"step {step}"


def made_up(number: int, version: int) -> Group:
    """A group of random completions with random rewards, the same for the same number."""
    rng = np.random.default_rng(number)
    return make_group(make_prompt(number), rng.integers(0, 256, (4, 6)), rng.uniform(size=4), version=version)


def nbytes_of(contents: RolloutData) -> int:
    """Bytes of the arrays of rollouts, which are nearly all there is."""
    rollouts = [r for _, found in contents.values() for r in found.values()]
    return sum(x.nbytes for r in rollouts for x in (r.tokens, r.logprobs, r.versions, r.action_mask))


class Forgetful:
    """A directory that has died, and come back empty, when it is first asked what has become of a version."""

    def __init__(self, directory: Any, version: int):
        self._directory, self._version, self._keys = directory, version, set[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._directory, name)

    def open(self, version: int, pusher: str, processes: int) -> int:
        key = self._directory.open(version, pusher, processes)
        if version == self._version and not self._keys:
            self._keys.add(key)
        return key

    def commit(self, commit: Any) -> bool:
        return self._directory.commit(commit) and commit.key not in self._keys

    def outcome(self, key: int, timeout: float = 0.0) -> bool | list[int]:
        found = self._directory.outcome(key, timeout)
        return key not in self._keys if found is True else found


def as_one_of_two(
    address: str,
    index: int,
    places: list[dict[str, Any]],
    run: str,
    layout: str,
    leave_after: int | None,
    forget: int | None,
) -> dict[str, Any]:
    """Run the loop of one of the trainer's processes.

    The second process receives SIGTERM after an update; its controller loses one batch, and the parameter server dies
    before it has confirmed the publication of a version.
    """
    enable_compilation_cache()  # as the runtime does
    cfg, second = config(layout=layout), index == 1
    configure_cpu_devices(cfg.trainer.mesh, 2)
    join(address, index, 2, role="trainer")
    controller = Scripted(forget if second else None)
    trainer = make_trainer(Path(run), cfg, controller, reach(places))
    if second and forget is not None:
        publisher: Any = trainer._publication._publisher
        publisher._directory = Forgetful(publisher._directory, forget + 1)
    trainer.run(stop=lambda: second and trainer.step == leave_after)
    told = {"told": controller.told, "given": controller.given}
    return {"step": trainer.step, "local": jax.local_device_count(), **told}


def make_trainer(
    path: Path, cfg: RLExperiment.Config, controller: Scripted, weights: ParameterServerClient
) -> PolicyTrainer:
    """Make the trainer as `RLExperiment.make_trainer` does after a warm start."""
    return cfg.build().trainer_cfg.build(
        run=RunDirectory.attach(path),
        services=TrainerServices(controller, weights),
        first=FirstVersion(lambda abstract: restore_params(path.parent / "warm", abstract)),
        processes=ProcessGroup("trainer"),
    )


def warm(folder: Path) -> None:
    """Write the checkpoint that a supervised run on one device leaves."""
    checkpointer = Checkpointer.Config().build(directory=folder / "warm" / "checkpoints")
    params = jax.tree.map(jnp.asarray, tiny_params(config().policy))  # pyright: ignore[reportArgumentType]
    checkpointer.save(1, {"step": jnp.int32(1), "params": params}, {})
    checkpointer.close()


def alone(places: list[dict[str, Any]], run: str, layout: str) -> list[list[Any]]:
    """The same run, or the rest of it, in one process with as many devices."""
    enable_compilation_cache()
    jax.config.update("jax_num_cpu_devices", 4)
    cfg = config(processes=1, layout=layout)
    controller = Scripted()
    assert make_trainer(Path(run), cfg, controller, reach(places)).run() == STEPS
    return controller.told


@pytest.fixture
def deployment() -> Any:
    made = Deployment(ParameterServer.Config(shared_memory=False, shard_servers=2), remote=True)
    yield made
    made.close()


@pytest.mark.numerics
@pytest.mark.full
@pytest.mark.parametrize("layout", ["padded", "packed", "critic", "reference"])
def test_two_processes_are_one_trainer_and_one_goes_on_where_they_stopped(
    tmp_path: Path, deployment: Deployment, layout: str
):
    places = endpoints(deployment)
    warm(tmp_path)
    for name in ("two", "one"):
        tiny_run(tmp_path / name, config(layout=layout)).close()
    leader, other = in_two_processes(as_one_of_two, places, str(tmp_path / "two"), layout, 3, 1)
    assert [leader["step"], other["step"]] == [3, 3], "who was asked to leave spoke for both"
    assert leader["local"] == 2
    assert other["told"] == [], "only the leader speaks with the controller"
    begun = [["published", 0], ["begin", 0, 0], ["consumed", 0], ["published", 1]]
    assert leader["told"] == [*begun, ["consumed", 1], ["published", 2], ["consumed", 2], ["published", 3]]
    pushes = list(rows(tmp_path / "two", "push"))
    assert sorted((row["role"], row["version"]) for row in pushes) == [  # what was sent again is no event
        (role, version) for role in ("trainer", "trainer-1") for version in range(4)
    ]
    assert sum(row["nbytes"] for row in pushes if row["version"] == 3) == nbytes(), "each byte is pushed once"
    assert {row["role"] for row in rows(tmp_path / "two", "update")} == {"trainer"}

    assert elsewhere(alone, places, str(tmp_path / "two"), layout, timeout=600)[:2] == [
        ["published", 3],
        ["begin", 3, 2],
    ]
    elsewhere(alone, places, str(tmp_path / "one"), layout, timeout=600)
    ours, theirs = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    assert all(("divergence_mean" in row) == (layout == "reference") for row in ours)
    assert all(("value_loss" in row) == (layout == "critic") for row in ours)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(1, STEPS + 1))
    for row, expected in zip(ours, theirs, strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)  # sums over processes have another order


@pytest.mark.full
def test_a_run_is_the_same_to_the_bit_whether_two_processes_were_stopped_or_not(tmp_path: Path, deployment: Deployment):
    places = endpoints(deployment)
    warm(tmp_path)
    for name, leave_after in (("whole", None), ("stopped", 3)):
        tiny_run(tmp_path / name, config(layout="packed")).close()
        in_two_processes(as_one_of_two, places, str(tmp_path / name), "packed", leave_after, None)
    in_two_processes(as_one_of_two, places, str(tmp_path / "stopped"), "packed", None, None)
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    assert manifest(tmp_path / "stopped") == manifest(tmp_path / "whole")


def test_each_process_fetches_its_own_rows_and_together_they_have_all():
    found = in_two_processes(fill_in_two)
    groups = uneven()
    whole = nbytes_of(contents_of(groups))
    for layout in ("packed", "padded"):
        given = [one[layout]["bytes"] for one in found]
        assert sum(given) == whole, "no rollout is fetched twice"
        assert max(given) < 0.7 * whole
        expected = {name: np.asarray(x) for name, x in arrays_of(groups, packed=layout == "packed").items()}
        for one in found:
            assert one[layout]["arrays"].keys() == expected.keys()
            for name, array in one[layout]["arrays"].items():
                np.testing.assert_array_equal(np.asarray(array), expected[name], err_msg=name)
    assert [one["changed"] for one in found] == [None, None], "what differs from its header is fetched again"


def uneven() -> list[Group]:
    """Eight groups of four completions of 1 to 8 tokens."""
    rng = np.random.default_rng(0)
    completions = [[rng.integers(0, 256, rng.integers(1, 9)) for _ in range(4)] for _ in range(8)]
    return [make_group(make_prompt(g), made, rng.uniform(size=4)) for g, made in enumerate(completions)]


def arrays_of(groups: list[Group], source: Any = None, group: Any = None, *, packed: bool) -> dict[str, np.ndarray]:
    """Arrays of an update, microbatches one after another, that lie where the mesh in force says."""
    sizes: dict[str, Any] = {"max_prompt_tokens": 5, "max_new_tokens": 8}
    objective = grpo().set(old_policy="current").build()
    packing = Packing.Config(lengths=(16,), rows=2).build(**sizes) if packed else None
    headers = [header_of(one) for one in groups]
    layout = PackedRows(packing, shards=4) if packing else PaddedRows(**sizes, row_multiple=4)
    arranged = arrange(headers, objective, layout)
    agreed = AgreedBatch(0, headers, contents_of(groups) if source is None else None)
    where: Any = source
    contents = TakeStep(where, cast(Any, group)).contents(agreed, local_rollouts(arranged))
    assert contents is not None
    found: dict[str, list[np.ndarray]] = {}
    for one in arranged.microbatches:
        own = [one.rows[row] for row in local_rows(len(one.rows))]
        if packing is None:
            batch = fill_padded(own, arranged.prepared, contents, 5, 8, 4)
        else:
            batch = fill_packed(own, one.length, arranged.prepared, contents, packing)
        for name, array in shard_batch(batch, rows=len(one.rows)).items():
            found.setdefault(name, []).append(to_host(array))
    return {name: np.concatenate(parts) for name, parts in found.items()}


class Held(Scripted):
    """A controller that holds these groups, whatever the step."""

    def __init__(self, groups: list[Group]):
        super().__init__()
        self.groups = groups

    def next_batch(self, step: int, timeout: float = 0.0) -> list[Group] | None:
        return self.groups


def fill_in_two(address: str, index: int) -> dict[str, Any]:
    """Bytes fetched by one of two processes, and the arrays that both have filled together."""
    jax.config.update("jax_num_cpu_devices", 2)
    join(address, index, 2, role="trainer")
    group, groups, found = ProcessGroup("trainer"), uneven(), dict[str, Any]()
    with jax.set_mesh(make_mesh({"data": 2, "fsdp": 2})):
        for layout in ("packed", "padded"):
            source = Held(groups)
            arrays = arrays_of(groups, source, group, packed=layout == "packed")
            found[layout] = {
                "bytes": sum(source.given),
                "arrays": {name: array.tolist() for name, array in arrays.items()},
            }
    agreed = TakeStep(cast(Any, Held(groups)), group)(0, 0.0)
    assert agreed is not None and agreed.contents is None
    other = Held(groups if index == 0 else groups[::-1])  # one process is given other tokens
    changed = TakeStep(cast(Any, other), group).contents(agreed, [(0, 0)])
    return {**found, "changed": changed and "fetched"}


def rows(path: Path, event: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(path / "events.jsonl") if row["event"] == event]


def metrics(path: Path) -> list[dict[str, Any]]:
    rows = [without_clock(row) for row in read_rows(path / "metrics.jsonl")]
    return [{name: value for name, value in row.items() if name != "phase"} for row in rows]


def manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / "checkpoints" / "rl" / str(STEPS) / "manifest" / "metadata").read_text())


def nbytes() -> int:
    return sum(array.nbytes for array in jax.tree.leaves(tiny_params(config().policy)))  # pyright: ignore


# ---- what is refused, before anything is started


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"processes": 0}, "trainer.processes: expected 1 or more, got 0"),
        ({"processes": 2, "mesh": {}}, "trainer.mesh: expected axes, such as {'fsdp': 2}"),
        ({"processes": 3, "mesh": {"fsdp": 4}}, "trainer.mesh: .* divide over 3 processes"),
        ({"processes": 2, "mesh": {"fdsp": 4}}, "mesh has no axis 'fdsp'; did you mean 'fsdp'"),
        ({"processes": 2, "mesh": {"fsdp": 8}}, "trainer.row_multiple: expected a multiple of .* = 8, got 4"),
        ({"processes": 2, "mesh": {"tensor": 4}}, r"policy\.block\.attention: .*num_kv_heads=2 do not .*tensor 4"),
        ({"processes": 2, "mesh": {"data": 4}, "slices": {"data": 3}}, "slices data 3 is for 3 slices but there is 1"),
    ],
)
def test_processes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str):
    cfg = tiny_experiment()
    cfg.trainer.set(**changes)
    with pytest.raises(UserError, match=message):
        RLRun(cfg.build()).check("ray")


def test_in_one_process_there_are_not_two():
    with pytest.raises(UserError, match="trainer.processes: expected 1 with --runtime inprocess; .* got 2"):
        RLRun(config().build()).check("inprocess")


def test_batches_are_the_same_if_their_digests_are():
    def make() -> list[Group]:
        first, second = make_prompt(1), make_prompt(2)
        return [make_group(first, [[1, 2], [3]], [0.5, 1.0]), make_group(second, [[4], [5, 6]], [0.0, 1.0])]

    def digest(groups: list[Group]) -> str:
        return digest_of_headers([header_of(group) for group in groups])

    groups = make()
    assert digest(groups) == digest(make())
    others = [
        groups[::-1],
        groups[:1],
        [groups[0], make_group(make_prompt(2), [[4], [5, 7]], [0.0, 1.0])],
        [groups[0], make_group(make_prompt(2), [[4, 5], [6]], [0.0, 1.0])],
        [groups[0], make_group(make_prompt(2), [[4], [5, 6]], [0.0, 0.5])],
        [groups[0], make_group(make_prompt(2), [[4], [5, 6]], [0.0, 1.0], version=1)],
    ]
    assert len({digest(other) for other in (groups, *others)}) == 1 + len(others)
