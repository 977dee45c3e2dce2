"""The policy's loss on a mesh, with its head in chunks of each device's tokens, is that of one device."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.objective import PRESETS
from rl.protocol.messages import Group
from tests.bounds import within
from tests.elsewhere import elsewhere
from tests.rl.training.batching.made import group, ragged

pytestmark = pytest.mark.numerics

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
MESHES = {
    "one": {},
    "fsdp": {"fsdp": 4},
    "tensor": {"fsdp": 2, "tensor": 2},
    "sequence_fsdp": {"sequence": 2, "fsdp": 4},
    "sequence_tensor": {"sequence": 4, "tensor": 2},
    "pipeline_sequence": {"pipeline": 2, "sequence": 2, "fsdp": 2},
}


@pytest.mark.parametrize(
    ("packed", "meshes"),
    [
        (True, ["fsdp", "sequence_tensor"]),
        pytest.param(True, ["tensor", "sequence_fsdp", "pipeline_sequence"], marks=pytest.mark.full),
        pytest.param(False, [name for name in MESHES if name != "one"], marks=pytest.mark.full),
    ],
)
def test_in_chunks_over_a_mesh_as_on_one_device(packed: bool, meshes: list[str]):
    """Gradient, metrics, log-probabilities and entropies."""
    found: dict[str, dict[str, Any]] = elsewhere(gradients, packed, ["one", *meshes], environ=EIGHT, timeout=500)
    expected = found.pop("one")
    assert list(found) == meshes and "metric drift_max" in expected
    for name, result in found.items():
        assert result.keys() == expected.keys()
        for path, value in result.items():
            scale = max(float(np.abs(expected[path]).max()), 0.1)  # the loss is a sum of advantages: nearly 0
            np.testing.assert_allclose(value, expected[path], rtol=1e-4, atol=1e-4 * scale, err_msg=f"{name} {path}")


def gradients(packed: bool, meshes: list[str]) -> dict[str, dict[str, Any]]:
    """Return loss, metrics, log-probabilities, entropies and gradients, by mesh."""
    import jax

    from axlearn_like.layers.base import bind, build_abstract, split
    from axlearn_like.layers.decoder import Decoder
    from axlearn_like.layers.pipeline import Pipeline
    from mesh import make_mesh, shard_batch, to_named_sharding
    from rl.protocol.headers import header_of
    from rl.protocol.messages import contents_of
    from rl.training.batching import PackedRows, arrange, fill_packed
    from rl.training.packing import Packing
    from rl.training.program import make_packed_loss, make_policy_loss, policy_logprobs
    from rl.training.spec import UpdateSpec
    from tests.rl.tiny import tiny_experiment, tiny_params
    from tests.rl.training.test_program import MAX_NEW, MAX_PROMPT, groups
    from tests.rl.training.whole_groups import pack_groups

    trainer = tiny_experiment().build().trainer_cfg
    model = trainer.model
    assert isinstance(model, Decoder.Config)
    model.pipeline = Pipeline.Config(microbatches=1)
    model.num_layers = 2 if "pipeline_sequence" in meshes else model.num_layers
    objective = trainer.objective.build()
    if packed:
        packing = Packing.Config(lengths=(3 * MAX_NEW,), rows=4).build(
            max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW
        )
        headers = [header_of(group) for group in groups()]
        arranged = arrange(headers, objective, PackedRows(packing))
        (one,) = arranged.microbatches
        batch = fill_packed(one.rows, one.length, arranged.prepared, contents_of(groups()), packing)
    else:
        batch, _ = pack_groups(
            groups(), objective, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, row_multiple=4, samples_per_row=2
        )
    found = {}
    for name in meshes:
        shape = MESHES[name]
        mesh = make_mesh(shape, jax.devices()[: math.prod(shape.values())])
        with jax.set_mesh(mesh):
            graphdef, abstract = split(build_abstract(model))
            places = jax.tree.map(lambda leaf: leaf.sharding, to_named_sharding(abstract, mesh))
            params = jax.device_put(tiny_params(model), places)
            # Packed rows have their head in tiles of words, which a tensor axis shards.
            how: Any = {"head_tile": 128} if packed and shape else {"chunks": 3 if shape else 1}
            spec = UpdateSpec(trainer.temperature, max_new_tokens=MAX_NEW if packed else None, **how)
            loss = (make_packed_loss if packed else make_policy_loss)(graphdef, objective, spec)

            def both(params: Any, batch: Any, graphdef: Any = graphdef, loss: Any = loss, spec: Any = spec) -> Any:
                scored = policy_logprobs(bind(graphdef, params), batch, spec)
                return jax.value_and_grad(loss, has_aux=True)(params, batch), scored.logprobs, scored.entropy

            found_here = jax.jit(both)(params, shard_batch(batch, by_length=False))
        ((value, metrics), slopes), logprobs, entropy = found_here
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(slopes)}
        leaves |= {f"metric {name}": x for name, x in metrics.items()}
        kept = {"loss": value, "logprobs": logprobs, "entropy": entropy, **leaves}
        found[name] = {path: np.asarray(leaf).ravel().tolist() for path, leaf in kept.items()}
    return found


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_every_preset_has_the_gradient_of_one_device_on_eight(experts: bool, packed: bool):
    """Uneven groups, one of equal rewards, rollouts unscored and cut off: 2e-5 of the largest entry of a parameter.

    Groups of equal rewards are dropped where the preset does so, and cut-off rollouts masked in every other preset; all
    have pi_old and a reference.
    """
    found: dict[str, dict[str, Any]] = elsewhere(preset_gradients, experts, packed, environ=EIGHT, timeout=500)
    assert len(found) == (4 if experts or packed else len(PRESETS))
    for name, meshes in found.items():
        expected = meshes.pop("one")
        assert any(np.any(values) for values in expected.values())
        for mesh, result in meshes.items():
            for path, value in result.items():
                scale = max(float(np.abs(expected[path]).max()), 1e-3)
                message = f"{name} {mesh} {path}"
                np.testing.assert_allclose(value, expected[path], rtol=2e-5, atol=2e-5 * scale, err_msg=message)


def unlike_rollouts() -> list[Group]:
    """Groups with 3, 5 and 7 scored rollouts and one of equal rewards; of each group the second rollout is cut off."""
    made = [*ragged(failed=True), group(3, [0.75] * 4, [2, 5, 1, 3])]
    for number, one in enumerate(made):
        cut = dataclasses.replace(one.rollouts[1], finish_reason="length")
        made[number] = dataclasses.replace(one, rollouts=(one.rollouts[0], cut, *one.rollouts[2:]))
    return made


def demonstrated(one: Group) -> Group:
    """The same group, whose first rollout is a demonstration."""
    first = dataclasses.replace(one.rollouts[0], demonstration=True, logprobs=np.zeros_like(one.rollouts[0].logprobs))
    return dataclasses.replace(one, rollouts=(first, *one.rollouts[1:]))


def preset_gradients(experts: bool, packed: bool) -> dict[str, dict[str, Any]]:
    """Return loss and gradients with a KL term by preset and mesh: of all presets, or of four of unlike terms.

    The trainer's own losses give the slopes of the log-probabilities, and one backward pass of the decoder, compiled
    once for a mesh, those of the parameters.
    """
    import jax
    from flax import nnx

    from axlearn_like.layers.aux import Aux
    from axlearn_like.layers.base import bind, build_abstract, split
    from mesh import make_mesh, shard_batch, to_named_sharding
    from rl.objective import NoRegulariser, Objective, ReferenceKL
    from rl.protocol.headers import header_of
    from rl.protocol.messages import contents_of
    from rl.training import program
    from rl.training.batching import PackedRows, arrange, fill_packed
    from rl.training.packing import Packing
    from rl.training.spec import UpdateSpec
    from tests.rl.tiny import tiny_params, tiny_policy
    from tests.rl.training.batching.made import MAX_NEW, MAX_PROMPT
    from tests.rl.training.whole_groups import pack_groups

    model, few, decoder_logprobs = tiny_policy(), ("grpo", "dapo", "gspo", "rloo"), program.policy_logprobs
    meshes: dict[str, Any] = {"one": {}, "fsdp": {"fsdp": 8}, "tensor": {"data": 4, "tensor": 2}}
    meshes["sequence"] = {"sequence": 2, "fsdp": 2, "tensor": 2}
    if experts:
        model = with_experts()
        meshes = {"one": {}, "expert": {"expert": 2, "fsdp": 4}, "sequence": {"expert": 2, "sequence": 2, "fsdp": 2}}
    objectives: dict[str, Objective] = {}
    for name, preset in PRESETS.items():
        if (experts or packed) and name not in few:
            continue
        changed: dict[str, Any] = dict.fromkeys(("dr_grpo", "luffy"), {"max_length": MAX_NEW})
        changed["rejection_sampling"] = {"at_least": 0.5}
        cfg = preset(**changed.get(name, {})).set(truncated="mask" if len(objectives) % 2 else "keep")
        if isinstance(cfg.regulariser, NoRegulariser.Config):
            cfg.regulariser = ReferenceKL.Config(coef=0.1)
        objectives[name] = cfg.build()
    masked = [objective.mask_truncated for objective in objectives.values()]
    assert any(objective.drop_zero_variance for objective in objectives.values()) and len({*masked}) == 2

    def batch_of(objective: Objective) -> dict[str, np.ndarray]:
        made = unlike_rollouts()
        if objective.mixes:
            made = [demonstrated(one) for one in made]
        sizes: dict[str, Any] = {"max_prompt_tokens": MAX_PROMPT, "max_new_tokens": MAX_NEW}
        if packed:
            packing = Packing.Config(lengths=(3 * MAX_NEW,), rows=8).build(**sizes)
            arranged = arrange([header_of(one) for one in made], objective, PackedRows(packing))
            (one,), figures = arranged.microbatches, arranged.figures
            batch = fill_packed(one.rows, one.length, arranged.prepared, contents_of(made), packing)
        else:
            batch, figures = pack_groups(made, objective, **sizes, row_multiple=8, samples_per_row=3)
        fractions = [figures[f"{what}_fraction"] for what in ("zero_variance", "truncation", "unscored")]
        assert min(fractions) > 0 and max(fractions) < 1
        rng = np.random.default_rng(0)
        for other in ("logprobs_old", "logprobs_reference"):
            noise = rng.normal(0, 0.1, batch["logprobs_behaviour"].shape)
            batch[other] = (batch["logprobs_behaviour"] + noise).astype(np.float32)
        return batch

    class Table(nnx.Module):
        """Log-probabilities as parameters."""

        def __init__(self, values: Any) -> None:
            self.values = nnx.Param(values)

    def read(table: Any, batch: Any, temperature: float, *_: Any) -> program.Scored:
        return program.Scored(table.values[...], jax.numpy.zeros_like(table.values[...]), Aux())

    found: dict[str, dict[str, Any]] = {name: {} for name in objectives}
    for name, shape in meshes.items():
        mesh = make_mesh(shape, jax.devices()[: 8 if shape else 1])
        with jax.set_mesh(mesh):
            graphdef, abstract = split(build_abstract(model))
            places = jax.tree.map(lambda leaf: leaf.sharding, to_named_sharding(abstract, mesh))
            params = jax.device_put(tiny_params(model), places)
            shapes: set[Any] = set()

            @jax.jit
            def forward(params: Any, batch: Any, graphdef: Any = graphdef) -> Any:
                return decoder_logprobs(bind(graphdef, params), batch, UpdateSpec(0.7)).logprobs

            @jax.jit
            def backward(params: Any, batch: Any, slopes: Any, forward: Any = forward) -> Any:
                return jax.vjp(lambda p: forward(p, batch), params)[1](slopes)[0]

            for preset, objective in objectives.items():
                batch = shard_batch(batch_of(objective), by_length=False)
                shapes.add(batch["targets"].shape)
                known = {n: x for n, x in batch.items() if x.dtype == np.int32 or n == "action_mask"}
                table, values = split(Table(forward(params, known)))
                program.policy_logprobs = read
                make = program.make_packed_loss if packed else program.make_policy_loss
                loss = make(table, objective, UpdateSpec(0.7, max_new_tokens=MAX_NEW if packed else None))
                compute = jax.jit(jax.value_and_grad(lambda v, b, f=loss: f(v, b)[0]))
                value, slopes = compute(values, batch)
                leaves = jax.tree_util.tree_leaves_with_path(backward(params, known, *jax.tree.leaves(slopes)))
                whole = {"loss": value, **{jax.tree_util.keystr(path): leaf for path, leaf in leaves}}
                found[preset][name] = {path: np.asarray(leaf).ravel().tolist() for path, leaf in whole.items()}
            assert len(shapes) <= 3, "few programs, or this takes minutes"
    return found


@pytest.mark.full
@pytest.mark.parametrize("experts", [False, True])
def test_scoring_by_devices_that_share_rows_has_the_bits_of_a_mesh_that_shards_the_batch(experts: bool):
    found: dict[str, list[float]] = elsewhere(scores, experts, environ=EIGHT, timeout=300)
    assert found["shared"] == found["batch"] and np.any(found["one"])
    np.testing.assert_allclose(found["shared"], found["one"], atol=1e-5)


def scores(experts: bool) -> dict[str, list[float]]:
    """Return log-probabilities in the engine's order of sums, by mesh."""
    import jax
    import jax.numpy as jnp

    from axlearn_like.layers.base import build_abstract, split
    from mesh import make_mesh, shard_batch, to_named_sharding
    from mesh.rules import complete_rows
    from rl.training.program import make_score_rows, scored_rows
    from tests.rl.tiny import tiny_params, tiny_policy
    from tests.rl.training.test_program import MAX_NEW, MAX_PROMPT, groups
    from tests.rl.training.whole_groups import pack_rows

    model, found = with_experts() if experts else tiny_policy(), dict[str, list[float]]()
    other = {"expert" if experts else "fsdp": 2}
    for name, shape in {"one": {}, "shared": {"sequence": 4, **other}, "batch": {"data": 4, **other}}.items():
        mesh = make_mesh(shape, jax.devices()[: math.prod(shape.values())])
        with jax.set_mesh(mesh):
            graphdef, abstract = split(build_abstract(model))
            places = jax.tree.map(lambda leaf: leaf.sharding, to_named_sharding(abstract, mesh))
            with complete_rows():
                count = scored_rows(sum(len(group.rollouts) for group in groups()), 2)
                rows = pack_rows(groups(), max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, row_multiple=count)
                arrays = shard_batch({name: rows[name] for name in ("tokens", "targets")})
            params = jax.device_put(tiny_params(model), places)
            scored = make_score_rows(graphdef)(params, **arrays, temperature=jnp.full(1, 0.7, jnp.float32))
        found[name] = np.asarray(jax.tree.map(np.asarray, scored).logprobs())[: len(rows["first"])].ravel().tolist()
    return found


