"""Values of products, and attention of whole rows by their kernels, with what is right in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
from axlearn_like.kernels.attention.dispatch import AttentionParams, attend
from axlearn_like.kernels.attention.interface import ScoreRules
from axlearn_like.kernels.attention.splash import Splash
from axlearn_like.kernels.exact.matmul import exact_matmul
from axlearn_like.kernels.exact.row_sums import exact_row_sums
from axlearn_like.kernels.grouped_matmul import grouped_product
from axlearn_like.kernels.low_rank.feed_forward import GLUFactors, by_kernel
from axlearn_like.kernels.quantised_matmul import DTYPES, Numbers, dequantise, quantise, quantised_dot
from axlearn_like.kernels.stacked_grouped_matmul import stacked_product
from tests.axlearn_like.kernels.paged_attention.values import Pairs

LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}  # the number that the largest entry becomes


def exact_product(*, rows: int, depth: int, columns: int) -> Pairs:
    """A product, and the sums of its rows' squares, by the kernels of fixed order."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape, np.float32) for shape in ((rows, depth), (depth, columns)))
    right = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    product = exact_matmul(jnp.asarray(x), jnp.asarray(weight), interpret=True)
    table = exact_matmul(jnp.asarray(x), jnp.asarray(weight.T), table=True, interpret=True)
    sums = exact_row_sums(jnp.asarray(x), squares=True, interpret=True)
    squares = np.sum(np.asarray(x, np.float64) ** 2, axis=1, keepdims=True)
    return [(product, right), (table, right), (sums, squares)]


def low_rank_ffn(*, tokens: int, units: int, ranks: tuple[int, int, int], width: int = 32) -> Pairs:
    """A gated network whose matrices are factors of these ranks."""
    rng = np.random.default_rng(0)
    gate, up, down = ranks
    shapes = [(width, gate), (gate, units), (width, up), (up, units), (units, down), (down, width)]
    x, factors = (
        rng.standard_normal((tokens, width)),
        GLUFactors(*(rng.standard_normal(s) / s[0] ** 0.5 for s in shapes)),
    )
    found = by_kernel(
        jnp.asarray(x, jnp.float32),
        GLUFactors(*(jnp.asarray(one, jnp.float32) for one in factors)),
        lambda gate, up: jax.nn.silu(gate) * up,
        interpret=True,
    )
    wide, other = x @ factors.gate_a @ factors.gate_b, x @ factors.up_a @ factors.up_b
    return [(found, wide / (1 + np.exp(-wide)) * other @ factors.down_a @ factors.down_b)]


