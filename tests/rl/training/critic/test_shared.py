"""The critic on the policy's trunk: loss and gradient beside float64 loops, and a run, which resumes to the bit."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.learner import AdamW, Constant, Learner
from axlearn_like.training.step import init_state
from mesh import make_mesh, shard_batch
from rl.objective import Objective
from rl.objective.presets import ppo
from rl.protocol.headers import header_of
from rl.protocol.messages import Group, contents_of
from rl.training.batching import PackedRows, PaddedRows, arrange, fill_packed, fill_padded
from rl.training.critic import SharedCritic
from rl.training.critic.shared import ValueTerm
from rl.training.packing import Packing
from rl.training.program import make_packed_loss, make_policy_loss
from rl.training.spec import UpdateSpec
from rl.training.updates import Updates
from tests.elsewhere import elsewhere
from tests.rl.tiny import tiny_experiment, tiny_params, tiny_policy
from tests.rl.training.batching.made import MAX_NEW, MAX_PROMPT, ragged
from tests.rl.training.critic.packed import assert_packed_rows_learn_the_same
from tests.rl.training.test_trainer import Roles, config, host

LEARNER = Learner.Config(optimizer=AdamW.Config(), schedule=Constant.Config(lr=1e-2), clip_norm=1.0)
SIZES: dict[str, Any] = {"max_prompt_tokens": MAX_PROMPT, "max_new_tokens": MAX_NEW}
TEMPERATURE = 0.7
PACKED = Packing.Config(lengths=(3 * MAX_NEW,), rows=8)


def shared(**fields: Any) -> SharedCritic.Config:
    return SharedCritic.Config(learner=LEARNER.clone(), **fields)


def with_critic(**fields: Any) -> Any:
    cfg = config(objective=ppo(shared(**fields)), num_steps=8)
    cfg.trainer.checkpoint.set(save_every=2, keep=9)
    return cfg


def made_groups() -> list[Group]:
    """Groups of 7 of which the verifier failed on some; a rollout that was cut off, and a tool's token in another."""
    groups = ragged(failed=True)
    long = next(r for r in groups[2].rollouts if len(r.tokens) > 2)
    long.action_mask[1] = False
    return groups


def batch_of(objective: Objective, values: np.ndarray, packing: Packing.Config | None) -> dict[str, np.ndarray]:
    """Arrays of an update of one microbatch, by the trainer's own functions."""
    groups = made_groups()
    headers, contents = [header_of(one) for one in groups], contents_of(groups)
    built = None if packing is None else packing.build(**SIZES)
    layout = PaddedRows(**SIZES, row_multiple=8) if built is None else PackedRows(built)
    arranged = arrange(headers, objective, layout, values=values)
    (one,) = arranged.microbatches
    if built is not None:
        return fill_packed(one.rows, one.length, arranged.prepared, contents, built)
    return fill_padded(one.rows, arranged.prepared, contents, **SIZES, samples=7)


def plain_rows(params: Any) -> jax.Array:
    """Final hidden states [rollouts, MAX_NEW, dim] in which each token is drawn, of a row for each rollout."""
    length = MAX_PROMPT + MAX_NEW
    rollouts = [(one.prompt.tokens, rollout.tokens) for one in made_groups() for rollout in one.rollouts]
    whole, first = np.zeros((len(rollouts), length), np.int32), [len(prompt) - 1 for prompt, _ in rollouts]
    for row, (prompt, tokens) in enumerate(rollouts):
        whole[row, : len(prompt) + len(tokens)] = np.concatenate([prompt, tokens])
    index = np.minimum(np.asarray(first)[:, None] + np.arange(MAX_NEW), length - 1)
    # Tokens that follow a rollout are behind its end: causal attention does not see it.
    positions = jnp.broadcast_to(jnp.arange(length), whole.shape)
    model = bind(split(build_abstract(tiny_policy()))[0], params)
    hidden = model.hidden(jnp.asarray(whole), PackedContext(positions, jnp.ones(whole.shape, jnp.int32))).x
    return jnp.take_along_axis(hidden, index[..., None], axis=1)


