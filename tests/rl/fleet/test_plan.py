"""The plan of a fleet: what it counts, what it refuses with the arithmetic, the compiler's figures, asked for once."""

import dataclasses
import json
from typing import Any

import jax
import pytest

from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.training.alignment.reference import FrozenCopy, WithoutAdapters
from experiments.modifiers import low_rank
from experiments.registry import get
from mesh import UserError
from mesh.cost.ahead_of_time import compile_step
from mesh.topology import find_compiler, parse_topology
from rl.fleet import memory
from rl.fleet.devices import parse_devices
from rl.fleet.fleet import Fleet, place
from rl.fleet.plan import NEXT_WEIGHTS, ROUNDED, RolePlan, plan_fleet
from rl.objective.presets import grpo, ppo
from rl.rollout.engine import RolloutEngine
from rl.runtime.run import RLRun
from rl.training.critic import Critic, SharedCritic
from tests.rl.tiny import tiny_experiment, tiny_params, tiny_policy
from tools import cli
from tools.aot.report import report_dict


def experiment(trainer: str, workers: str, **changes: Any):
    return tiny_experiment(fleet=Fleet.Config(trainer=trainer, workers=workers), **changes)


def nbytes(tree: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(tree))


def test_hosts_meshes_bytes_and_processes_are_counted():
    cfg = experiment("h100:16", "3 x h100:2")
    cfg.trainer.set(mesh={"fsdp": 4, "data": 4}, row_multiple=16)
    cfg.engine.mesh = {"tensor": 2}
    plan = plan_fleet(place(cfg))
    data = plan.as_dict()
    assert (data["hosts"], data["chips"], data["processes"]) == (2 + 1, 16 + 6, 2 + 3)
    assert data["roles"]["trainer"]["mesh"] == {"data": 4, "fsdp": 4}
    assert data["roles"]["trainer"]["devices_per_process"] == 8
    assert data["roles"]["worker"]["mesh"] == {"tensor": 2}
    weights = nbytes(tiny_params(cfg.policy))  # pyright: ignore
    assert data["bytes"] == {
        "push": weights,
        "push_per_host": weights // 2,
        "pull": weights,
        "pull_per_host": weights,
        "pulls_of_all_workers": 3 * weights,
        "frozen": 0,
    }
    assert data["fits"] and data["startable"] and plan.refusals == []
    assert json.loads(json.dumps(data)) == data


def test_devices_of_a_standby_are_counted():
    """Trainer of one process on four GPUs, three workers on one each; one more of either."""
    cfg = experiment("h100:4", "3 x h100:1", standby={"trainer": 1, "worker": 2})
    cfg.trainer.set(mesh={"fsdp": 4}, row_multiple=4)
    data = plan_fleet(place(cfg)).as_dict()
    assert (data["chips"], data["processes"]) == (2 * 4 + 5, 2 + 5)
    roles = data["roles"]
    assert [(roles[role]["count"], roles[role]["standby"]) for role in ("trainer", "worker")] == [(1, 1), (3, 2)]


def test_of_adapters_the_first_push_alone_has_the_frozen_parameters():
    """LoRA of rank 4 on a model of 0.5 B parameters moves a hundredth of its bytes with each version."""
    cfg: Any = get("qwen25_0_5b_rl")
    cfg.fleet = Fleet.Config(trainer="h200:1", workers="h200:1")
    whole = plan_fleet(place(cfg.clone()), compile_programs=False)
    low_rank(cfg)
    plan = plan_fleet(place(cfg), compile_programs=False)
    assert whole.push == whole.pull < 0.51 * plan.frozen  # rounded for workers, which of adapters merge what is not
    assert plan.pull == plan.push
    assert 100 < plan.frozen / plan.push < 500


def test_a_critic_on_the_trunk_counts_a_head_and_is_not_pushed():
    """A head of `dim` numbers and two moments each; that beside the policy is another model with its own."""
    learner = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-3))
    without = plan_fleet(place(experiment("h100:1", "h100:1")))
    shared = plan_fleet(place(experiment("h100:1", "h100:1", objective=ppo(SharedCritic.Config(learner=learner)))))
    apart = plan_fleet(place(experiment("h100:1", "h100:1", objective=ppo(Critic.Config(learner=learner.clone())))))
    state, head = without.trainer.holds["parameters and optimizer"], 4 * tiny_policy().dim
    assert shared.trainer.holds["parameters and optimizer"] == state
    assert 3 * head <= shared.trainer.holds["critic"] < 3 * head + 64  # and counters
    assert apart.trainer.holds["critic"] > 0.5 * state  # without the output head
    assert shared.trainer.holds["gradients"] == without.trainer.holds["gradients"] + head
    assert shared.push == without.push == apart.push


