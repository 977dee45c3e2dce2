"""Rows of a prompt and its answers: who sees whom, by counting, and the kernel against XLA's products."""

import dataclasses
from importlib import import_module
from types import SimpleNamespace
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
from axlearn_like.kernels.attention.cudnn import Cudnn
from axlearn_like.kernels.attention.dispatch import AttentionParams, FirstSupported, choose
from axlearn_like.kernels.attention.interface import AttentionArrays, AttentionSignature, Kernel, ScoreRules
from axlearn_like.kernels.attention.shared_prefix import SharedPrefix, SharedPrefixes, shared_prefix_mask
from axlearn_like.kernels.attention.splash import Splash
from axlearn_like.kernels.attention.xla import Xla
from axlearn_like.layers.contexts.packed import Context, GroupContext, PackedGroupContext
from mesh import UserError
from mesh.cost.arithmetic import products


def sees(rows: SharedPrefix, query: int, key: int) -> bool:
    """Return the definition: the prefix up to the query, and the own completion."""

    def completion(place: int) -> int:
        return -1 if place < rows.prefix else (place - rows.prefix) // rows.completion_size

    return key <= query and (key < rows.prefix or completion(key) == completion(query))


@pytest.mark.parametrize(
    "rows", [SharedPrefix(5, 3, 4), SharedPrefix(8, 2, 8), SharedPrefix(0, 3, 5), SharedPrefix(3, 1, 6)]
)
def test_visible_is_the_definition(rows):
    length = rows.length + 3
    mask = np.asarray(rows.visible(rows.codes(length)[:, None], np.arange(length)[None]))[: rows.length]
    expected = [[sees(rows, q, k) for k in range(length)] for q in range(rows.length)]
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize("rows", [SharedPrefixes(5, 11), SharedPrefixes(3, 20), SharedPrefixes(4000, 300_000)])
def test_codes_tell_where_a_completion_begins(rows):
    """A query sees all before it of the prompts and of its own completion, wherever that begins."""
    assert rows.alignment == (128 if rows.length > 300_000 else 1)  # 19 bits for the place leave 12 for the start
    rng = np.random.default_rng(0)
    starts = rng.integers(0, rows.completion_size // rows.alignment, (2, rows.completion_size)) * rows.alignment
    starts = np.minimum(starts, np.arange(rows.completion_size) // rows.alignment * rows.alignment)
    codes = np.asarray(rows.codes(jnp.asarray(starts, jnp.int32)))
    for place in rng.integers(0, rows.length, 20):
        seen = np.asarray(rows.visible(codes[:, place, None], np.arange(rows.length)[None]))
        for row in range(2):
            start = 0 if place < rows.prefix else rows.prefix + starts[row, place - rows.prefix]
            keys = np.arange(rows.length)
            np.testing.assert_array_equal(seen[row], (keys <= place) & ((keys < rows.prefix) | (keys >= start)))


@pytest.mark.parametrize("rows", [SharedPrefix(8, 3, 8), SharedPrefix(7, 3, 9), SharedPrefix(16, 4, 4)])
@pytest.mark.parametrize("blocks", [(4, 4), (8, 4), (2, 8)])
def test_blocks_told_without_computing_them_are_as_computed(rows, blocks):
    length = -(-rows.length // 8) * 8
    mask, q, kv = shared_prefix_mask(rows, np.arange(length)), *blocks
    whole = np.asarray(rows.visible(rows.codes(length)[:, None], np.arange(length)[None]))
    told = 0
    for i in range(0, length, q):
        for j in range(0, length, kv):
            block = mask[slice(i, i + q), slice(j, j + kv)]
            part = whole[i : i + q, j : j + kv]
            assert (block.any(), block.all()) == (part.any(), part.all())
            told += block.shape == (1, 1)
    assert told > length // q  # most blocks of other completions, and all of the prefix that is seen


def test_blocks_of_other_completions_are_not_visited():
    rows = SharedPrefix(256, 4, 256)
    kernel = Splash.Config(block_q=128, block_kv=128, block_kv_compute=128, fused_backward=False).build()
    signature = AttentionSignature(
        "tpu", np.dtype(jnp.bfloat16), rows.length, 1, 1, 128, 128, ScoreRules(), shared_prefix=rows
    )
    tables = kernel.tables(signature)
    assert tables is not None  # as of rows whose masks are made in the step
    forward, dq, dkv = tables.arrays
    visited = 3 + 4 * (4 + 3)  # of the prefix its causal half, of a completion the prefix and its causal half
    assert [int(np.count_nonzero(table.block_mask)) for table in (forward, dq, dkv)] == [visited] * 3
    assert forward.block_mask.shape[2] == 4  # blocks of keys that a block of queries is led to at most


def test_the_flops_counted_are_those_of_the_blocks_that_are_visited():
    rows, width = SharedPrefix(256, 4, 256), 128
    blocks = Splash.Config(block_q=128, block_kv=128, block_kv_compute=128, fused_backward=False, interpret=True)
    context = GroupContext(jnp.full((1,), 256, jnp.int32), rows.prefix, rows.completions, rows.completion_size)
    attention = AttentionParams(ScoreRules(), blocks.build(), AllGather.Config().build())
    x = jax.ShapeDtypeStruct((1, rows.length, 2, width), jnp.float32)

    def loss(q: Any, k: Any, v: Any) -> jax.Array:
        return jnp.sum(context.attend(q[..., None, :], k, v, None, attention)[0])

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x)
    products_of_a_pair = 2 + 3 + 4  # forward, dq, dk and dv
    assert products(traced).kernels == products_of_a_pair * 2 * 31 * 2 * 128 * 128 * width


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng, length = np.random.default_rng(0), 130 + 2 * 150
    shapes = {"q": (2, length, 2, 2, 64), "k": (2, length, 2, 64), "v": (2, length, 2, 32), "w": (2, length, 2, 2, 32)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def one_group() -> tuple[Context, np.ndarray]:
    """A prefix of 130 tokens, in one row 7 of them live, and two completions of 150."""
    live = np.ones((2, 430), bool)
    live[1, 7:130] = False
    return GroupContext(jnp.asarray([130, 7], jnp.int32), 130, 2, 150), live


def two_groups() -> tuple[Context, np.ndarray]:
    """Prefixes of 60 and 50 tokens, and completions of 40, 110 and 90 tokens in other orders; the rest is padding."""
    prefix, segments = np.zeros((2, 130), np.int32), np.zeros((2, 300), np.int32)
    positions, starts = np.zeros((2, 300), np.int32), np.full((2, 300), 240, np.int32)
    prefix[:, :60], prefix[:, 60:110] = 1, 2
    for row, pieces in enumerate([((1, 40), (1, 110), (2, 90)), ((2, 110), (1, 90), (2, 40))]):
        at = 0
        for group, length in pieces:
            part = slice(at, at + length)
            segments[row, part], starts[row, part] = group, at
            positions[row, part] = (60 if group == 1 else 50) + np.arange(length)
            at += length
    places = np.broadcast_to(np.r_[:60, :50, :20], prefix.shape)
    context = PackedGroupContext(*map(jnp.asarray, (prefix, segments, places, positions, starts)))
    return context, np.concatenate([prefix, segments], axis=1) > 0


def mixed(kernel: Kernel, x: dict[str, np.ndarray], rules: ScoreRules, case: Any = one_group) -> Any:
    """Mixed values of live tokens, and their gradients."""
    context, live = case()

    def loss(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        out, _ = context.attend(q, k, v, None, AttentionParams(rules, kernel, AllGather.Config().build()))
        out = jnp.where(live[..., None, None, None], out, 0)
        return jnp.sum(out * x["w"]), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(x["q"], x["k"], x["v"])


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize(
    ("case", "fused", "cap"),
    [
        (two_groups, True, 2.0),
        pytest.param(one_group, False, None, marks=pytest.mark.full),
        pytest.param(one_group, True, 2.0, marks=pytest.mark.full),
        pytest.param(two_groups, False, None, marks=pytest.mark.full),
    ],
)
def test_the_kernel_is_what_xla_makes_of_a_group(arrays, fused, cap, case):
    blocks = Splash.Config(block_q=256, block_kv=128, block_kv_compute=128, fused_backward=fused, interpret=True)
    rules = ScoreRules(soft_cap=cap)
    (_, expected), slopes = mixed(Xla.Config().build(), arrays, rules, case)
    (_, out), grads = mixed(blocks.build(), arrays, rules, case)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    for grad, slope in zip(grads, slopes, strict=True):
        np.testing.assert_allclose(grad, slope, atol=2e-4)


class CudnnByXla(Cudnn):
    """`Cudnn` by the other implementation of `jax.nn.dot_product_attention`, which runs on CPUs."""

    class Config(Cudnn.Config):
        pass

    implementation = "xla"

    @override
    def supported(self, signature: AttentionSignature) -> str | None:
        gpu = dataclasses.replace(signature, platform="gpu", dtype=np.dtype(jnp.bfloat16))
        return super().supported(gpu)


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("case", [one_group, pytest.param(two_groups, marks=pytest.mark.full)])
def test_what_cudnn_is_asked_is_what_xla_makes_of_a_group(arrays, case):
    x = {name: array[..., :32] for name, array in arrays.items()}  # it has values as wide as keys
    (_, expected), slopes = mixed(Xla.Config().build(), x, ScoreRules(), case)
    (_, out), grads = mixed(CudnnByXla.Config().build(), x, ScoreRules(), case)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    for grad, slope in zip(grads, slopes, strict=True):
        np.testing.assert_allclose(grad, slope, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [SharedPrefix(130, 2, 150), SharedPrefixes(130, 300)])
def test_on_gpus_a_group_is_cudnn_forward_and_backward_and_stores_no_scores(monkeypatch, rows):
    """Lowered for CUDA, not run: the calls are in the program, and no array of scores of all heads."""
    cudnn = import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91000))
    signature = AttentionSignature(
        "gpu", np.dtype(jnp.bfloat16), rows.length, 2, 2, 64, 64, ScoreRules(), shared_prefix=rows
    )
    kernel = choose(FirstSupported.Config().build(), signature).kernel
    assert isinstance(kernel, Cudnn)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, codes: jax.Array) -> jax.Array:
        return jnp.sum(kernel.attend(AttentionArrays(q, k, v, ids, codes), signature).astype(jnp.float32))

    q, k = (jax.ShapeDtypeStruct((2, rows.length, 2, *shape), jnp.bfloat16) for shape in ((2, 64), (64,)))
    ids = jax.ShapeDtypeStruct((2, rows.length), jnp.int32)
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k, ids, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = 2 if isinstance(rows, SharedPrefix) else 1  # the prompt, and its completions
    assert text.count("@__cudnn$fmhaScaleBiasSoftmax(") == text.count("@__cudnn$fmhaScaleBiasSoftmaxBackward(") == calls
    scores = ("130x130", "150x280") if calls == 2 else ("430x430",)
    assert all(f"tensor<{4 if size == '150x280' else 2}x1x{size}xbf16>" in text for size in scores)  # the masks
    assert not any(f"x4x{size}x" in text for size in scores)


def test_what_the_kernel_cannot_do_falls_to_the_next():
    def signature(rows: SharedPrefix | SharedPrefixes, rules: ScoreRules = ScoreRules()) -> AttentionSignature:  # noqa: B008
        return AttentionSignature("tpu", np.dtype(jnp.bfloat16), rows.length, 8, 4, 128, 128, rules, shared_prefix=rows)

    first = FirstSupported.Config().build()
    assert isinstance(choose(first, signature(SharedPrefix(4096, 4, 16384))).kernel, Splash)
    assert isinstance(choose(first, signature(SharedPrefix(33, 16, 14))).kernel, Xla)
    assert isinstance(choose(first, signature(SharedPrefix(4096, 4, 4096), ScoreRules(window=512))).kernel, Xla)
    assert isinstance(choose(first, signature(SharedPrefixes(4096, 16384))).kernel, Splash)
    assert isinstance(choose(first, signature(SharedPrefixes(1 << 19, 1 << 19))).kernel, Xla)  # no codes for so many
    on_gpus = [
        dataclasses.replace(one, platform="gpu")
        for one in (
            signature(SharedPrefix(4096, 4, 16384)),
            signature(SharedPrefix(33, 16, 15)),
            signature(SharedPrefixes(4096, 4096), ScoreRules(window=512)),
        )
    ]
    assert [type(choose(first, one).kernel) for one in on_gpus] == [Cudnn, Cudnn, Xla]
    with pytest.raises(UserError, match="answers of 14 tokens do not fill a block"):
        choose(Splash.Config().build(), signature(SharedPrefix(33, 16, 14)))