def splash(*, width: int, rules: ScoreRules, length: int = 150) -> Pairs:
    """Attention of a row of two documents and some padding, and its gradients."""
    rng, heads, per_head = np.random.default_rng(0), 1, 2
    shapes = (heads, per_head, width), (heads, width), (heads, width)
    q, k, v = (rng.standard_normal((1, length, *shape)) for shape in shapes)
    mixed = rng.standard_normal(q.shape)
    segments = np.repeat([1, 2, 0], [length // 2, length // 3, length - length // 2 - length // 3])[None]
    kernel = Splash.Config(block_q=128, block_kv=128, block_kv_compute=128, interpret=True).build()
    attention = AttentionParams(rules, kernel, AllGather.Config().build())

    def ours(q: Any, k: Any, v: Any) -> jax.Array:
        return attend(q, k, v, attention, segment_ids=jnp.asarray(segments, jnp.int32))

    def plain(q: Any, k: Any, v: Any) -> jax.Array:
        back = np.arange(length)[:, None] - np.arange(length)
        seen = (back >= 0) & (back < (rules.window or length)) & (segments[0][:, None] == segments[0])
        scores = jnp.einsum("btkqh,bskh->bkqts", q, k) * rules.scale_of(width)
        weights = jax.nn.softmax(jnp.where(seen, scores, -np.inf), axis=-1)
        return jnp.einsum("bkqts,bskh->btkqh", weights, v)

    return _with_gradients(ours, plain, (q, k, v), mixed)


def grouped(*, sizes: list[int], width: int, units: int) -> Pairs:
    """Rows sorted by expert, each times its expert's matrix, and the gradients."""
    rng, rows, expert = np.random.default_rng(0), sum(sizes), np.repeat(np.arange(len(sizes)), sizes)
    x, w, mixed = (rng.standard_normal(shape) for shape in ((rows, width), (len(sizes), width, units), (rows, units)))
    counts = np.array(sizes, np.int32)

    def plain(x: Any, w: Any, _: Any) -> jax.Array:
        return jnp.einsum("ri,rio->ro", x, w[expert])

    return _with_gradients(grouped_product, plain, (x, w), mixed, counts)


def grouped_in_stack(*, sizes: list[int], width: int, units: int) -> Pairs:
    """The same with the matrices of the second of three layers, in the stack of them; the last row has no expert."""
    rng, rows = np.random.default_rng(0), sum(sizes)
    x = rng.standard_normal((rows + 1, width), np.float32)
    stack = rng.standard_normal((3, len(sizes), width, units), np.float32)
    found = stacked_product(jnp.asarray(x), jnp.asarray(stack), 1, jnp.array(sizes, jnp.int32), interpret=True)
    matrices = stack[1].astype(np.float64)[np.repeat(np.arange(len(sizes)), sizes)]
    return [(found[:rows], np.einsum("ri,rio->ro", x[:rows].astype(np.float64), matrices))]


def quantised(*, numbers: Numbers, rows: int, depth: int, columns: int) -> Pairs:
    """A product of rounded rows and rounded columns, and the gradients, which are those of the rounded arrays."""
    rng = np.random.default_rng(0)
    x, w, mixed = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((rows, depth), (depth, columns), (rows, columns))
    )

    def loss(x: Any, w: Any) -> tuple[jax.Array, jax.Array]:
        y = quantised_dot(x, w, numbers, None, None)
        return jnp.sum(y * mixed), y

    (_, y), (dx, dw) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(jnp.asarray(x), jnp.asarray(w))
    rounded_x, rounded_w = _rounded(x, 1, numbers), _rounded(w, 0, numbers)
    return [(y, rounded_x @ rounded_w), (dx, mixed @ rounded_w.T), (dw, rounded_x.T @ mixed.astype(np.float64))]


def quantised_weights(*, numbers: Numbers, group: int, rows: int, depth: int, columns: int) -> Pairs:
    """A product with weights that are kept as such numbers, with a scale for each group of inputs, and restored."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, depth), (depth, columns)))
    kept = quantise(jnp.asarray(w), [0], numbers, group)
    right = np.concatenate([_rounded(part, 0, numbers) for part in w.reshape(-1, group, columns)])
    return [(jnp.asarray(x) @ dequantise(kept, jnp.float32), x @ right)]


def _rounded(x: np.ndarray, axis: int, numbers: Numbers) -> np.ndarray:
    """Return the nearest such numbers times their scales, in float64; `axis`: of the entries that share a scale."""
    scale = np.abs(x.astype(np.float64)).max(axis=axis, keepdims=True) / LARGEST[numbers]
    whole = np.rint(x / scale) if numbers != "fp8" else (x / scale).astype(DTYPES[numbers]).astype(np.float64)
    return whole * scale


def _with_gradients(
    ours: Callable[..., Any], plain: Callable[..., Any], arrays: tuple[Any, ...], mixed: Any, *fixed: Any
) -> Pairs:
    """Return values, and gradients of a random mixture of them: ours in float32, what is right in float64.

    `fixed`: further arguments, without gradients.
    """

    def results(fn: Callable[..., Any], dtype: Any) -> list[np.ndarray]:
        def loss(*args: Any) -> tuple[jax.Array, jax.Array]:
            y = fn(*args)
            return jnp.sum(mixed.astype(dtype) * y), y

        run = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(arrays))), has_aux=True))
        (_, y), gradients = run(*(jnp.asarray(x, dtype) for x in arrays), *fixed)
        return [np.asarray(one) for one in (y, *gradients)]

    found = results(ours, np.float32)
    with jax.enable_x64(True):
        right = results(plain, np.float64)
    return list(zip(found, right, strict=True))
