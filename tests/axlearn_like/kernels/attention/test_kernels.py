"""Every kernel that runs here against numpy in float64: values, and gradients by finite differences."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention import splash
from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
from axlearn_like.kernels.attention.cudnn import Cudnn, dot_product
from axlearn_like.kernels.attention.dispatch import AttentionParams, FirstSupported, attend, choose
from axlearn_like.kernels.attention.interface import AttentionArrays, AttentionSignature, Kernel, ScoreRules
from axlearn_like.kernels.attention.splash import Splash, fitting
from axlearn_like.kernels.attention.xla import Xla
from mesh import UserError
from mesh.cost.arithmetic import products
from tests.axlearn_like.kernels.attention import reference

RULES: dict[str, tuple[ScoreRules, bool]] = {
    "causal": (ScoreRules(), False),
    "window": (ScoreRules(window=5), False),
    "cap, scale": (ScoreRules(soft_cap=1.5, scale=0.7), False),
    "window, cap, sinks": (ScoreRules(window=7, soft_cap=2.0), True),
    "both cp_size": (ScoreRules(causal=False), True),
}
FIRST = FirstSupported.Config()
CALL = AttentionSignature("tpu", np.dtype(jnp.bfloat16), 4096, 8, 4, 128, 128, ScoreRules())


def value_and_grad(kernel: Kernel, rules: ScoreRules, sinks: bool, x: reference.Inputs, weights: np.ndarray) -> Any:
    def mixed(q: Any, k: Any, v: Any, s: Any) -> jax.Array:
        attention = AttentionParams(rules, kernel, AllGather.Config().build(), s if sinks else None)
        return attend(q, k, v, attention, segment_ids=jnp.asarray(x.segments))

    def loss(*args: Any) -> tuple[jax.Array, jax.Array]:
        out = mixed(*args)
        return jnp.sum(out * weights), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(x.q, x.k, x.v, x.sinks)
    return np.asarray(out), dict(zip(("q", "k", "v", "sinks"), grads, strict=True))


def check(kernel: Kernel, rules: ScoreRules, sinks: bool, x: reference.Inputs, count: int = 4) -> None:
    expected = reference.attention(x, rules, sinks=sinks)
    weights = np.random.default_rng(3).normal(size=expected.shape).astype(np.float32)
    out, grads = value_and_grad(kernel, rules, sinks, x, weights)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    for name, index, slope in reference.gradients(x, rules, weights, sinks=sinks, count=count):
        np.testing.assert_allclose(grads[name][index], slope, rtol=1e-3, atol=2e-4, err_msg=f"{name}{index}")


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("kind", RULES)
def test_xla_is_the_equation(kind):
    x = reference.inputs(batch=2, length=12, heads=(2, 3), width=8, value_width=4)
    check(Xla.Config().build(), *RULES[kind], x)


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("kind, fused, long", [("window, cap, sinks", False, False), ("causal", True, True)])
def test_splash_is_the_equation(kind, fused, long, monkeypatch):
    """The interpreter runs 150 tokens: two blocks of 128, the second padded; in long rows one, if keys pass once."""
    if long:
        monkeypatch.setattr(splash, "LONG", 150)
    x = reference.inputs(batch=1, length=150, heads=(1, 2), width=64, value_width=32)
    rules, sinks = RULES[kind]
    rules = ScoreRules(window=rules.window and 40, soft_cap=rules.soft_cap)
    kernel = Splash.Config(block_q=128, block_kv=128, block_kv_compute=128, fused_backward=fused, interpret=True)
    check(kernel.build(), rules, sinks, x, count=2)


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("kind", ["causal", "window", "both cp_size"])
def test_what_cudnn_is_asked_is_the_equation(kind):
    """The other implementation of the same function of JAX is the reference."""
    x, rules = reference.inputs(batch=2, length=13, heads=(2, 3), width=8), RULES[kind][0]
    signature = AttentionSignature("gpu", np.dtype(jnp.float32), 13, 2, 3, 8, 8, rules)
    segments = jnp.asarray(x.segments)
    q, k, v = (jnp.asarray(a) for a in (x.q, x.k, x.v))
    found = dot_product(AttentionArrays(q, k, v, segments, jnp.arange(13)), signature, "xla")
    np.testing.assert_allclose(found, reference.attention(x, rules), atol=2e-5)


def test_the_first_kernel_that_can_is_chosen_and_the_others_say_why_not():
    def on(platform: str, kernel: Any = FIRST, **changes: Any) -> Any:
        return choose(kernel.build(), dataclasses.replace(CALL, platform=platform, **changes))

    assert isinstance(on("tpu").kernel, Splash)
    assert isinstance(on("gpu").kernel, Cudnn)
    assert isinstance(on("cpu").kernel, Xla)
    assert str(on("cpu")) == "Xla (not Splash: for TPUs, not for cpu; not Cudnn: for NVIDIA GPUs, not for cpu)"
    assert on("gpu", sinks=True).refused["Cudnn"] == "has no sinks"
    assert on("gpu", rules=ScoreRules(soft_cap=3.0)).refused["Cudnn"] == "has no soft cap"
    assert (
        on("tpu", ring=True, cp_size=4, rules=ScoreRules(window=9)).refused["Splash"]
        == "cannot have a window in a ring"
    )
    assert isinstance(on("tpu", Xla.Config()).kernel, Xla)
    with pytest.raises(UserError, match=r"no kernel can do this attention \(Splash: for TPUs, not for cpu\)"):
        on("cpu", Splash.Config())


def test_blocks_are_clipped_to_the_length():
    assert [fitting(1024, n) for n in (4096, 1024, 640, 128, 1152)] == [1024, 1024, 640, 128, 384]
    for bad in ("block_q", "block_kv", "block_kv_compute"):
        with pytest.raises(UserError, match=f"Splash.{bad}: expected a multiple of 128, got 100"):
            Splash.Config().set(**{bad: 100}).build()
    with pytest.raises(UserError, match="block_kv: expected a multiple of block_kv_compute=384, got 256"):
        Splash.Config(block_kv=256, block_kv_compute=384).build()


@pytest.mark.parametrize(
    "length, fused, keys",
    [(4096, True, 1024), (16_384, True, 2048), (24_576, True, 2048), (32_768, False, 1024), (129 * 128, False, 384)],
)
def test_the_backward_pass_is_fused_while_the_parts_of_dq_are_few(length, fused, keys):
    sizes = Splash.Config().build().sizes((length, length))
    assert (sizes.fused, sizes.kv_dkv) == (fused, keys)
    assert Splash.Config(fused_backward=not fused).build().sizes((length, length)).fused != fused


@pytest.mark.slow
def test_products_of_a_long_row_are_counted_by_the_blocks_of_each_pass():
    """Two forward; five backward in one pass by larger blocks, or three and four. Blocks above the diagonal: none."""
    length, width = 16_384, 128
    q, k = (jax.ShapeDtypeStruct((1, length, *heads, width), jnp.bfloat16) for heads in ((1, 1), (1,)))

    def counted(fused: bool | None) -> float:
        kernel = Splash.Config(fused_backward=fused, interpret=True).build()
        attention = AttentionParams(ScoreRules(), kernel, AllGather.Config().build())

        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            segments = jnp.zeros((1, length), jnp.int32)
            return jnp.sum(attend(q, k, v, attention, segment_ids=segments).astype(jnp.float32))

        return products(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, k)).kernels

    causal = length * length * width  # a product with half of the pairs
    assert counted(False) == (2 + 3 + 4) * (1 + 1024 / length) * causal
    assert counted(None) == (2 * (1 + 1024 / length) + 5 * (1 + 2048 / length)) * causal


def test_rules_that_contradict_are_refused():
    with pytest.raises(UserError, match="Attention.window=0; expected 1 or more"):
        ScoreRules(window=0)
    with pytest.raises(UserError, match="looks back only"):
        ScoreRules(window=4, causal=False)
    with pytest.raises(UserError, match="Attention.soft_cap=0"):
        ScoreRules(soft_cap=0.0)