def test_rounded_weights_lie_beside_what_is_scored_before_the_advantages():
    """Two bytes of all but norms; engines that compute in float32 read nothing rounded."""
    learner = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-3))

    def beside(dtype: str, reward_kl: float) -> dict[str, int]:
        cfg = experiment("h100:1", "h100:1", objective=ppo(Critic.Config(learner=learner), reward_kl=reward_kl))
        cfg.policy.dtype = dtype  # pyright: ignore
        if reward_kl:
            cfg.trainer.reference = FrozenCopy.Config()
        found = plan_fleet(place(cfg), compile_programs=False).trainer.beside
        return {name: held[ROUNDED] for name, held in found.items() if ROUNDED in held}

    params: Any = tiny_params(tiny_experiment().policy)  # pyright: ignore
    leaves = jax.tree_util.tree_leaves_with_path(params)
    expected = sum(2 * leaf.size for path, leaf in leaves if "scale" not in jax.tree_util.keystr(path))
    assert beside("float32", 0.1) == {}
    assert beside("bfloat16", 0.0) == {"values": expected}
    assert beside("bfloat16", 0.1) == {"values": expected, "score": expected}


@pytest.mark.full
def test_a_reference_counts_what_it_holds_beside_the_policy():
    """A copy of all parameters; of adapters, a copy of these; the base without them, nothing."""
    cfg = experiment("h100:1", "h100:1", objective=grpo(kl_coef=0.1))
    parameters = nbytes(tiny_params(cfg.policy))  # pyright: ignore
    cfg.trainer.reference = FrozenCopy.Config()
    assert plan_fleet(place(cfg)).trainer.holds["reference policy"] == parameters
    low_rank(cfg)
    adapted = plan_fleet(place(cfg))
    assert adapted.trainer.holds["reference policy"] == adapted.push < parameters / 3
    cfg.trainer.reference = WithoutAdapters.Config()
    assert "reference policy" not in plan_fleet(place(cfg)).trainer.holds


def test_a_reference_with_devices_of_its_own_is_a_role_and_none_of_the_trainers_memory():
    """Weights alone; its hosts, chips, processes and the bytes that it reads are counted."""
    cfg = experiment("h100:1", "h100:1", objective=grpo(kl_coef=0.1))
    cfg.trainer.reference = FrozenCopy.Config()
    cfg.fleet.reference = "2 x h100:2"
    plan = plan_fleet(place(cfg))
    data, parameters = plan.as_dict(), nbytes(tiny_params(cfg.policy))  # pyright: ignore
    assert (data["chips"], data["processes"], data["hosts"]) == (1 + 1 + 4, 4, 2)
    role = data["roles"]["reference"]
    assert (role["mesh"], role["processes"], role["devices_per_process"]) == ({"fsdp": 4}, 2, 2)
    assert parameters / 4 <= role["holds"]["weights"] < parameters / 2  # norms are on every device
    assert data["bytes"]["reference"] == parameters and "reference policy" not in data["roles"]["trainer"]["holds"]
    assert data["startable"] and json.loads(json.dumps(data)) == data
    cfg.trainer.reference_mesh = {"tensor": 2}
    with pytest.raises(UserError, match=r"trainer\.reference_mesh: mesh tensor 2 needs 2 devices but there are 4"):
        plan_fleet(place(cfg))
    cfg.trainer.reference_mesh = {"fsdp": -1}
    cfg.fleet.reference, cfg.policy.block.feed_forward.hidden = "h100:1", 1 << 30  # pyright: ignore
    [line] = [line for line in plan_fleet(place(cfg)).refusals if line.startswith("reference")]
    assert (
        line == "reference: what it holds needs weights 192.00 GiB = 192.00 GiB, and a device of h100:1 has 80.00 GiB"
    )