@pytest.mark.full
def test_a_run_by_devices_that_share_rows_has_the_metrics_of_one_device(tmp_path: Path):
    """Two updates with a critic, by packed rows: agreement with the sampler in both orders of sums, too."""
    one = elsewhere(metrics_of_run, str(tmp_path / "one"), {"data": 1})
    shared = elsewhere(metrics_of_run, str(tmp_path / "shared"), {"sequence": 2, "fsdp": 4}, environ=EIGHT)
    assert len(one) == len(shared) == 2
    for expected, row in zip(one, shared, strict=True):
        assert row.keys() == expected.keys()
        assert within([row["logprob_diff_max"], row["scoring_diff_max"]], 4e-6)
        for name in ("loss", "grad_norm", "critic_grad_norm", "value_loss", "ratio_mean", "entropy", "reward"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def metrics_of_run(folder: str, shape: dict[str, int]) -> list[dict[str, Any]]:
    """Return the metrics of two updates on a mesh; the engine has one device."""
    from rl.training.packing import Packing
    from tests.rl.tiny import tiny_params
    from tests.rl.training.critic.test_separate import with_critic
    from tests.rl.training.test_trainer import Roles

    cfg = with_critic()
    cfg.trainer.set(packing=Packing.Config(lengths=(12, 6), rows=1), mesh=shape)
    roles = Roles.make(Path(folder), cfg, initial=tiny_params(cfg.policy))
    for _ in range(2):
        while roles.worker.run_once():
            pass
        assert roles.trainer.run_once()
        roles.trainer.settle()
    roles.trainer.close()
    return roles.rows()


def with_experts() -> Any:
    """Return the tiny policy with mixtures of four experts."""
    from axlearn_like.layers.decoder import Block
    from axlearn_like.layers.moe.experts import Experts
    from axlearn_like.layers.moe.layer import MoE
    from axlearn_like.layers.moe.router import SoftmaxRouter
    from tests.rl.tiny import tiny_policy

    model = tiny_policy()
    assert isinstance(model.block, Block.Config)
    mixture: dict[str, Any] = {"router": SoftmaxRouter.Config(top_k=2), "experts": Experts.Config(hidden=16)}
    model.block.feed_forward = MoE.Config(num_experts=4, **mixture)
    return model
