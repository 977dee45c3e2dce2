"""The program compiled ahead of time for a policy trainer is the one it runs: same arrays, same results."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.config import set_path
from axlearn_like.layers.base import bind, split
from axlearn_like.layers.decoder import Decoder
from axlearn_like.training.step import init_state
from experiments.modifiers import float32_head
from mesh import UserError, make_mesh
from models.moe import tiny_moe
from rl.objective.presets import dapo, grpo, rloo
from rl.protocol.messages import Group
from rl.rollout.sampling import RecordedSampler
from rl.training.batching.arrays import padded_arrays
from rl.training.program import added_arrays, make_policy_loss, make_score_rows, policy_logprobs
from rl.training.spec import UpdateSpec
from tests.rl.tiny import make_group, make_prompt, tiny_experiment, tiny_params
from tests.rl.training.whole_groups import pack_groups, pack_rows

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
    sizes: dict[str, Any] = {"max_prompt_tokens": MAX_PROMPT, "max_new_tokens": MAX_NEW}
    batch, _ = pack_groups(groups(), objective, **sizes, row_multiple=2)
    described = padded_arrays(added_arrays(objective, SAMPLES), rows=GROUPS, samples=SAMPLES, **sizes)
    scored = described.pop("logprobs_old")  # by the trainer, once the batch is on its devices
    assert scored == described["logprobs_behaviour"]
    assert {n: (a.shape, a.dtype) for n, a in batch.items()} == {n: (a.shape, a.dtype) for n, a in described.items()}


@pytest.mark.slow
def test_the_described_step_takes_a_real_batch():
    trainer = tiny_experiment().build().trainer_cfg
    mesh = make_mesh({})
    program, described_rows = trainer.program(mesh), trainer.rows(mesh, groups=GROUPS, samples=SAMPLES)
    sizes = {"max_prompt_tokens": MAX_PROMPT, "max_new_tokens": MAX_NEW}
    batch, _ = pack_groups(groups(), trainer.objective.build(), **sizes, row_multiple=trainer.row_multiple)
    rows = pack_rows(groups(), **sizes, row_multiple=trainer.row_multiple)
    assert isinstance(trainer.model, Decoder.Config)
    params = tiny_params(trainer.model)
    with jax.set_mesh(mesh):
        state = init_state(jax.tree.map(jax.numpy.asarray, params), trainer.learner.build())
        described = jax.tree.map(lambda a: (a.shape, a.dtype), program.state)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == described
        assert {n: rows[n].shape for n in ("tokens", "targets")} == {
            n: described_rows[n].shape for n in ("tokens", "targets")
        }
        new, metrics = program.step(state, batch)
    assert int(new["step"]) == 1 and np.isfinite(float(metrics["grad_norm"]))


def test_an_update_by_recorded_tokens_is_described_with_them():
    cfg = tiny_experiment(sampler=RecordedSampler.Config(top_p=0.9, most=5)).build().trainer_cfg
    (described,) = cfg.batches(make_mesh({}), groups=GROUPS, samples=SAMPLES).values()
    assert described["candidate_tokens"].shape == (*described["targets"].shape, 5)


def test_a_batch_that_does_not_divide_is_refused():
    trainer = tiny_experiment().build().trainer_cfg.clone(row_multiple=3, microbatches=2)
    expected = r"trainer\.row_multiple: expected a multiple of data x fsdp x expert x microbatches = 2, got 3"
    with pytest.raises(UserError, match=expected):
        trainer.program(make_mesh({}))


def test_sequences_longer_than_the_positions_are_refused():
    trainer = tiny_experiment().build().trainer_cfg
    set_path(trainer, "model.block.attention.rope.max_length", 16)
    with pytest.raises(
        UserError, match=r"max_prompt_tokens \+ max_new_tokens is 18, but policy\.block\.attention\.rope\.max_length"
    ):
        trainer.program(make_mesh({}))


@pytest.mark.slow
@pytest.mark.numerics
def test_the_losses_of_a_router_reach_the_policy_in_shares_of_the_microbatches():
    trainer = tiny_experiment().build().trainer_cfg
    model = tiny_moe(vocab_size=260, dim=32, num_layers=2, expert_hidden=16)
    graphdef, params = split(model.build(rngs=nnx.Rngs(0)))
    objective = trainer.objective.build()
    batch, _ = pack_groups(groups(), objective, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, row_multiple=2)

    def loss(microbatches: int):
        return jax.jit(
            make_policy_loss(graphdef, objective, UpdateSpec(trainer.temperature, microbatches=microbatches))
        )(params, batch)

    (whole, metrics), (half, _) = loss(1), loss(2)
    losses = [float(metrics[name]) for name in ("load_balance", "router_z")]
    assert min(losses) > 0
    np.testing.assert_allclose(float(whole - half), sum(losses) / 2, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.numerics
def test_neither_rows_nor_chunks_change_an_update():
    """The loss's gradient from whole groups at once, and from rows of two samples each with the head in three parts."""
    trainer = tiny_experiment().build().trainer_cfg
    assert isinstance(trainer.model, Decoder.Config)
    graphdef = split(trainer.model.build(rngs=nnx.Rngs(0)))[0]
    params, objective = tiny_params(trainer.model), trainer.objective.build()
    sizes = {"max_prompt_tokens": MAX_PROMPT, "max_new_tokens": MAX_NEW, "row_multiple": 4}

    def gradients(chunks: int, samples_per_row: int | None):
        batch, _ = pack_groups(groups(), objective, **sizes, samples_per_row=samples_per_row)
        loss = make_policy_loss(graphdef, objective, UpdateSpec(trainer.temperature, chunks=chunks))
        (_, metrics), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
        return batch, metrics, grads

    whole, metrics, expected = gradients(1, None)
    batch, found, grads = gradients(3, 2)
    assert whole["inputs"].shape == (GROUPS, SAMPLES, MAX_NEW)
    assert batch["inputs"].shape == (2 * GROUPS, SAMPLES // 2, MAX_NEW)
    for name in metrics:
        np.testing.assert_allclose(found[name], metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)
    scale = max(float(abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), grads, expected)


@pytest.mark.numerics
@pytest.mark.full  # tests/axlearn_like/kernels/test_policy_head.py has its values
@pytest.mark.parametrize(("unrounded", "recorded"), [(False, False), (True, False), (False, True)])
def test_neither_does_a_head_in_tiles_of_words(unrounded: bool, recorded: bool):
    """Heads of float32 factors, of a policy in bfloat16, are unrounded in tiles too; recorded candidates are kept."""
    cfg: Any = tiny_experiment()
    if unrounded:
        cfg.policy.dtype = "bfloat16"
        float32_head(cfg)
    trainer = cfg.build().trainer_cfg
    assert isinstance(trainer.model, Decoder.Config)
    graphdef, params = split(trainer.model.build(rngs=nnx.Rngs(0)))[0], tiny_params(trainer.model)
    objective = trainer.objective.build()
    packed = pack_groups(groups(), objective, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    batch: Any = packed[0]
    if recorded:
        others = np.random.default_rng(0).integers(130, 260, (*batch["targets"].shape, 3), np.int32)
        batch["candidate_tokens"] = np.concatenate([others, batch["targets"][..., None]], axis=-1)

    def scored(params: Any, head_tile: int | None) -> Any:
        found = policy_logprobs(bind(graphdef, params), batch, UpdateSpec(0.9, head_tile=head_tile))
        return jnp.sum(jnp.sin(found.logprobs) + jnp.cos(found.entropy)), found[:2]

    tiles, whole = (
        jax.jit(jax.value_and_grad(partial(scored, head_tile=tile), has_aux=True))(params) for tile in (128, None)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), tiles, whole)


@pytest.mark.parametrize("wrong", [100, 0])
def test_heads_that_cannot_be_in_tiles_are_refused(wrong: int):
    with pytest.raises(UserError, match="head_tile: expected a multiple of 128, or None"):
        tiny_experiment().build().trainer_cfg.clone(head_tile=wrong).check_fields()


@pytest.mark.slow
@pytest.mark.numerics
def test_scoring_in_chunks_gives_the_same_parts():
    trainer = tiny_experiment().build().trainer_cfg
    assert isinstance(trainer.model, Decoder.Config)
    graphdef, params = split(trainer.model.build(rngs=nnx.Rngs(0)))[0], tiny_params(trainer.model)
    rows = pack_rows(groups(), max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW)
    arguments = {"tokens": rows["tokens"], "targets": rows["targets"], "temperature": np.ones(1, np.float32)}
    whole, parts = (make_score_rows(graphdef, chunks)(params, **arguments) for chunks in (1, 24))  # 8 of them divide
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"samples_per_row": 3}, r"trainer\.samples_per_row: expected a divisor of samples_per_prompt=4, got 3"),
        ({"chunks": 5}, r"trainer\.chunks: expected a divisor of the 4 x 6 tokens of a row, got 5"),
    ],
)
def test_rows_and_chunks_that_do_not_divide_are_refused(changes, message):
    cfg = tiny_experiment()
    cfg.trainer.set(**changes)
    with pytest.raises(UserError, match=message):
        cfg.check()
