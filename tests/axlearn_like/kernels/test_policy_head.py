"""Statistics of a policy's distributions without logits: values and gradients against float64, batches, memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.policy_head.statistics import policy_statistics
from axlearn_like.kernels.policy_head.sums import HeadRules, Statistics
from mesh import UserError, make_mesh
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

TOKENS, WIDTH, WORDS = 21, 24, 300  # neither blocks nor tiles are full
RULES = HeadRules(temperature=0.7, soft_cap=4.0, tile=128, tokens=8)


def inputs() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x, other = (rng.standard_normal((TOKENS, WIDTH)).astype(np.float32) for _ in range(2))
    weight, head = (0.5 * rng.standard_normal((WIDTH, WORDS)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, WORDS, TOKENS).astype(np.int32)
    targets[:2] = 0, WORDS - 1
    return x, weight, targets, (other, head), rng.standard_normal((4, TOKENS)).astype(np.float32)


def plain(x: Any, weight: Any, targets: Any, rules: HeadRules, reference: Any) -> Statistics:
    """The same from whole logits."""
    logprobs = jax.nn.log_softmax(rules.logits(x @ weight), axis=-1)
    other = jax.nn.log_softmax(rules.logits(reference[0] @ reference[1]), axis=-1)
    share = jnp.exp(logprobs)
    return Statistics(
        jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0],
        jax.nn.logsumexp(rules.logits(x @ weight), axis=-1),
        -jnp.sum(share * logprobs, axis=-1),
        jnp.sum(share * (logprobs - other), axis=-1),
    )


def with_gradients(compute: Any, x: Any, weight: Any, mixed: Any) -> Any:
    """Statistics, and gradients of a random mixture of them."""

    def loss(x: Any, weight: Any) -> Any:
        found = compute(x, weight)
        return sum(jnp.sum(a * one) for a, one in zip(mixed, found, strict=True) if one is not None), found

    (_, found), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, weight)
    return found, gradients


def expected(rules: HeadRules, *, kl: bool) -> Any:
    x, weight, targets, reference, mixed = inputs()
    mixed = mixed if kl else [*mixed[:3], np.zeros(TOKENS)]
    with jax.enable_x64(True):
        wide = [jnp.asarray(one, jnp.float64) for one in (x, weight, *reference, *mixed)]
        return jax.tree.map(
            np.asarray,
            with_gradients(lambda x, w: plain(x, w, targets, rules, wide[2:4]), wide[0], wide[1], wide[4:]),
        )


@pytest.mark.parametrize(
    "rules", [pytest.param(RULES, id="cap"), pytest.param(HeadRules(tile=384), id="one tile", marks=pytest.mark.full)]
)
def test_by_xla_against_float64(rules: HeadRules):
    x, weight, targets, reference, mixed = inputs()
    run = jax.jit(
        lambda x, w: with_gradients(lambda x, w: policy_statistics(x, w, targets, rules, reference), x, w, mixed)
    )
    for found, right in zip(jax.tree.leaves(run(x, weight)), jax.tree.leaves(expected(rules, kl=True)), strict=True):
        np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-5)


def test_by_the_kernels_against_float64():
    x, weight, targets, _, mixed = inputs()

    def run(x: Any, weight: Any) -> Any:
        compute = lambda x, w: policy_statistics(x, w, targets, RULES, kernel=True, interpret=True)  # noqa: E731
        return with_gradients(compute, x, weight, mixed)

    found, gradients = run(x, weight)
    right, right_gradients = expected(RULES, kl=False)
    pairs = [*zip(found[:3], right[:3], strict=True), *zip(gradients, right_gradients, strict=True)]
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_a_token_has_the_same_bits_in_any_batch():
    x, weight, targets, reference, _ = inputs()
    x, weight = np.tile(x, (4, 1)), np.ascontiguousarray(weight)
    run = jax.jit(lambda x, t: policy_statistics(x, jnp.asarray(weight), t, RULES)[:3])
    whole = run(x, np.tile(targets, 4))
    part = run(x[:70], np.tile(targets, 4)[:70])
    for a, b in zip(whole, part, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[:70], b)
    del reference


def test_what_cannot_be_is_refused():
    x, weight, targets, reference, _ = inputs()
    wrong: Any
    for wrong in ({"temperature": 0.0}, {"tile": 100}, {"tokens": 4}):
        with pytest.raises(UserError, match="policy head"):
            HeadRules(**wrong)
    with pytest.raises(UserError, match="no reference"):
        policy_statistics(x, weight, targets, RULES, reference, kernel=True)


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_tpu_compiler_stores_no_logits(topology: str):
    """8,192 tokens, 151,936 words: a twentieth of the temporary memory of whole logits at most."""
    found = elsewhere(compile_for_tpu, topology, environ=TPU_COMPILER)
    assert found["kernel"] <= 0.05 * found["whole"]
    assert found["scan"] <= 0.05 * found["whole"]


def compile_for_tpu(topology: str) -> dict[str, int]:
    """Temporary bytes of log-probability and entropy, forward and backward, on one device."""
    from jax.experimental import topologies

    mesh = make_mesh({}, topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1])
    sharding = jax.NamedSharding(mesh, jax.P())
    tokens, width, words = 8192, 2048, 151_936

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def whole(x: Any, weight: Any, targets: Any) -> Any:
        logprobs = jax.nn.log_softmax(jnp.dot(x, weight, preferred_element_type=jnp.float32), axis=-1)
        words_ = jnp.arange(words)
        return jnp.sum(jnp.where(words_ == targets[:, None], logprobs, 0.0)) - jnp.sum(jnp.exp(logprobs) * logprobs)

    def tiled(kernel: bool, x: Any, weight: Any, targets: Any) -> Any:
        found = policy_statistics(x, weight, targets, HeadRules(tile=512), kernel=kernel)
        return jnp.sum(found.logprob) + jnp.sum(found.entropy)

    def temporary(loss: Any) -> int:
        arrays = array(tokens, width), array(width, words), array(tokens, dtype=jnp.int32)
        with jax.set_mesh(mesh):
            memory = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    ways = {"whole": whole, "kernel": lambda *a: tiled(True, *a), "scan": lambda *a: tiled(False, *a)}
    return {name: temporary(loss) for name, loss in ways.items()}
