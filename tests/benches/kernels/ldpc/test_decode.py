"""Decoders against min-sum by its textbook form, and against one another to the bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh import make_mesh
from tests.benches.kernels.ldpc.codes import make_code
from tests.benches.kernels.ldpc.decode import MinSum, decode_numpy, decode_pallas, decode_xla, sum_product
from tests.benches.kernels.ldpc.test_codes import matrix
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

CODE = make_code(16, rows=3, columns=6, seed=1)
RULES = [MinSum(layered, fixed, passes=3) for layered in (True, False) for fixed in (True, False)]


def channel(batch: int, decibels: float, code=CODE) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    words = code.encode(rng.integers(0, 2, (code.columns - len(code.shifts), batch, code.lift)))
    variance = 1 / 10 ** (decibels / 10)
    return words, 2 * (1 - 2.0 * words + rng.normal(size=words.shape) * variance**0.5) / variance


def textbook(values: Any, rule: MinSum) -> Any:
    """Return sums of one word [bits], check by check and edge by edge, in whole numbers or float64."""
    checks = matrix(CODE)
    messages = np.zeros(checks.shape)
    bits = values.astype(np.float64).copy()
    groups = [range(n * CODE.lift, (n + 1) * CODE.lift) for n in range(len(CODE.shifts))]
    for _ in range(rule.passes):
        read, written = bits.copy(), values.astype(np.float64).copy()
        for group in groups:
            for check in group:
                edges = np.flatnonzero(checks[check])
                source = bits if rule.layered else read
                whole = {v: source[v] - messages[check, v] for v in edges}
                heard = {v: np.clip(x, -127, 127) if rule.fixed else x for v, x in whole.items()}
                for v in edges:
                    others = [heard[u] for u in edges if u != v]
                    size = min(abs(x) for x in others) * 7 / 8
                    size = np.floor(size) if rule.fixed else size
                    sign = -1 if sum(x < 0 for x in others) % 2 else 1
                    messages[check, v] = sign * size
                for v in edges:
                    if rule.layered:
                        bits[v] = whole[v] + messages[check, v]
                    else:
                        written[v] += messages[check, v]
        bits = bits if rule.layered else written
    return bits


@pytest.mark.numerics
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_numpy_decodes_as_the_textbook_does(rule: MinSum):
    _, ratios = channel(2, 2.0)
    values = rule.quantise(ratios)
    found = decode_numpy(CODE, rule, values).transpose(1, 0, 2).reshape(2, -1)
    expected = np.stack([textbook(one, rule) for one in values.transpose(1, 0, 2).reshape(2, -1)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=0 if rule.fixed else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[] if rule.fixed else pytest.mark.full, id=str(rule)) for rule in RULES]
)
def test_decisions_of_xla_and_of_the_simulated_kernel_are_those_of_numpy(rule: MinSum):
    words, ratios = channel(16, 1.0)
    values = rule.quantise(ratios)
    expected = decode_numpy(CODE, rule, values)
    np.testing.assert_array_equal(np.asarray(decode_xla(CODE, rule, values)), expected)
    np.testing.assert_array_equal(np.asarray(decode_pallas(CODE, rule, values, interpret=True)), expected)
    assert ((expected < 0) != words).mean() < ((ratios < 0) != words).mean()


def test_the_yardstick_corrects_what_noise_has_turned():
    code = make_code(32)
    words, ratios = channel(4, 2.5, code)
    assert ((ratios < 0) != words).mean() > 0.02
    assert ((sum_product(code, ratios, 20) < 0) == words).all()
    assert ((decode_numpy(code, MinSum(), MinSum().quantise(ratios)) < 0) == words).all()


@pytest.mark.full
@needs_tpu_compiler
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_kernel_compiles_for_tpus(topology: str):
    found = elsewhere(compile_for_tpu, topology, environ=TPU_COMPILER)
    assert set(found) == {str(rule) for rule in RULES} and min(found.values()) >= 0


def compile_for_tpu(topology: str) -> dict[str, int]:
    """Temporary bytes of the kernel with the code of 3,072 bits on one device, by rule."""
    from jax.experimental import topologies

    mesh = make_mesh({}, topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1])
    code, found = make_code(128), {}
    for rule in RULES:
        dtype = jnp.int32 if rule.fixed else jnp.float32
        x = jax.ShapeDtypeStruct((24, 64, 128), dtype, sharding=jax.NamedSharding(mesh, jax.P()))
        memory = jax.jit(lambda x, rule=rule: decode_pallas(code, rule, x)).lower(x).compile().memory_analysis()
        assert memory is not None
        found[str(rule)] = memory.temp_size_in_bytes
    return found