def test_what_does_not_fit_is_refused_with_the_arithmetic():
    cfg = experiment("h100:1", "h100:1", engine=RolloutEngine.Config(max_num_seqs=8, pages=160_000_000))
    plan = plan_fleet(place(cfg))
    pages = plan.worker.holds["pages"]
    assert pages == 160_000_000 * 16 * 2 * 2 * 4 * 4  # tokens of a page, keys and values, heads, width, float32
    [line] = plan.refusals
    assert line.startswith("worker: what it holds needs weights 0.00 GiB + pages 152.59 GiB + " + NEXT_WEIGHTS)
    assert "= 152.59 GiB, and a device of h100:1 has 80.00 GiB; take fewer sequences" in line
    assert not plan.as_dict()["fits"] and not plan.as_dict()["startable"]


def test_two_versions_that_do_not_fit_are_refused_with_int8_weights():
    """Llama 70B on a v6e:2x4: 17.6 GB of weights on a device, twice."""
    holds = {"weights": 17_600_000_000, "pages": 100_000_000, NEXT_WEIGHTS: 17_600_000_000}
    [line] = RolePlan("worker", 1, parse_devices("v6e:2x4", "devices"), 1, {"tensor": 8}, holds, {}).shortages()
    assert "--apply int8_rollouts takes about 16.39 GiB less, or take more devices" in line


def test_windows_of_decoding_count_where_an_engine_has_them():
    assert "windows of decoding" not in plan_fleet(place(experiment("h100:1", "h100:1"))).worker.holds
    engine = RolloutEngine.Config(max_num_seqs=8, decode_from="windows")
    plan = plan_fleet(place(experiment("h100:1", "h100:1", engine=engine)))
    # 8 rows of 18 tokens, in whole half blocks of 64; keys and values, heads, width, float32.
    assert plan.worker.holds["windows of decoding"] == 8 * 32 * 2 * 2 * 4 * 4


def test_one_process_holds_what_both_roles_hold():
    alone = plan_fleet(place(experiment("h100:1", "h100:1")))
    plan = plan_fleet(
        place(experiment("h100:1", "trainer", engine=RolloutEngine.Config(max_num_seqs=8, pages=90_000_000)))
    )
    data = plan.as_dict()
    assert (data["hosts"], data["chips"], data["processes"]) == (1, 1, 1)
    assert plan.trainer.holds == alone.trainer.holds  # the engine sleeps while the trainer updates
    gradients = nbytes(tiny_params(tiny_experiment().policy))  # pyright: ignore
    assert plan.trainer.holds["gradients"] == gradients
    stays = {"parameters and optimizer": plan.trainer.holds["parameters and optimizer"]}
    assert plan.worker.holds == alone.worker.holds | {"pages": plan.worker.holds["pages"]} | stays
    assert [line.partition(":")[0] for line in plan.refusals] == ["worker"]
    with pytest.raises(UserError, match="fleet.workers: expected devices; 'trainer' needs --runtime inprocess"):
        RLRun(experiment("here", "trainer").build()).check("ray")


def test_a_program_needs_what_lies_beside_its_arguments_too():
    program = memory.ProgramMemory(arguments=3 << 30, beside=1 << 30, available=8 << 30)
    role = plan_fleet(place(experiment("h100:1", "h100:1"))).trainer
    role = dataclasses.replace(role, programs={"train": program}, beside={"train": {"optimizer": 5 << 30}})
    assert role.needed("train") == 9 << 30
    [line] = role.shortages()
    assert "program train needs arguments 3.00 GiB + the rest 1.00 GiB + optimizer 5.00 GiB = 9.00 GiB" in line
    assert dataclasses.replace(role, beside={}).shortages() == []


def test_a_worker_over_several_hosts_has_a_process_on_each_and_all_devices_in_its_mesh():
    cfg = experiment("h100:1", "3 x 2 x h100:1")
    plan = plan_fleet(place(cfg))
    [line] = plan.refusals
    assert "2 x h100:1 is 2 hosts of 1 devices, and engine.mesh has 1 of them" in line
    assert "expected all, such as engine.mesh={'tensor': 2}" in line
    assert plan.as_dict()["fits"] and not plan.as_dict()["startable"]
    cfg.engine.mesh = {"tensor": 2}
    data = plan_fleet(place(cfg)).as_dict()
    assert data["startable"] and (data["hosts"], data["chips"], data["processes"]) == (2, 1 + 6, 1 + 6)
    worker = data["roles"]["worker"]
    assert (worker["hosts"], worker["processes"], worker["devices_per_process"]) == (2, 2, 1)
    pulled, whole = data["bytes"]["pull_per_host"], data["bytes"]["pull"]
    params: Any = tiny_params(cfg.policy)  # pyright: ignore
    norms = sum(x.nbytes for path, x in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "scale")
    assert pulled == (whole - norms) // 2 + norms, "each host fetches its half, and what both have"
    assert data["bytes"]["pulls_of_all_workers"] == 6 * pulled


