"""Kernels of the hot path on the device, with their gradients, against plain float32 on the CPU; the numerics class.

Inputs are numbers of bfloat16, so that what differs is the kernel's own rounding.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axlearn_like.kernels.attention.dispatch import AttentionParams, attend, explain
from axlearn_like.kernels.exact.scope import use_numerics
from axlearn_like.kernels.grouped_matmul import grouped_product
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.kernels.paged_attention.self_test import BOUND, KernelShapes, random_values, run_self_test
from axlearn_like.kernels.policy_head.statistics import policy_statistics
from axlearn_like.kernels.policy_head.sums import HeadRules
from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import bind, build_abstract, split
from axlearn_like.layers.contexts.paged import PagedContext, RowContext, make_pool
from axlearn_like.layers.contexts.paged_decode import PagedDecodeContext
from mesh import make_mesh
from models.tiny import tiny
from tools.bench.doctor.checks import Finding
from tools.bench.doctor.speed import accelerated

Options = Mapping[str, Any]
_WRONG = (
    "do not train on it, it computes wrong numbers: install the pinned versions (pip install -c constraints.txt -e .), "
    "try another device of its kind, and send the output of axl doctor --json"
)


def compare(what: str, kernel: Callable[..., Any], plain: Callable[..., Any], *shapes: tuple[int, ...]) -> Finding:
    """Compare values and gradients of two functions of random arrays: one on the device, one in float32 on the CPU."""
    rng = np.random.default_rng(0)
    given = [random_values(rng, shape, jnp.bfloat16) for shape in shapes]

    def values_and_gradients(function: Callable[..., Any], dtype: Any) -> list[np.ndarray]:
        def run(*x: jax.Array) -> Any:
            out, pull = jax.vjp(function, *x)
            weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).astype(jnp.bfloat16)
            return out, *pull(weights.reshape(out.shape).astype(out.dtype))

        return [np.asarray(x, np.float64) for x in jax.jit(run)(*(jnp.asarray(x, dtype) for x in given))]

    found = values_and_gradients(kernel, jnp.bfloat16)
    with jax.default_device(_cpu()), jax.default_matmul_precision("highest"):
        right = values_and_gradients(plain, jnp.float32)
    errors, wrong = {}, []
    for number, (ours, wanted) in enumerate(zip(found, right, strict=True)):
        name, bound = ("values", BOUND) if not number else (f"gradient {number}", 2 * BOUND)
        errors[name] = float(np.max(np.abs(ours - wanted)) / np.max(np.abs(wanted)))
        if not errors[name] <= bound:  # NaN, too
            wrong.append(f"{name} by {errors[name]:.2g} (at most {bound:g})")
    if wrong:
        return Finding("fail", f"{what} differs from float32: {', '.join(wrong)} of the largest value", _WRONG, errors)
    return Finding("ok", f"{what}: within {max(errors.values()):.1e} of the largest value", "", errors)


def attention(options: Options) -> Finding:
    """Compare attention of packed rows by the kernel that training gets here."""
    length, layer = (512, _layer(8, 128)) if accelerated() else (128, _layer(4, 32))
    segments = (np.arange(length) >= length // 3).astype(np.int32)[None]
    seen = (segments[:, :, None] == segments[:, None, :]) & np.tril(np.ones((length, length), bool))

    def kernel(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, _params(layer), segment_ids=jnp.asarray(segments))

    chosen = explain(layer, platform=jax.default_backend(), dtype=jnp.bfloat16, length=length).kernel
    queries = (1, length, *layer.query_shape)
    keys = (1, length, queries[2], queries[4])
    return compare(f"{type(chosen).__name__}, {length} tokens", kernel, _plain(seen), queries, keys, keys)


def paged_decode(options: Options) -> Finding:
    """Compare attention of the engine's cache: on TPUs by the kernel's own self-test, else by XLA from its pages."""
    heads, page, length = (8, 4, 128) if accelerated() else (2, 2, 32), 16, 304
    kv_heads, per_kv, width = heads
    if jax.default_backend() == "tpu":
        with jax.set_mesh(make_mesh()):
            shapes = KernelShapes(heads, page, jnp.bfloat16, longest=1024, chunk=128)
            found = run_self_test(PagedKernel.Config().build(), shapes, [_layer(kv_heads * per_kv, width).rules])
        return Finding("ok", f"paged attention: within {found['worst']:.1e} of XLA", "", found)
    columns, params = length // page, _params(_layer(kv_heads * per_kv, width))
    table = jnp.asarray(1 + np.random.default_rng(1).permutation(2 * columns).reshape(2, columns), jnp.int32)
    before, pages = jnp.array([length - 1, length - 1], jnp.int32), 1 + 2 * columns

    def decoded(q: Any, k: Any, v: Any) -> Any:
        pool = make_pool(layers=1, pages=pages, page_size=page, kv_heads=kv_heads, head_dim=width, dtype=jnp.bfloat16)
        known = PagedContext(table, jnp.zeros(2, jnp.int32), before, chunk=length, pages=pages)
        prefilled, cache = known.attend(q, k, v, (pool, jnp.int32(0)), params)
        new = PagedDecodeContext(table, before, jnp.ones(2, jnp.int32), chunk=1, pages=pages)
        last, _ = new.attend(q[:, -1:], k[:, -1:], v[:, -1:], cache, params)
        return jnp.concatenate([prefilled[:, :-1], last], axis=1)

    keys, seen = (2, length, kv_heads, width), np.tril(np.ones((1, length, length), bool))
    return compare(
        f"pages of {page} tokens by XLA", decoded, _plain(seen), (2, length, kv_heads, per_kv, width), keys, keys
    )


def grouped_products(options: Options) -> Finding:
    """Compare the grouped products of experts."""
    rows, inner, outer = (2048, 1024, 512) if accelerated() else (160, 64, 96)
    ends = [0, 0, rows // 2, rows // 2 + 1, rows]
    sizes = np.diff(ends).astype(np.int32)

    def plain(x: Any, w: Any) -> Any:
        return jnp.concatenate([x[ends[group] : ends[group + 1]] @ w[group] for group in range(4)])

    shapes = (rows, inner), (4, inner, outer)
    return compare("ragged_dot", lambda x, w: grouped_product(x, w, jnp.asarray(sizes)), plain, *shapes)


def policy_head(options: Options) -> Finding:
    """Compare log-probabilities and entropies of a policy's head."""
    tokens, width, words = (512, 1024, 16_000) if accelerated() else (48, 64, 700)
    targets = np.random.default_rng(1).integers(0, words, tokens).astype(np.int32)

    def kernel(x: Any, weight: Any) -> Any:
        found = policy_statistics(x / 8, weight, jnp.asarray(targets), HeadRules(tile=256))
        return jnp.stack([found.logprob, found.entropy])

    def plain(x: Any, weight: Any) -> Any:
        logs = jax.nn.log_softmax(x @ weight / 8)
        return jnp.stack([logs[np.arange(tokens), targets], -jnp.sum(jnp.exp(logs) * logs, axis=-1)])

    return compare(f"{tokens} tokens, {words:,} words", kernel, plain, (tokens, width), (width, words))