def reference(cfg: SharedCritic.Config, returns: Any, before: Any, weights: Any, states: Any, head: Any) -> Any:
    """Return the value loss and its slopes by the values, in float64 loops over rollouts and tokens."""
    loss, slopes = 0.0, np.zeros(returns.shape)
    for at in np.ndindex(*returns.shape):
        value = float(sum(x * w for x, w in zip(states[at].astype(float), head.astype(float), strict=True)))
        target, old, weight, near = returns[at], before[at], weights[at], value
        if cfg.value_clip is not None:
            near = old + min(max(value - old, -cfg.value_clip), cfg.value_clip)
        loss += 0.5 * weight * max((value - target) ** 2, (near - target) ** 2)
        if near == value or (value - target) ** 2 >= (near - target) ** 2:
            slopes[at] = weight * (value - target)
    return loss, slopes


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize(
    ("packing", "fields"),
    [
        (PACKED, {"value_clip": 0.3}),
        pytest.param(None, {"value_clip": None}, marks=pytest.mark.full),
        pytest.param(PACKED.clone(tree=True), {"value_clip": 0.3}, marks=pytest.mark.full),
        pytest.param(None, {"detach": True}, marks=pytest.mark.full),
    ],
    ids=["packed", "padded", "tree", "detached"],
)
def test_loss_and_gradient_are_those_of_float64_loops(packing: Packing.Config | None, fields: dict[str, Any]):
    """The policy's loss plus `coef` times the values'; so is the trunk's gradient, and the head has its own."""
    cfg, rng = shared(coef=0.4, **fields), np.random.default_rng(1)
    model, objective = tiny_policy(), ppo(cfg).set(old_policy="current").build()
    values = rng.normal(0.4, 0.3, (21, MAX_NEW))
    batch = batch_of(objective, values, packing)
    flat = arrange([header_of(one) for one in made_groups()], objective, PaddedRows(**SIZES), values=values)
    weights, returns = (flat.prepared.arrays[n].reshape(21, MAX_NEW) for n in ("metric_weights", "returns"))
    with jax.set_mesh(make_mesh({})):
        graphdef, policy = split(build_abstract(model))[0], tiny_params(model)
        term, head = ValueTerm(cfg, model), rng.normal(0, 0.2, (model.dim, 1)).astype(np.float32)
        make: Any = make_policy_loss if packing is None else make_packed_loss
        spec = UpdateSpec(TEMPERATURE, max_new_tokens=None if packing is None else MAX_NEW)
        joint = make(graphdef, objective, dataclasses.replace(spec, values=term))
        alone = make(graphdef, objective, spec)
        params = {"policy": policy, "critic": {"weight_dv": head}}
        (loss, metrics), slopes = jax.jit(jax.value_and_grad(joint, has_aux=True))(params, batch)
        (base, _), without = jax.jit(jax.value_and_grad(alone, has_aux=True))(policy, batch)
        states, vjp = jax.vjp(jax.jit(plain_rows), policy)
        expected, of_values = reference(cfg, returns, values, weights, np.asarray(states), head[:, 0])
        of_trunk = vjp(jnp.asarray(0.4 * of_values[..., None] * head[:, 0], jnp.float32))[0]
    assert np.count_nonzero(of_values) > 20 and np.count_nonzero(weights) > np.count_nonzero(of_values) - 1
    np.testing.assert_allclose(metrics["value_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(loss, base + 0.4 * expected, rtol=1e-5)
    of_head = 0.4 * np.einsum("nt,ntd->d", of_values, np.asarray(states, np.float64))
    np.testing.assert_allclose(slopes["critic"]["weight_dv"][:, 0], of_head, rtol=1e-4, atol=1e-5 * abs(of_head).max())
    for found, before, added in zip(*(jax.tree.leaves(x) for x in (slopes["policy"], without, of_trunk)), strict=True):
        added = np.zeros_like(added) if cfg.detach else np.asarray(added)
        assert cfg.detach or np.any(added)
        scale = 1e-5 * max(np.abs(found).max(), np.abs(added).max())
        np.testing.assert_allclose(np.asarray(found) - np.asarray(before), added, rtol=1e-3, atol=scale)


def test_what_cannot_work_is_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"coef: expected a number above 0"):
        shared(coef=0.0).check()
    trainer = tiny_experiment(objective=ppo(shared())).build().trainer_cfg
    with pytest.raises(ConfigError, match=r"replay_routing: expected False with a SharedCritic"):
        trainer.clone(replay_routing=True).check_fields()


@pytest.mark.slow
def test_its_programs_are_an_update_with_the_head_and_the_values():
    """No program, and no memory, of a second model: the head is in the state of the policy's update."""
    programs = tiny_experiment(objective=ppo(shared())).programs(jax.devices()[:1])
    assert "values" in programs and "critic" not in programs
    assert programs["values"]().trace().out_info.shape == (16, 32)
    state, metrics = programs["train"]().trace().out_info
    assert jax.tree.map(lambda x: x.shape, state["critic"]["params"]) == {"weight_dv": (16, 1)}
    assert "head" not in state["params"] and {"value_loss", "critic_grad_norm", "loss"} <= metrics.keys()


@pytest.mark.slow
@pytest.mark.numerics
def test_values_before_an_update_are_of_the_states_in_which_tokens_are_drawn():
    model, rng = tiny_policy(), np.random.default_rng(2)
    groups, head = made_groups(), rng.normal(0, 0.2, (model.dim, 1)).astype(np.float32)
    with jax.set_mesh(make_mesh({})):
        critic = shared().build(
            policy=model, graphdef=split(build_abstract(model))[0], sizes=PaddedRows(**SIZES, row_multiple=8)
        )
        policy = jax.tree.map(jnp.asarray, tiny_params(model))
        state = {"params": policy, "critic": {"params": {"weight_dv": jnp.asarray(head)}}}
        found = critic.values([header_of(one) for one in groups], contents_of(groups), state)
        expected = np.asarray(jax.jit(plain_rows)(policy) @ head)[..., 0]
    lengths = np.asarray([len(rollout.tokens) for one in groups for rollout in one.rollouts])
    inside = np.arange(MAX_NEW) < lengths[:, None]
    np.testing.assert_allclose(found, np.where(inside, expected, 0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_workers_pull_the_policy_alone(tmp_path: Path):
    roles = Roles.make(tmp_path, with_critic(), initial=tiny_params(tiny_policy()))
    roles.advance(2)
    first, second = roles.rows()
    assert first["value_mean"] == 0 and second["value_mean"] != 0 and first["critic_grad_norm"] > 0
    assert first["value_loss"] > 0 and {"explained_variance", "value_clip_fraction"} <= second.keys()
    assert jax.tree.structure(roles.pulled(2)) == jax.tree.structure(tiny_params(tiny_policy()))
    assert np.any(np.asarray(roles.trainer.state["critic"]["params"]["weight_dv"]))
    roles.trainer.close()


@pytest.mark.full
def test_packed_rows_learn_what_padded_ones_do(tmp_path: Path):
    assert_packed_rows_learn_the_same(with_critic, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("several", [False, True])
def test_it_learns_and_resumes_to_the_bit(tmp_path: Path, several: bool):
    """The same by several updates a batch, of which the values before the first are kept."""
    cfg = with_critic(coef=0.5)
    if several:
        cfg.trainer.updates = Updates.Config(minibatches=2, epochs=2)
    initial = tiny_params(cfg.policy)
    whole = Roles.make(tmp_path / "whole", cfg, initial=initial)
    whole.advance(8)
    whole.trainer.close()
    rows = whole.rows()
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2])
    assert rows[0]["value_mean"] == 0 and rows[-1]["value_mean"] > 0.2 * rewards[-1]
    # Half of what predicting 0 costs at least; rewards have grown.
    assert rows[-1]["value_loss"] < 0.25 * rewards[-1] ** 2

    part = Roles.make(tmp_path / "part", cfg, initial=initial)
    part.advance(4)
    part.crash()  # a checkpoint of update 4 is there
    again = Roles.make(tmp_path / "part", cfg)
    again.advance(8)
    again.trainer.close()
    assert host(again.trainer.state) == host(whole.trainer.state)
    assert [row["value_loss"] for row in again.rows()] == [row["value_loss"] for row in rows]


@pytest.mark.numerics
@pytest.mark.full
def test_on_eight_devices_it_is_what_it_is_on_one():
    shapes = [{"fsdp": 8}, {"data": 4, "tensor": 2}, {"pipeline": 2, "fsdp": 4}, {"sequence": 4, "fsdp": 2}]
    eight = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    one, *meshes = elsewhere(updated, shapes, environ=eight, timeout=500)
    assert np.any(one["values"])
    for shape, found in zip(shapes, meshes, strict=True):
        for name, value in found.items():
            np.testing.assert_allclose(value, one[name], rtol=1e-3, atol=1e-5, err_msg=f"{shape} {name}")


def updated(shapes: list[dict[str, int]]) -> list[dict[str, Any]]:
    """Return values, metrics and the head after two updates by a batch, on one device and on each mesh."""
    found: list[dict[str, Any]] = []
    model = tiny_policy(num_layers=2)
    model.pipeline.microbatches = 2
    cfg = tiny_experiment(objective=ppo(shared(coef=0.4)), policy=model, **SIZES)
    cfg.trainer.row_multiple = 8
    trainer = cfg.build().trainer_cfg
    for axes in ({}, *shapes):
        mesh = make_mesh(axes, jax.devices()[: 8 if axes else 1])
        program, learner = trainer.program(mesh), trainer.build_learner()
        places = jax.tree.map(lambda a: a.sharding, program.state)
        headers, contents = [header_of(one) for one in made_groups()], contents_of(made_groups())
        with jax.set_mesh(mesh):
            policy = jax.device_put(tiny_params(model), places["params"])
            state: Any = jax.jit(partial(init_state, learner=learner), out_shardings=places)(policy)
            critic, values, metrics = trainer.build_critic(program.graphdef), np.zeros(0), {}
            assert critic is not None
            for _ in range(2):
                values = critic.values(headers, contents, state)
                arranged = arrange(
                    headers, trainer.build_objective(), PaddedRows(**SIZES, row_multiple=8), values=values
                )
                (rows,) = arranged.microbatches
                batch = fill_padded(rows.rows, arranged.prepared, contents, **SIZES, samples=7)
                state, metrics = program.step(state, shard_batch(batch, rows=8, by_length=False))
            head = np.asarray(state["critic"]["params"]["weight_dv"])
        kept = {name: float(value) for name, value in metrics.items()}
        found.append({**kept, "values": values.ravel().tolist(), "head": head.ravel().tolist()})
    return found
