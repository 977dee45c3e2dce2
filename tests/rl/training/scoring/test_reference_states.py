"""The exact KL to a reference in the update: values and gradients of whole logits, without any, in whole runs."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.config import ConfigError
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.training.alignment.reference import FrozenCopy, WithoutAdapters
from axlearn_like.training.step import SHARED
from experiments.modifiers import exact_kl, low_rank
from mesh import make_mesh
from rl.fleet.fleet import Fleet
from rl.fleet.programs import experiment_programs
from rl.objective import ReferenceKL
from rl.objective.presets import distillation, grpo
from rl.training.packing import Packing
from rl.training.program import make_policy_loss
from rl.training.scoring.reference_states import ReferenceStates
from rl.training.scoring.update_logprobs import REFERENCE_HEAD, REFERENCE_STATES, policy_logprobs
from rl.training.spec import UpdateSpec
from rl.training.updates import Updates
from tests.bounds import within
from tests.elsewhere import elsewhere
from tests.rl.tiny import tiny_experiment, tiny_params, tiny_policy
from tests.rl.training.test_program import MAX_NEW, MAX_PROMPT, groups
from tests.rl.training.test_teacher import taught
from tests.rl.training.test_trainer import Roles
from tests.rl.training.whole_groups import pack_groups

pytestmark = pytest.mark.numerics

TEMPERATURE, COEF, EIGHT = 0.7, 0.3, {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def made(candidate_tokens: bool) -> tuple[Any, Any, Any, Any, Any]:
    """A policy and its parameters, a wider teacher over more words and its, and a batch of distillation."""
    policy, teacher = tiny_policy(), tiny_policy().clone(dim=24, vocab_size=400)
    batch: Any = pack_groups(
        groups(),
        distillation(exact=True).set(old_policy="current").build(),
        max_prompt_tokens=MAX_PROMPT,
        max_new_tokens=MAX_NEW,
        row_multiple=4,
    )[0]
    if candidate_tokens:
        others = np.random.default_rng(0).integers(130, 260, (*batch["targets"].shape, 3), np.int32)
        batch["candidate_tokens"] = np.concatenate([others, batch["targets"][..., None]], axis=-1)
    params, other = tiny_params(policy), tiny_params(teacher, seed=3, scale=2.0)
    return policy, params, teacher, jax.tree.map(jnp.asarray, other), batch


def by_tiles(params: Any, batch: Any, other_params: Any, policy: Any, teacher: Any) -> Any:
    """Loss and KL at each token of the update's own program."""
    graphdef, other = (split(build_abstract(model))[0] for model in (policy, teacher))
    states = ReferenceStates(other, 1, routed=False)
    rows = {**batch, **states.arrays(other_params, states.head(other_params, params), batch)}
    head = split(bind(other, other_params).output)[0]
    objective = distillation(coef=COEF, exact=True).set(old_policy="current").build()
    spec = UpdateSpec(TEMPERATURE, head_tile=128, reference_head=head)
    loss = make_policy_loss(graphdef, objective, spec)
    found = policy_logprobs(bind(graphdef, params), rows, spec)
    return loss(params, rows)[0], found.kl


def by_whole_logits(params: Any, batch: Any, other_params: Any, policy: Any, teacher: Any) -> Any:
    """The same from the logits of all words, those of the teacher that the policy has."""
    from rl.training.scoring.update_logprobs import hidden_states

    def logprobs(model: Any, params: Any) -> jax.Array:
        bound = bind(split(build_abstract(model))[0], params)
        logits = bound.logits(hidden_states(bound, batch))[..., : policy.vocab_size] / TEMPERATURE
        if "candidate_tokens" in batch:
            kept = batch["candidate_tokens"].reshape(*logits.shape[:2], -1)
            logits = jnp.where((kept[..., None] == jnp.arange(policy.vocab_size)).any(-2), logits, -1e30)
        return jax.nn.log_softmax(logits)

    own, others = logprobs(policy, params), jax.lax.stop_gradient(logprobs(teacher, other_params))
    kl = jnp.sum(jnp.exp(own) * (own - others), axis=-1).reshape(batch["targets"].shape)
    return jnp.sum(COEF * jnp.where(batch["action_mask"], kl, 0.0) * batch["weights"]), kl


@pytest.mark.full  # tests/axlearn_like/kernels/test_policy_head.py and tests/rl/objective/test_regulariser.py are quick
@pytest.mark.parametrize("candidate_tokens", [False, True])
def test_loss_and_gradient_are_those_of_whole_logits(candidate_tokens: bool):
    policy, params, teacher, other, batch = made(candidate_tokens)
    (loss, kl), slopes = jax.jit(
        lambda p: jax.value_and_grad(partial(by_tiles, policy=policy, teacher=teacher), has_aux=True)(p, batch, other)
    )(params)
    (right, expected), gradient = jax.jit(
        lambda p: jax.value_and_grad(partial(by_whole_logits, policy=policy, teacher=teacher), has_aux=True)(
            p, batch, other
        )
    )(params)
    mask = batch["action_mask"]
    np.testing.assert_allclose(np.asarray(kl)[mask], np.asarray(expected)[mask], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, right, rtol=1e-5)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    assert scale > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale), slopes, gradient)