def test_a_mesh_that_does_not_divide_the_model_is_refused_by_the_layer():
    cfg = experiment("h100:1", "h100:16")
    cfg.engine.mesh = {"tensor": 16}
    with pytest.raises(UserError, match="num_kv_heads=2 do not divide evenly over the mesh .tensor 16"):
        plan_fleet(place(cfg))


def test_a_mesh_that_does_not_fit_the_roles_devices_is_refused_by_the_field():
    cfg = experiment("h100:8", "h100:1")
    cfg.trainer.set(mesh={"fsdp": 3}, row_multiple=3)
    with pytest.raises(UserError, match=r"trainer\.mesh: mesh fsdp 3 needs 3 devices but there are 8"):
        plan_fleet(place(cfg))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codec": "Delta"}, r"codec: no tensor codec 'Delta'.* did you mean 'delta'"),
    ],
)
def test_roles_that_have_no_devices_are_checked_too(fields: dict[str, Any], message: str):
    cfg = experiment("h100:1", "h100:1")
    cfg.parameter_server.set(**fields)
    with pytest.raises(UserError, match=message):
        plan_fleet(place(cfg), compile_programs=False)


def test_the_command_prints_the_plan_and_ends_with_one_object(capsys: pytest.CaptureFixture[str]):
    name = "tests.rl.tiny:tiny_experiment"
    fleet = ["--fleet", "trainer=h100:1,workers=4xh100:1", "--runtime", "inprocess"]
    assert cli.main(["rl", name, "--plan", "--json", *fleet]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out.splitlines()[-1])
    assert (data["hosts"], data["chips"], data["fits"]) == (1, 5, True) and data["seconds"] > 0
    assert cli.main(["rl", name, "--plan", "--json", *fleet, "--set", "engine.pages=90000000"]) == 2
    refused = capsys.readouterr()
    assert json.loads(refused.out.splitlines()[-1])["fits"] is False
    assert "this fleet cannot run the experiment:\n  worker: what it holds needs" in refused.err


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="libtpu is not installed")
def test_memory_is_the_compilers_and_is_asked_for_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    topology = parse_topology("v5e:1x1")
    placed = place(experiment("v5e:1x1", "v5e:1x1", num_steps=1))
    from mesh.topology import topology_devices

    program = placed.cfg.programs(topology_devices(topology))["score"]()
    first = memory.program_memory(program, topology)
    compiled = compile_step("score", program.trace, program.mesh, topology)
    assert compiled.memory is not None
    plan = compiled.memory
    assert (first.arguments, first.beside) == (plan.arguments, plan.peak - plan.arguments)
    assert first.available == plan.available and first.refusal is None
    assert first.seconds == pytest.approx(report_dict(program, compiled)["estimated_step_s"])
    assert memory.program_memory(program, topology, timed=False) == dataclasses.replace(first, seconds=None)

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(memory, "compile_step", refuse)
    assert memory.program_memory(program, topology) == first


def test_a_described_fleet_is_checked_before_the_run():
    fitting, short = ("h100:1", "h100:1"), RolloutEngine.Config(max_num_seqs=8, pages=160_000_000)
    RLRun(experiment(*fitting).build()).check("ray")
    with pytest.raises(UserError, match="this fleet cannot run the experiment:\n  worker: what it holds needs"):
        RLRun(experiment(*fitting, engine=short).build()).check("ray")


def test_roles_that_share_a_gpu_are_one_chip_and_one_host():
    plan = plan_fleet(place(experiment("h100:0.5", "2 x h100:0.25")))
    data = plan.as_dict()
    assert (data["hosts"], data["chips"], data["processes"]) == (1, 1, 3)
    memory = 80 << 30
    assert (plan.trainer.devices.memory, plan.worker.devices.memory) == (memory // 2, memory // 4)
