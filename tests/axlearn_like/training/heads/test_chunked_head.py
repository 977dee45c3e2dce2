"""A head whose weights and tokens lie on several devices has the loss and gradient of one device's."""

from typing import Any

import numpy as np
import pytest

from tests.elsewhere import elsewhere

pytestmark = pytest.mark.numerics

ROWS, LENGTH, DIM, WORDS = 8, 8, 16, 24
# Mesh, the partition of the head's weight [dim, words] by axis names, and chunks.
CASES: dict[str, tuple[dict[str, int], list[str | None], int]] = {
    "words": ({"fsdp": 2, "sequence": 2, "tensor": 2}, ["fsdp", "tensor"], 2),
    "fsdp": ({"fsdp": 8}, ["fsdp", None], 4),
    "whole": ({"data": 8}, [None, None], 1),
    "other_side": ({"data": 2, "fsdp": 4}, [None, "fsdp"], 2),  # as a transposed embedding lies
}
EVERY_RUN = ("words",)
NAMES = [pytest.param(name, marks=[pytest.mark.full] * (name not in EVERY_RUN)) for name in CASES]


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "weight": rng.normal(size=(DIM, WORDS)).astype(np.float32),
        "x": rng.normal(size=(ROWS, LENGTH, DIM)).astype(np.float32),
        "targets": rng.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32),
        "weights": rng.random((ROWS, LENGTH)).astype(np.float32) / ROWS,
    }


def expected() -> tuple[float, np.ndarray, np.ndarray]:
    """Cross entropy and its gradients, written out, in float64."""
    given = inputs()
    x, weight, weights = (given[name].astype(np.float64) for name in ("x", "weight", "weights"))
    logits = x @ weight
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    softmax = shifted / shifted.sum(-1, keepdims=True)
    truth = np.eye(WORDS)[given["targets"]]
    loss = -np.sum(np.log(np.sum(softmax * truth, -1)) * weights)
    d_logits = (softmax - truth) * weights[..., None]
    return loss, np.einsum("btd,btv->dv", x, d_logits), d_logits @ weight.T


def sharded(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the results of `fused_linear_loss` on eight devices, of these cases."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from axlearn_like.layers.linear import project
    from axlearn_like.training.heads.chunked_head import fused_linear_loss
    from axlearn_like.training.losses import supervised_loss
    from mesh import make_mesh
    from mesh.cost.arithmetic import products
    from mesh.rules import constrain, partition
    from mesh.sharding import token_axes

    def of_tokens(params: Any, x: Any, targets: Any, weights: Any) -> Any:
        logits = project(x, params["weight"], out_axis="vocab", dtype=jnp.float32)
        return supervised_loss(logits, {"targets": targets, "weights": weights})

    def run(shape: dict[str, int], cut: list[str | None], chunks: int) -> dict[str, Any]:
        with jax.set_mesh(make_mesh(shape)):
            given = {name: constrain(jnp.asarray(value), "batch", "length") for name, value in inputs().items()}
            params = {"weight": jax.sharding.reshard(jnp.asarray(inputs()["weight"]), PartitionSpec(*cut))}
            axes = token_axes(given["x"])

            def loss(params: Any, x: Any) -> Any:
                total, metrics = fused_linear_loss(
                    of_tokens, chunks, axes, params, x, given["targets"], given["weights"]
                )
                return 3 * total, metrics

            step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).trace(params, given["x"])
            (value, metrics), (d_params, d_x) = step.lower().compile()(params, given["x"])
            forward = jax.jit(loss).trace(params, given["x"])
            alone, _ = forward.lower().compile()(params, given["x"])
            assert jax.typeof(d_params["weight"]).sharding.spec == jax.typeof(params["weight"]).sharding.spec
            assert d_x.sharding.spec[0] == (partition("batch") or [None])[0]
            return {
                "loss": float(value),
                "without_gradient": float(alone),
                "metric": float(metrics["loss"]),
                "tokens": int(metrics["tokens"]),
                "d_weight": np.asarray(d_params["weight"]).tolist(),
                "d_x": np.asarray(d_x).tolist(),
                "flops": [products(program.jaxpr).xla for program in (forward, step)],
            }

    return {name: run(*CASES[name]) for name in names}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest):
    return elsewhere(sharded, list(CASES if request.config.getoption("--full") else EVERY_RUN))


@pytest.mark.parametrize("case", NAMES)
def test_loss_and_gradients_are_those_of_the_formula(results, case):
    loss, d_weight, d_x = expected()
    found = results[case]
    np.testing.assert_allclose([found["loss"], found["without_gradient"]], 3 * loss, rtol=1e-5)
    np.testing.assert_allclose(found["metric"], loss, rtol=1e-5)
    assert found["tokens"] == ROWS * LENGTH
    np.testing.assert_allclose(found["d_weight"], 3 * d_weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["d_x"], 3 * d_x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", NAMES)
def test_no_logits_are_computed_again(results, case):
    forward, with_gradients = results[case]["flops"]
    assert with_gradients == 3 * forward > 0


def test_a_head_of_float32_factors_is_gathered_unrounded():
    """Hidden states are bfloat16; a matrix of bfloat16 would change logits by 1e-3 of their size."""
    parts, sums, right = elsewhere(of_float32)
    np.testing.assert_allclose(parts, right, rtol=3e-6)
    np.testing.assert_allclose(sums, np.sum(right), rtol=3e-6)


def of_float32() -> tuple[list[float], float, list[float]]:
    """Return each token's greatest logit on two devices, their sum by the loss's way, and what they are."""
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    import jax.numpy as jnp
    from flax import nnx

    from axlearn_like.layers.embedding import Float32Head
    from axlearn_like.training.heads.chunked_head import per_device_head
    from axlearn_like.training.losses import head_sums
    from mesh import make_mesh

    class Model:
        def __init__(self, output: Any):
            self.output = output

    def greatest(logits: Any) -> Any:
        return jnp.max(logits, axis=-1)

    with jax.set_mesh(make_mesh({"fsdp": 2})):
        head = Float32Head.Config(dim=DIM, vocab_size=WORDS).build(rngs=nnx.Rngs(0))
        rows = jax.sharding.PartitionSpec("fsdp")
        x = jax.device_put(inputs()["x"].astype(jnp.bfloat16), jax.NamedSharding(jax.sharding.get_mesh(), rows))
        parts = jax.jit(lambda x: per_device_head(head, lambda output, x: greatest(output.logits(x)), x))(x)
        loss = lambda logits: (jnp.sum(greatest(logits)), {})  # noqa: E731
        sums = jax.jit(lambda x: head_sums(Model(head), loss, 1, x)[0])(x)
        weight = np.asarray(head.weight_dv[...], np.float64)
    right = (np.asarray(inputs()["x"].astype(jnp.bfloat16), np.float64) @ weight).max(-1)
    return np.asarray(parts, np.float64).ravel().tolist(), float(sums), right.ravel().tolist()
