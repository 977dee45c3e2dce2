"""What is compiled ahead of time for a policy trainer is what it runs: the same arrays, the same results."""

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_like.config_edit import set_path
from axlearn_like.layers.base import split
from axlearn_like.layers.decoder import Decoder
from axlearn_like.train_step import init_state
from mesh import UserError, make_mesh
from models.moe import tiny_moe
from rl.batching import pack_groups
from rl.messages import Group
from rl.objective.presets import dapo, grpo, rloo
from rl.policy_program import batch_shapes, make_policy_loss, policy_program
from rl.scoring import pack_rows
from tests.rl.tiny import make_group, make_prompt, tiny_experiment, tiny_params

GROUPS, SAMPLES, MAX_PROMPT, MAX_NEW = 4, 4, 12, 6


def groups() -> list[Group]:
    rng = np.random.default_rng(0)
    return [
        make_group(make_prompt(n, 5 + n), [rng.integers(0, 256, 1 + i) for i in range(SAMPLES)], np.arange(SAMPLES) / 4)
        for n in range(GROUPS)
    ]


@pytest.mark.parametrize("preset", [grpo, dapo, rloo])
def test_batches_have_the_described_arrays(preset):
    objective = preset().build()
    sizes = {"max_prompt": MAX_PROMPT, "max_new": MAX_NEW}
    batch, _ = pack_groups(groups(), objective, **sizes, row_multiple=2)
    described = batch_shapes(objective, groups=GROUPS, samples=SAMPLES, **sizes)
    assert {n: (a.shape, a.dtype) for n, a in batch.items()} == {n: (a.shape, a.dtype) for n, a in described.items()}


def test_the_described_step_takes_a_real_batch():
    trainer = tiny_experiment().build().trainer_cfg
    mesh = make_mesh({})
    program = policy_program(trainer, mesh, groups=GROUPS, samples=SAMPLES)
    sizes = {"max_prompt": MAX_PROMPT, "max_new": MAX_NEW}
    batch, _ = pack_groups(groups(), trainer.objective.build(), **sizes, row_multiple=trainer.row_multiple)
    rows = pack_rows(groups(), **sizes, row_multiple=trainer.row_multiple)
    assert isinstance(trainer.model, Decoder.Config)
    params = tiny_params(trainer.model)
    with jax.set_mesh(mesh):
        state = init_state(jax.tree.map(jax.numpy.asarray, params), trainer.learner.build())
        described = jax.tree.map(lambda a: (a.shape, a.dtype), program.state)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == described
        assert {n: rows[n].shape for n in ("tokens", "targets")} == {
            n: program.rows[n].shape for n in ("tokens", "targets")
        }
        new, metrics = program.step(state, batch)
    assert int(new["step"]) == 1 and np.isfinite(float(metrics["grad_norm"]))


def test_a_batch_that_does_not_divide_is_refused():
    trainer = tiny_experiment().build().trainer_cfg.clone(row_multiple=3, microbatches=2)
    expected = r"trainer\.row_multiple=3 is not a multiple of data x fsdp x expert x microbatches = 2"
    with pytest.raises(UserError, match=expected):
        policy_program(trainer, make_mesh({}), groups=GROUPS, samples=SAMPLES)


def test_sequences_longer_than_the_positions_are_refused():
    trainer = tiny_experiment().build().trainer_cfg
    set_path(trainer, "model.block.attention.rope.max_length", 16)
    with pytest.raises(UserError, match=r"max_prompt \+ max_new is 18, but policy\.block\.attention\.rope\.max_length"):
        policy_program(trainer, make_mesh({}), groups=GROUPS, samples=SAMPLES)


def test_the_losses_of_a_router_reach_the_policy_in_shares_of_the_microbatches():
    trainer = tiny_experiment().build().trainer_cfg
    model = tiny_moe(vocab_size=260, dim=32, num_layers=2, expert_hidden=16)
    graphdef, params = split(model.build(rngs=nnx.Rngs(0)))
    objective = trainer.objective.build()
    batch, _ = pack_groups(groups(), objective, max_prompt=MAX_PROMPT, max_new=MAX_NEW, row_multiple=2)

    def loss(microbatches: int):
        return jax.jit(make_policy_loss(graphdef, objective, trainer.temperature, microbatches))(params, batch)

    (whole, metrics), (half, _) = loss(1), loss(2)
    losses = [float(metrics[name]) for name in ("load_balance", "router_z")]
    assert min(losses) > 0
    np.testing.assert_allclose(float(whole - half), sum(losses) / 2, rtol=1e-3)
