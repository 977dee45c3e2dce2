"""The policy's loss on a mesh, with its head in chunks of each device's tokens, is that of one device."""

from typing import Any

import numpy as np
import pytest

from tests.elsewhere import elsewhere


@pytest.mark.parametrize("packed", [False, True])
def test_in_chunks_over_a_mesh_as_on_one_device(packed: bool):
    four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    found: dict[str, dict[str, Any]] = elsewhere(gradients, packed, environ=four, timeout=300)
    expected = found.pop("one")
    for name, result in found.items():
        assert result.keys() == expected.keys()
        for path, value in result.items():
            scale = max(float(np.abs(expected[path]).max()), 0.1)  # the loss is a sum of advantages: nearly 0
            np.testing.assert_allclose(value, expected[path], rtol=1e-4, atol=1e-4 * scale, err_msg=f"{name} {path}")


def gradients(packed: bool) -> dict[str, dict[str, Any]]:
    """Return loss, log-probabilities, entropies and a few gradients, by mesh."""
    import jax
    from flax import nnx

    from axlearn_like.layers.base import bind, split
    from axlearn_like.layers.decoder import Decoder
    from mesh import make_mesh, shard_batch, to_named_sharding
    from rl.roles.headers import header_of
    from rl.roles.messages import contents_of
    from rl.training.batching import arrange, fill_packed, pack_groups
    from rl.training.packing import Packing
    from rl.training.program import make_packed_loss, make_policy_loss, policy_logprobs
    from tests.rl.tiny import tiny_experiment, tiny_params
    from tests.rl.training.test_program import MAX_NEW, MAX_PROMPT, groups

    trainer = tiny_experiment().build().trainer_cfg
    model = trainer.model
    assert isinstance(model, Decoder.Config)
    objective = trainer.objective.build()
    if packed:
        packing = Packing.Config(lengths=(3 * MAX_NEW,), rows=4).build(max_prompt=MAX_PROMPT, max_new=MAX_NEW)
        headers = [header_of(group) for group in groups()]
        arranged = arrange(headers, objective, max_prompt=MAX_PROMPT, max_new=MAX_NEW, packing=packing)
        (one,) = arranged.microbatches
        batch = fill_packed(one.rows, one.length, arranged.prepared, contents_of(groups()), packing)
    else:
        batch, _ = pack_groups(
            groups(), objective, max_prompt=MAX_PROMPT, max_new=MAX_NEW, row_multiple=4, samples_per_row=2
        )
    found = {}
    for name, shape in {"one": {}, "fsdp": {"fsdp": 4}, "tensor": {"fsdp": 2, "tensor": 2}}.items():
        mesh = make_mesh(shape, jax.devices()[: 4 if shape else 1])
        with jax.set_mesh(mesh):
            graphdef, abstract = jax.eval_shape(lambda: split(model.build(rngs=nnx.Rngs(0))))
            places = jax.tree.map(lambda leaf: leaf.sharding, to_named_sharding(abstract, mesh))
            params = jax.device_put(tiny_params(model), places)
            chunks = 3 if shape else 1
            loss = make_policy_loss(graphdef, objective, trainer.temperature, chunks=chunks)
            if packed:
                loss = make_packed_loss(graphdef, objective, trainer.temperature, MAX_NEW, chunks)

            def both(params: Any, batch: Any, graphdef: Any = graphdef, loss: Any = loss, chunks: int = chunks) -> Any:
                scored = policy_logprobs(bind(graphdef, params), batch, trainer.temperature, chunks)
                return jax.value_and_grad(lambda p: loss(p, batch)[0])(params), scored.logprobs, scored.entropy

            (value, slopes), logprobs, entropy = jax.jit(both)(params, shard_batch(batch))
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(slopes)}
        kept = {"loss": value, "logprobs": logprobs, "entropy": entropy, **leaves}
        found[name] = {path: np.asarray(leaf).ravel().tolist() for path, leaf in kept.items()}
    return found


@pytest.mark.full
def test_every_preset_has_the_gradient_of_one_device_on_eight():
    """Rows of 3 of 7 rollouts, uneven groups, with pi_old and a reference; fsdp, and tensor beside data."""
    eight = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    found: dict[str, dict[str, Any]] = elsewhere(preset_gradients, environ=eight, timeout=500)
    for name, meshes in found.items():
        expected = meshes.pop("one")
        for mesh, result in meshes.items():
            for path, value in result.items():
                scale = max(float(np.abs(expected[path]).max()), 1e-3)
                message = f"{name} {mesh} {path}"
                np.testing.assert_allclose(value, expected[path], rtol=1e-4, atol=1e-4 * scale, err_msg=message)


def preset_gradients() -> dict[str, dict[str, Any]]:
    """Return loss and gradients of every preset, with a KL term, by mesh."""
    import jax
    from flax import nnx

    from axlearn_like.layers.base import split
    from mesh import make_mesh, shard_batch, to_named_sharding
    from rl.objective import PRESETS, NoRegulariser, ReferenceKL
    from rl.training.batching import pack_groups
    from rl.training.program import make_policy_loss
    from tests.rl.tiny import tiny_params, tiny_policy
    from tests.rl.training.test_batching import MAX_NEW, MAX_PROMPT, ragged

    model, found = tiny_policy(), {}
    for preset in PRESETS.values():
        cfg = preset(max_length=MAX_NEW) if preset.__name__ == "dr_grpo" else preset()
        if isinstance(cfg.regulariser, NoRegulariser.Config):
            cfg.regulariser = ReferenceKL.Config(coef=0.1)
        objective = cfg.build()
        batch, _ = pack_groups(
            ragged(failed=True), objective, max_prompt=MAX_PROMPT, max_new=MAX_NEW, row_multiple=8, samples_per_row=3
        )
        rng = np.random.default_rng(0)
        for other in ("logprobs_old", "logprobs_reference"):
            noise = rng.normal(0, 0.1, batch["logprobs_behaviour"].shape)
            batch[other] = (batch["logprobs_behaviour"] + noise).astype(np.float32)
        meshes: dict[str, Any] = {}
        for name, shape in {"one": {}, "fsdp": {"fsdp": 8}, "tensor": {"data": 4, "tensor": 2}}.items():
            mesh = make_mesh(shape, jax.devices()[: 8 if shape else 1])
            with jax.set_mesh(mesh):
                graphdef, abstract = jax.eval_shape(lambda: split(model.build(rngs=nnx.Rngs(0))))
                places = jax.tree.map(lambda leaf: leaf.sharding, to_named_sharding(abstract, mesh))
                params = jax.device_put(tiny_params(model), places)
                loss = make_policy_loss(graphdef, objective, 0.7)
                value, slopes = jax.jit(jax.value_and_grad(lambda p, b, f=loss: f(p, b)[0]))(params, shard_batch(batch))
            leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(slopes)}
            meshes[name] = {path: np.asarray(leaf).ravel().tolist() for path, leaf in {"loss": value, **leaves}.items()}
        found[preset.__name__] = meshes
    return found
