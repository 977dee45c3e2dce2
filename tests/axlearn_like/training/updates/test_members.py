"""Programs of members of an elastic run, as they are described, against those that an update runs."""

from typing import Any

import jax
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.elastic.elastic import Elastic
from axlearn_like.elastic.experts import SpreadExperts
from axlearn_like.elastic.update import ElasticStep
from axlearn_like.training.step import init_state
from axlearn_like.training.updates.members import summed_step
from mesh import make_mesh
from mesh.rules import use_mesh
from tests.axlearn_like.tiny import tiny_trainer

PARTS = 4


def described(*args: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), args)


def test_the_described_programs_take_the_arrays_of_an_update():
    cfg = tiny_trainer(1, evaluators=(), elastic=Elastic.Config(parts=PARTS))
    mesh, learner = make_mesh(cfg.mesh), cfg.learner.build()
    programs = cfg.programs(jax.devices())
    assert list(programs) == ["train", "update", "eval"]
    train, update = programs["train"](), programs["update"]()
    assert (train.rows, update.rows) == (cfg.input.batch_size // PARTS, 0)
    taken: dict[str, Any] = {}
    with use_mesh(mesh, cfg.axis_rules):
        program = cfg.program(mesh, learner)
        step = summed_step(cfg, program, learner)
        for name in ("accumulate", "update"):
            run = getattr(step, name)

            def recorded(*args: Any, name: str = name, run: Any = run) -> Any:
                taken[name] = described(*args)
                return run(*args)

            setattr(step, name, recorded)
        params = jax.jit(lambda: program.init(jax.random.key(0)))()
        state = jax.device_put(init_state(params, learner), jax.tree.map(lambda x: x.sharding, program.state))
        batch = {name: np.zeros(x.shape, x.dtype) for name, x in cfg.batch(mesh).items()}
        ElasticStep(step, PARTS, None)(state, batch)
    for name, one in {"accumulate": train, "update": update}.items():
        assert jax.tree.leaves(taken[name]) == jax.tree.leaves(described(*one.trace().args_info[0])), name


def test_experts_over_members_have_no_such_programs_and_parts_that_do_not_divide_are_named():
    cfg = tiny_trainer(1, evaluators=(), elastic=Elastic.Config(experts=SpreadExperts.Config(slots=2)))
    with pytest.raises(ConfigError, match=r"Trainer.elastic: expected experts=None, to compile"):
        cfg.programs(jax.devices())
    with pytest.raises(ConfigError, match=r"batch_size: expected a multiple of 3: 3 parts \(elastic.parts\)"):
        tiny_trainer(1, elastic=Elastic.Config(parts=3)).check_sizes()