@pytest.mark.full
def test_on_a_mesh_that_shards_tokens_and_words_as_on_one_device():
    policy, params, teacher, other, batch = made(candidate_tokens=False)
    run = jax.value_and_grad(lambda p: by_tiles(p, batch, other, policy, teacher)[0])
    loss, slopes = jax.jit(run)(params)
    expected = [np.asarray(leaf).ravel() for leaf in [loss, *jax.tree.leaves(slopes)]]
    for result in elsewhere(on_meshes, environ=EIGHT).values():
        for a, b in zip(result, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def on_meshes() -> dict[str, Any]:
    """Loss and gradients by mesh."""
    import math

    from mesh import shard_batch, to_named_sharding

    shapes = {"fsdp_tensor": {"fsdp": 4, "tensor": 2}, "sequence_tensor": {"sequence": 2, "tensor": 2}}
    policy, params, teacher, other, batch = made(candidate_tokens=False)
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        mesh = make_mesh(shape, jax.devices()[: math.prod(shape.values())])
        with jax.set_mesh(mesh):

            def put(model: Any, params: Any, mesh: Any = mesh) -> Any:
                abstract = to_named_sharding(split(build_abstract(model))[1], mesh)
                return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), params, abstract)

            run = jax.value_and_grad(lambda *a: by_tiles(*a, policy=policy, teacher=teacher)[0])
            arrays = shard_batch(batch, by_length=False)
            loss, slopes = jax.jit(run)(put(policy, params), arrays, put(teacher, other))
        found[name] = [np.asarray(leaf).ravel().tolist() for leaf in [loss, *jax.tree.leaves(slopes)]]
    return found


@pytest.mark.full
@pytest.mark.parametrize("kind", ["padded", "packed", "adapters"])
def test_a_run_begins_at_no_distance_and_is_held_near(kind: str, tmp_path: Path):
    """The first of several updates a batch donates the policy, whose frozen head an adapter's reference has, too."""
    cfg = tiny_experiment(objective=grpo(kl_coef=0.5), num_steps=2, evaluation=None)
    exact_kl(cfg)
    cfg.trainer.reference = FrozenCopy.Config()
    if kind == "packed":
        cfg.trainer.set(
            packing=Packing.Config(lengths=(12, 6), rows=2), updates=Updates.Config(minibatches=2, epochs=2)
        )
    elif kind == "adapters":
        low_rank(cfg)
        cfg.trainer.set(reference=WithoutAdapters.Config(), updates=Updates.Config(epochs=2))
    roles = Roles.make(tmp_path, cfg, initial=None if kind == "adapters" else tiny_params(cfg.policy))  # pyright: ignore
    roles.advance(2)
    first, *_, last = (row["kl_reference"] for row in roles.rows())
    assert kind != "padded" or within(first, 1e-6), "where there are several updates a batch the row is of the last"
    assert last > 1e-5
    roles.crash()


@pytest.mark.full
def test_microbatches_and_the_rows_of_a_teacher_are_whole(tmp_path: Path):
    """A run in two microbatches is that in one, and comes near the teacher by the exact KL."""
    rows = []
    for microbatches in (1, 2):
        cfg = taught(tmp_path / f"teacher-{microbatches}")
        exact_kl(cfg)
        cfg.trainer.set(microbatches=microbatches)
        roles = Roles.make(tmp_path / f"run-{microbatches}", cfg, initial=tiny_params(cfg.policy, scale=1.5))
        roles.advance(12)
        rows.append([row["kl_reference"] for row in roles.rows()])
        roles.trainer.close()
    np.testing.assert_allclose(rows[0][0], rows[1][0], rtol=1e-4)
    assert np.mean(rows[0][-3:]) < 0.85 * np.mean(rows[0][:3])


@pytest.mark.slow
def test_the_described_update_has_the_arrays_of_the_reference(tmp_path: Path):
    cfg = taught(tmp_path)
    exact_kl(cfg)
    trainer = cfg.build().trainer_cfg
    batch = next(iter(trainer.batches(make_mesh(), groups=4, samples=4).values()))
    wide = cfg.trainer.reference.model.dim
    assert batch[REFERENCE_STATES].shape == (4, 4 * trainer.max_new_tokens, wide)
    assert [leaf.shape for leaf in jax.tree.leaves(batch[SHARED][REFERENCE_HEAD])] == [(272, wide)]
    programs = experiment_programs(cfg.build(), jax.devices()[:1])
    assert "reference" not in programs
    states, update = (programs[name]().trace() for name in ("reference_states", "train"))
    assert states.out_info.shape == batch[REFERENCE_STATES].shape
    assert "kl_reference" in update.out_info[1]


def test_what_cannot_be_exact_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="ratio: expected 'none' with estimator='exact'"):
        ReferenceKL.Config(coef=0.1, estimator="exact", ratio="detached").check()
    cfg = taught(tmp_path)
    exact_kl(cfg)
    cfg.trainer.head_tile = None
    with pytest.raises(ConfigError, match=r"head_tile: expected a multiple of 128, such as 2048, .*--apply exact_kl"):
        cfg.check("inprocess")
    cfg.trainer.head_tile = 128
    cfg.fleet = Fleet.Config(trainer="cpu:1", workers="cpu:1", reference="cpu:1")
    with pytest.raises(ConfigError, match="reference: expected None with ReferenceKL.*the trainer holds"):
        cfg.check("inprocess")
