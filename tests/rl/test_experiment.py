"""One config becomes all roles, consistently; what cannot work is refused before anything expensive."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.checkpoint.checkpointer import Checkpointer
from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.config import ConfigError, from_text, get_path, set_path, to_text
from axlearn_like.layers.base import Params
from axlearn_like.run.events import EventLog
from axlearn_like.training.trainer import Trainer
from mesh import UserError, make_mesh
from rl.controller.controller import Controller
from rl.controller.prompt_pool import PromptPool
from rl.experiment import RLExperiment
from rl.objective.presets import reinforce
from rl.parameter_server.client import connect_local
from rl.rollout.sampling import Sampler
from rl.runtime.run import RLRun
from rl.serving.policy import load_params, newest_weights
from rl.training.spec import TrainerServices
from rl.training.warm_start import warm_start_directory
from tests.axlearn_like.tiny import tiny_trainer
from tests.rl.parameter_server.small import pull
from tests.rl.tiny import tiny_experiment, tiny_params, tiny_run


def build(**changes: Any) -> RLExperiment:
    return tiny_experiment(**changes).build()


def host(params: Params) -> dict[str, bytes]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


# ---- what children are handed


def test_children_get_the_sizes_of_their_parent():
    experiment = build(staleness=2, sampler=Sampler.Config(temperature=0.6), num_steps=9)
    engine, controller, trainer = experiment.engine_cfg, experiment.controller_cfg, experiment.trainer_cfg
    assert (engine.max_prompt_tokens, engine.max_new_tokens) == (12, 6)
    assert (trainer.max_prompt_tokens, trainer.max_new_tokens, trainer.num_steps, trainer.staleness) == (12, 6, 9, 2)
    assert (controller.prompts_per_step, controller.samples_per_prompt, controller.num_steps, controller.staleness) == (
        4,
        4,
        9,
        2,
    )
    assert engine.sampler.temperature == trainer.temperature == 0.6
    assert engine.model == trainer.model == experiment.cfg.policy
    assert controller.groups_per_lease == 2


def test_an_engine_larger_than_the_batch_takes_it_in_one_lease():
    experiment = build()
    experiment.cfg.groups_per_lease = None
    assert RLExperiment(experiment.cfg).controller_cfg.groups_per_lease == 4


def test_the_stop_token_is_the_tokenizers_end_of_sequence_or_none():
    assert build().engine_cfg.stop_tokens == (257,)
    assert build(stop_at_eos=False).engine_cfg.stop_tokens == ()


def test_the_config_of_the_user_is_left_as_it_was():
    cfg = tiny_experiment()
    before = to_text(cfg)
    cfg.build()
    assert to_text(cfg) == before
    assert from_text(before) == cfg


def test_leases_of_a_controllers_next_incarnation_are_others(tmp_path: Path):
    cfg = tiny_experiment()
    experiment = cfg.build()
    with tiny_run(tmp_path / "r", cfg) as run:
        leases = []
        for _ in range(3):
            EventLog(run.events_path).append("controller", "start", pid=1)
            EventLog(run.events_path).append("trainer", "start", pid=2)
            controller = experiment.make_controller(run)
            controller.begin(0, 0)
            lease = controller.lease("w")
            assert lease is not None
            leases.append(lease.id)
    assert leases[0] < leases[1] < leases[2] and leases[2] - leases[1] > 1_000_000


# ---- version 0


@pytest.mark.slow
def test_the_first_version_is_the_same_for_trainer_server_and_workers(tmp_path: Path):
    cfg = tiny_experiment()
    experiment = cfg.build()
    with tiny_run(tmp_path / "r", cfg) as run:
        weights = connect_local(experiment.make_parameter_server())
        trainer = experiment.make_trainer(run, TrainerServices(experiment.make_controller(run), weights))
        trainer.start()
        expected = host(load_params(experiment, None, make_mesh()))
        assert host(trainer.state["params"]) == expected
        assert host(pull(weights, trainer.state["params"], 0)) == expected
        assert any(np.any(np.frombuffer(x, np.float32) != 0) for x in expected.values())


def test_after_a_warm_start_the_first_version_is_its_result(tmp_path: Path):
    """The supervised phase is a run of its own; here its checkpoint is written directly."""
    warm: Trainer.Config = tiny_trainer(3)
    cfg = tiny_experiment(warm_start=warm)
    experiment = cfg.build()
    learned = tiny_params(cfg.policy, seed=9)  # pyright: ignore
    with tiny_run(tmp_path / "r", cfg) as run:
        checkpointer = Checkpointer.Config().build(directory=warm_start_directory(run) / "checkpoints")
        params = jax.tree.map(jax.numpy.asarray, learned)
        checkpointer.save(3, {"params": params, "step": jax.numpy.int32(3)}, {})
        checkpointer.close()
        weights = connect_local(experiment.make_parameter_server())
        trainer = experiment.make_trainer(run, TrainerServices(experiment.make_controller(run), weights))
        assert host(trainer.state["params"]) == host(learned)
        assert host(load_params(experiment, newest_weights(run), make_mesh())) == host(learned)
        assert (trainer.step, int(trainer.state["step"])) == (0, 0)


@pytest.mark.slow
def test_rl_starts_from_the_parameters_of_a_supervised_run(tmp_path: Path):
    supervised: Trainer.Config = tiny_trainer(2)
    base = tiny_experiment()
    supervised.model = base.policy
    Trainer(supervised).run(tmp_path / "base", progress=False)
    learned = host(restore_params(tmp_path / "base"))
    cfg = tiny_experiment(start_from=StartFrom.Config(path=str(tmp_path / "base")))
    experiment = cfg.build()
    experiment.check_start()
    with tiny_run(tmp_path / "r", cfg) as run:
        weights = connect_local(experiment.make_parameter_server())
        trainer = experiment.make_trainer(run, TrainerServices(experiment.make_controller(run), weights))
        trainer.start()
        assert host(trainer.state["params"]) == learned
        assert host(pull(weights, trainer.state["params"], 0)) == learned
    assert host(load_params(experiment, None, make_mesh())) == learned


# ---- what cannot work


@pytest.mark.slow
def test_a_start_that_cannot_be_is_refused_and_nothing_is_written(tmp_path: Path):
    def refused(path: Path) -> str:
        cfg = tiny_experiment(start_from=StartFrom.Config(path=str(path)))
        with pytest.raises(ConfigError) as raised:
            RLRun(cfg.build(), say=lambda line: None).run(tmp_path / "run", runtime="inprocess")
        assert raised.value.path == "RLExperiment.start_from" and not (tmp_path / "run").exists()
        return str(raised.value)

    assert str(tmp_path / "nothing") in refused(tmp_path / "nothing")
    Trainer(tiny_trainer(1)).run(tmp_path / "other", progress=False)  # another vocabulary
    assert "embedding" in refused(tmp_path / "other")
    both = tiny_experiment(start_from=StartFrom.Config(path="runs/base"), warm_start=tiny_trainer(1))
    with pytest.raises(ConfigError, match=r"start_from: expected None with a warm start"):
        both.check("inprocess")


@pytest.mark.parametrize("sampler", [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
def test_a_truncating_sampler_is_refused_for_training(sampler: dict[str, Any]):
    with pytest.raises(UserError, match="sampler: expected the whole distribution"):
        tiny_experiment(sampler=Sampler.Config(**sampler)).check()


def test_too_few_kept_versions_are_refused_with_the_number_needed():
    cfg = tiny_experiment(staleness=3)
    with pytest.raises(UserError, match=r"^RLExperiment\.parameter_server\.keep: expected 5 or more .* got 4"):
        cfg.check()
    cfg.parameter_server.keep = 5
    cfg.check()


def test_check_accepts_the_tiny_experiment():
    tiny_experiment().check()
    tiny_experiment(evaluation=None, samples_per_prompt=1, objective=reinforce()).check()


def test_check_refuses_a_length_that_leaves_out_most_prompts():
    expected = (
        r"of \d+ problems of family '\w+', \d+ have more than max_prompt_tokens=7 prompt tokens and would be left out"
    )
    with pytest.raises(UserError, match=expected):
        tiny_experiment(max_prompt_tokens=7).check()
    tiny_experiment(max_prompt_tokens=7, controller=Controller.Config(long_prompts="truncate")).check()
    refusing = tiny_experiment(max_prompt_tokens=7, controller=Controller.Config(long_prompts="refuse"))
    with pytest.raises(UserError, match=r"problem \d+ of family '\w+' has \d+ prompt tokens; max_prompt_tokens is 7"):
        refusing.check()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("max_new", "max_new_tokens"),
        ("max_prompt", "max_prompt_tokens"),
        ("groups", "prompts_per_step"),
        ("samples", "samples_per_prompt"),
        ("controller.groups", "prompts_per_step"),
        ("controller.samples", "samples_per_prompt"),
        ("controller.max_prompt", "max_prompt_tokens"),
        ("controller.pool.solved_at", "correct_threshold"),
        ("engine.max_new", "max_new_tokens"),
        ("engine.max_prompt", "max_prompt_tokens"),
        ("trainer.max_new", "max_new_tokens"),
        ("trainer.max_prompt", "max_prompt_tokens"),
        ("trainer.solved_at", "correct_threshold"),
        ("trainer.support", "candidate_tokens"),
    ],
)
def test_an_earlier_name_of_a_size_is_refused_with_its_name_now(path: str, name: str):
    cfg = tiny_experiment()
    cfg.controller.pool = PromptPool.Config()
    owner, _, old = path.rpartition(".")
    for act in (lambda: set_path(cfg, path, "9"), lambda: (get_path(cfg, owner) if owner else cfg).set(**{old: 9})):
        with pytest.raises(UserError, match=rf": {old} is now {name}$"):
            act()


def test_check_refuses_more_tries_than_samples():
    with pytest.raises(UserError, match=r"RLExperiment\.samples_per_prompt: expected 4 or more, for pass@4 .*, got 2"):
        tiny_experiment(samples_per_prompt=2).check()
