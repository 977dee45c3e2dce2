"""Statistics of a policy's distributions without logits: values and gradients against float64, batches, memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.policy_head.statistics import OtherPolicy, policy_statistics
from axlearn_like.kernels.policy_head.sums import HeadRules
from mesh import UserError, make_mesh
from tests.axlearn_like.kernels.whole_head import NAMES, by_name, in_float64, whole_statistics, with_gradients
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

pytestmark = pytest.mark.numerics

TOKENS, WIDTH, WORDS = 21, 24, 300  # neither blocks nor tiles are full
RULES = HeadRules(temperature=0.7, soft_cap=4.0, tile=128)
OTHER = HeadRules(temperature=0.7, soft_cap=9.0, tile=128)


def inputs() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x, other = (rng.standard_normal((TOKENS, WIDTH)).astype(np.float32) for _ in range(2))
    weight, head = (0.5 * rng.standard_normal((WIDTH, WORDS)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, WORDS, TOKENS).astype(np.int32)
    targets[:2] = 0, WORDS - 1
    mixed = {name: rng.standard_normal(TOKENS).astype(np.float32) for name in NAMES}
    return x, weight, targets, (other, head), mixed


def expected(rules: HeadRules, *, kl: bool, candidates: Any = None) -> Any:
    x, weight, targets, reference, mixed = inputs()
    other = (*reference, OTHER) if kl else None
    return in_float64(lambda x, w: whole_statistics(x, w, targets, rules, other, candidates), mixed, x, weight)


def assert_close(found: Any, right: Any) -> None:
    """Compare statistics and gradients, by name."""
    assert jax.tree.structure(found) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules", [pytest.param(RULES, id="cap"), pytest.param(HeadRules(tile=384), id="one tile", marks=pytest.mark.full)]
)
def test_by_xla_against_float64(rules: HeadRules):
    """The reference's head has a soft cap of its own."""
    x, weight, targets, reference, mixed = inputs()
    other = OtherPolicy(reference[0], reference[1], OTHER)
    compute = lambda x, w: by_name(policy_statistics(x, w, targets, rules, other))  # noqa: E731
    assert_close(jax.jit(lambda x, w: with_gradients(compute, mixed, x, w))(x, weight), expected(rules, kl=True))


@pytest.mark.slow
def test_over_the_candidates_that_a_sampler_left():
    """The candidates may be one word, words far apart, or the last word; words outside have no gradient."""
    x, weight, targets, reference, mixed = inputs()
    rng = np.random.default_rng(1)
    candidates = rng.permuted(np.arange(WORDS, dtype=np.int32)[None].repeat(TOKENS, 0), axis=1)[:, :6]
    candidates[:, 2], candidates[0, :2], candidates[0, 3:], candidates[3, :5] = (
        targets,
        -1,
        -1,
        -1,
    )
    targets[3] = candidates[3, 5] = WORDS - 1
    other = OtherPolicy(reference[0], reference[1], OTHER)
    compute = lambda x, w: by_name(policy_statistics(x, w, targets, RULES, other, candidates=jnp.asarray(candidates)))  # noqa: E731
    found = jax.jit(lambda x, w: with_gradients(compute, mixed, x, w))(x, weight)
    whole = lambda x, w: whole_statistics(x, w, targets, RULES, (*reference, OTHER), candidates)  # noqa: E731
    assert_close(found, in_float64(whole, mixed, x, weight))
    assert [float(found[0][name][0]) for name in ("logprob", "entropy", "kl")] == [0, 0, 0], "one word is certain"
    unkept = np.setdiff1d(np.arange(WORDS), candidates)
    assert np.any(unkept) and not np.any(np.asarray(found[1][1])[:, unkept])


@pytest.mark.slow
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
    wrong: Any
    for wrong in ({"temperature": 0.0}, {"tile": 100}, {"tile": 0}):
        with pytest.raises(UserError, match="policy head"):
            HeadRules(**wrong)


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_tpu_compiler_stores_no_logits(topology: str):
    """8,192 tokens, 151,936 words: a twentieth of the temporary memory of whole logits at most."""
    found = elsewhere(compile_for_tpu, topology, environ=TPU_COMPILER)
    assert found["tiled"] <= 0.05 * found["whole"]


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

    def tiled(x: Any, weight: Any, targets: Any) -> Any:
        found = policy_statistics(x, weight, targets, HeadRules(tile=512))
        return jnp.sum(found.logprob) + jnp.sum(found.entropy)

    def temporary(loss: Any) -> int:
        arrays = array(tokens, width), array(width, words), array(tokens, dtype=jnp.int32)
        with jax.set_mesh(mesh):
            memory = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    return {"whole": temporary(whole), "tiled": temporary(tiled)}