def numerics(options: Options) -> Finding:
    """Say how exact float32 products are, and whether a token's bits depend on the batch around it."""
    a, b = (np.random.default_rng(seed).standard_normal((256, 256), np.float32) for seed in (0, 1))
    right, errors = a.astype(np.float64) @ b, []
    for precision in (None, jax.lax.Precision.HIGHEST):
        found = np.asarray(jax.jit(lambda a, b, p=precision: jnp.matmul(a, b, precision=p))(a, b), np.float64)
        errors.append(float(np.max(np.abs(found - right)) / np.max(np.abs(right))))
    default, highest = errors
    kind = "float32" if default < 3e-6 else "TF32" if default < 1e-3 else "bfloat16"
    alone = _same_alone()
    value = f"float32 products are {kind} by default ({default:.0e}; highest precision {highest:.0e}); bits of a token "
    value += "do not depend on the batch" if alone else "depend on the batch"
    figures = {"default": default, "highest": highest, "batch_invariant": alone}
    if highest > 1e-5:
        return Finding("fail", value, _WRONG, figures)
    if not alone and jax.default_backend() != "gpu":  # promised of CPUs, and of TPUs with exact numerics
        return Finding("warn", value, "install the pinned jaxlib: another version sums in another order", figures)
    return Finding("ok", value, "", figures)


def _same_alone() -> bool:
    """Return True if two rows are the same to the bit alone and among eight; on TPUs with exact numerics."""
    kind = "exact" if jax.default_backend() == "tpu" else "default"
    cfg = tiny(vocab_size=256, dim=256, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=128, hidden=512)
    graphdef, shapes = split(build_abstract(cfg.set(numerics=kind)))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (8, 128)).astype(np.int32)
    # Drawn by the host: an initializer is a program for each shape.
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32) / 16, shapes)

    def score(params: Any, tokens: jax.Array) -> jax.Array:
        with use_numerics(kind):
            model = bind(graphdef, params)
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            return model.logits(model.hidden(tokens, RowContext(positions)).x)

    with jax.set_mesh(make_mesh()):
        whole, part = (np.asarray(jax.jit(score)(params, rows)) for rows in (tokens, tokens[:2]))
    return bool(np.array_equal(whole[:2], part))


def _plain(seen: np.ndarray) -> Callable[..., Any]:
    """Return attention by its equation, of queries [b, t, k, q, h]; `seen`: [b, t, s]."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("btkqh,bskh->bkqts", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30))
        return jnp.einsum("bkqts,bskh->btkqh", weights, v)

    return attention


def _layer(heads: int, width: int) -> Any:
    """Return a layer of attention, without arrays, with our defaults, which choose the kernel."""
    cfg = Attention.Config(dim=width, num_heads=heads, num_kv_heads=max(1, heads // 4), head_dim=width)
    return build_abstract(cfg)


def _params(layer: Any) -> AttentionParams:
    return AttentionParams(layer.rules, layer.kernel, layer.context_parallel)


def _cpu() -> Any:
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names the accelerator alone
        return jax.devices()[0]
