"""The plain script is the same model, our worker serves steps, and the arithmetic of the result is right."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.base import split
from axlearn_like.training.losses import make_supervised_loss
from tests.peers.train_job import QUICK, TrainJob
from tests.studies.dispatch import batch_of
from tests.studies.train_step import benchmark as bench
from tests.studies.train_step.ours import float32_quick
from tests.studies.train_step.plain import FLAT, PLAIN, Products, init, make_loss
from tools.bench.harness.interleave import Measured, measure
from tools.bench.harness.protocol import TRAIN_FIELDS


@pytest.fixture(scope="module")
def ours() -> tuple[nnx.GraphDef[Any], Any]:
    return split(float32_quick().model.build(rngs=nnx.Rngs(0)))


@pytest.mark.numerics
@pytest.mark.full
@pytest.mark.parametrize("products", [pytest.param(PLAIN, id="plain"), pytest.param(FLAT, id="flat")])
def test_plain_script_computes_the_loss_and_gradient_of_our_decoder(
    ours: tuple[nnx.GraphDef[Any], Any], products: Products
) -> None:
    graphdef, params = ours
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, QUICK.vocab, (2, QUICK.batch, QUICK.length), dtype=np.int32)
    batch: dict[str, Any] = batch_of(QUICK) | {"tokens": tokens, "targets": targets}
    batch["positions"] = np.broadcast_to(np.arange(QUICK.length, dtype=np.int32), tokens.shape)
    our_loss = make_supervised_loss(graphdef)
    expected, our_grads = jax.jit(jax.value_and_grad(lambda p: our_loss(p, batch)[0]))(params)
    plain_loss = make_loss(QUICK, "float32", products)
    value, grads = jax.jit(jax.value_and_grad(plain_loss))(_as_plain(params), tokens, targets)
    assert value == pytest.approx(float(expected), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-6), grads, _as_plain(our_grads))


def test_all_have_the_number_of_parameters_that_the_job_states(ours: tuple[nnx.GraphDef[Any], Any]) -> None:
    assert sum(leaf.size for leaf in jax.tree.leaves(ours[1])) == QUICK.parameters
    job = TrainJob()
    plain = jax.eval_shape(lambda key: init(job, key), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(plain)) == job.parameters == 4_720_896


@pytest.mark.full
def test_our_trainer_and_the_plain_script_serve_steps_in_tiny() -> None:
    systems, errors = bench.commands([], lambda _: None, quick=True)
    workers = {name: bench.with_dtype(systems[name], "float32") for name in ("ours", "plain_jax")}
    results = measure(workers, 1, lambda _: None, TRAIN_FIELDS)
    assert not errors and [result.error for result in results.values()] == [None, None]
    for result in results.values():
        (step,) = result.steps
        assert step["cpu_s"] > 0 and 2 < step["loss"] < 6  # about log of 32 words
        assert result.ready["parameters"] == QUICK.parameters


def test_ratios_are_medians_over_rounds_and_dtypes_stand_apart() -> None:
    steps = {
        "ours float32": _measured([1.0, 3.0, 1.2]),
        "plain_jax float32": _measured([2.0, 4.0, 2.0]),
        "plain_jax_flat float32": _measured([1.0, 2.0, 1.0]),
        "maxtext float32": Measured(error="maxtext float32: ended with status 1"),
        "ours bfloat16": _measured([1.0]),
        "plain_jax bfloat16": _measured([4.0]),
    }
    starts = {"ours": [{"start_cpu_s": s} for s in (5.0, 3.0, 4.0)], "maxtext": []}
    result = bench.summarise(steps, starts, 3)
    assert result["ours_cpu_s"] == 1.2 and result["plain_jax_cpu_s"] == 2.0
    assert result["ratio"] == pytest.approx(0.6)  # of 0.5, 0.75, 0.6
    assert result["ratio_to_plain_jax_flat"] == pytest.approx(1.2)
    assert result["bfloat16"]["ratio"] == 0.25 and result["bfloat16"]["plain_jax_flat_cpu_s"] is None
    assert result["cold_start_cpu_s"] == 4.0
    assert json.loads(json.dumps(result)) == result


def _as_plain(params: Any) -> Any:
    """Return our parameters (or their gradients) under the names and in the shapes of the plain script."""
    layers, mixer, wide = params["layers"], params["layers"]["attention"], params["layers"]["feed_forward"]
    n, d = QUICK.layers, QUICK.dim
    return {
        "table": params["embedding"]["weight_vd"],
        "layers": {
            "norm1": layers["attention_norm"]["scale"],
            "query": mixer["q_dkqh"].reshape(n, d, d),
            "key": mixer["k_dkh"].reshape(n, d, d),
            "value": mixer["v_dkh"].reshape(n, d, d),
            "out": mixer["out_kqhd"].reshape(n, d, d),
            "norm2": layers["feed_forward_norm"]["scale"],
            "gate": wide["gate_df"],
            "up": wide["up_df"],
            "down": wide["down_fd"],
        },
        "norm": params["norm"]["scale"],
        "head": params["head"]["weight_dv"],
    }


def _measured(cpu: list[float]) -> Measured:
    steps = [{"cpu_s": c, "wall_s": 2 * c, "idle_cpu_s": 0.0, "loss": 6.9} for c in cpu]
    return Measured(ready={"start_cpu_s": 9.0, "version": "x 1", "parameters": 7}, steps=steps)
