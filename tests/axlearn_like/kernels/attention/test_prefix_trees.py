"""Rows of trees: each token's attention and its gradients are those of its path from the root, computed by itself."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_like.kernels.attention.context_parallel.all_gather import AllGather
from axlearn_like.kernels.attention.cudnn import Cudnn
from axlearn_like.kernels.attention.dispatch import AttentionParams, FirstSupported, choose
from axlearn_like.kernels.attention.interface import AttentionSignature, Kernel, ScoreRules
from axlearn_like.kernels.attention.shared_prefix import SharedPrefixTrees
from axlearn_like.kernels.attention.splash import LONGEST_TREES, Splash
from axlearn_like.kernels.attention.splash_tables import tables_of_array
from axlearn_like.kernels.attention.xla import Xla
from axlearn_like.layers.contexts.packed import PackedGroupContext
from mesh import UserError
from tests.axlearn_like.kernels.attention.test_shared_prefix import CudnnByXla
from tests.elsewhere import elsewhere
from tests.tpu_compiler import TPU_COMPILER, needs_tpu_compiler

PROMPTS, TREES = 130, 300  # tokens of a row
Segments = list[tuple[int, int, int]]  # (group, parent's index or -1, tokens), a parent before its children


def pre_order(segments: Segments) -> list[int]:
    """Return the indices of segments in the order in which they lie in a row."""

    def below(parent: int) -> list[int]:
        return [found for i, (_, above, _) in enumerate(segments) if above == parent for found in (i, *below(i))]

    return below(-1)


def row_of(prompts: list[int], segments: Segments, sizes: tuple[int, int]) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Return the fields of `PackedGroupContext` of one row, and each token's path: the indices of what it sees."""
    size, length = sizes
    row = {name: np.zeros(size, np.int32) for name in ("prefix_segments", "prefix_positions")}
    row |= {name: np.zeros(length, np.int32) for name in ("segments", "completion_positions")}
    row["ends"] = np.full(length, length, np.int32)
    paths: list[Any] = [None] * (size + length)
    at = np.concatenate([[0], np.cumsum(prompts)])
    for g, tokens in enumerate(prompts):
        row["prefix_segments"][at[g] : at[g + 1]] = g + 1
        row["prefix_positions"][at[g] : at[g + 1]] = np.arange(tokens)
        for i in range(tokens):
            paths[at[g] + i] = list(range(at[g], at[g] + i + 1))
    spans: dict[int, list[int]] = {}
    here = 0
    for index in pre_order(segments):
        group, parent, tokens = segments[index]
        above = spans[parent] if parent >= 0 else list(range(at[group], at[group + 1]))
        spans[index] = above + list(range(size + here, size + here + tokens))
        part = slice(here, here + tokens)
        row["segments"][part], row["ends"][part] = group + 1, here + tokens
        row["completion_positions"][part] = len(above) + np.arange(tokens)
        for i in range(tokens):
            paths[size + here + i] = spans[index][: len(above) + i + 1]
        here += tokens
        while parent >= 0:  # what is above ends where this does, or later
            own = [i - size for i in spans[parent] if i >= size][-segments[parent][2] :]
            row["ends"][own], parent = here, segments[parent][1]
    return row, paths


def context_of(rows: list[dict[str, np.ndarray]]) -> PackedGroupContext:
    names = ("prefix_segments", "segments", "prefix_positions", "completion_positions")
    stacked = [jnp.asarray(np.stack([row[name] for row in rows])) for name in names]
    return PackedGroupContext(*stacked, starts=None, ends=jnp.asarray(np.stack([row["ends"] for row in rows])))


@functools.partial(jax.jit, static_argnums=4)
def by_paths(q: Any, k: Any, v: Any, seen: Any, rules: ScoreRules) -> Any:
    """Return one row's attention in float64, each query with the keys that it sees (bool [t, s]), if any."""
    scores = jnp.einsum("tkqh,skh->kqts", q, k) / np.sqrt(q.shape[-1])
    scores = scores if rules.soft_cap is None else rules.soft_cap * jnp.tanh(scores / rules.soft_cap)
    weights = jnp.where(seen, jnp.exp(scores), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return jnp.einsum("kqts,skh->tkqh", weights, v)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], Segments]:
    """Up to three prompts, some empty, and up to eight segments of theirs, each below any one before it or a root."""
    prompts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    segments: Segments = []
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(-1, index - 1))
        group = segments[parent][0] if parent >= 0 else draw(st.integers(0, len(prompts) - 1))
        segments.append((group, parent, draw(st.integers(1, 3))))
    return prompts, segments


SIZES = 13, 26
ATTENTION = {
    rules: AttentionParams(rules, Xla.Config().build(), AllGather.Config().build())
    for rules in (ScoreRules(), ScoreRules(window=3, soft_cap=1.0))
}


@functools.partial(jax.jit, static_argnums=5)
def by_context(context: PackedGroupContext, q: Any, k: Any, v: Any, w: Any, rules: ScoreRules) -> Any:
    def loss(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        out, _ = context.attend(q, k, v, None, ATTENTION[rules])
        return jnp.sum(out * w), out

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)


@pytest.mark.slow
@pytest.mark.numerics
@given(trees(), st.sampled_from(list(ATTENTION)))
@settings(max_examples=25, deadline=None)
def test_values_and_gradients_are_those_of_each_path_in_float64(tree: tuple[list[int], Segments], rules: ScoreRules):
    row, paths = row_of(*tree, SIZES)
    context, seen = context_of([row]), np.zeros((sum(SIZES),) * 2, bool)
    for i, path in enumerate(paths):
        if path is not None:
            seen[i, path if rules.window is None else path[-rules.window :]] = True
            assert context.positions[0, i] == len(path) - 1
    rng = np.random.default_rng(0)
    q, k, v, w = (rng.normal(size=(1, sum(SIZES), 2, *more)) for more in ((2, 4), (4,), (3,), (2, 3)))
    w *= seen.any(1)[:, None, None, None]  # of what is no padding
    (_, found), slopes = by_context(context, *(x.astype(np.float32) for x in (q, k, v, w)), rules)
    with jax.enable_x64(True):
        expected, vjp = jax.vjp(lambda q, k, v: by_paths(q, k, v, seen, rules), q[0], k[0], v[0])
        assert expected.dtype == np.float64
        gradients = vjp(jnp.asarray(w[0]))
    np.testing.assert_allclose(np.asarray(found[0])[seen.any(1)], np.asarray(expected)[seen.any(1)], atol=2e-6)
    for slope, gradient in zip(slopes, gradients, strict=True):
        np.testing.assert_allclose(slope[0], gradient, atol=1e-5)


@pytest.mark.slow
def test_a_tree_of_one_segment_each_has_the_bits_of_completions():
    """Masks by `starts` and by `ends` are equal, and so are values and gradients."""
    segments: Segments = [(0, -1, 4), (0, -1, 7), (1, -1, 1), (1, -1, 6)]
    row, _ = row_of([5, 3], segments, SIZES)
    starts = np.full(SIZES[1], 18, np.int32)
    starts[:18] = np.repeat([0, 4, 11, 12], [4, 7, 1, 6])
    tree = context_of([row])
    rng = np.random.default_rng(1)
    x = [rng.normal(size=(1, sum(SIZES), 2, *more)).astype(np.float32) for more in ((2, 4), (4,), (3,), (2, 3))]
    flat = dataclasses.replace(tree, starts=jnp.asarray(starts)[None], ends=None)
    of_trees, of_completions = (by_context(context, *x, ScoreRules()) for context in (tree, flat))
    jax.tree.map(np.testing.assert_array_equal, of_trees, of_completions)


PROMPTS_OF_ROW = [60, 50]
FORKED: Segments = [(0, -1, 40), (0, 0, 30), (0, 1, 20), (0, 1, 5), (0, 0, 50), (1, -1, 90), (1, 5, 1), (1, 5, 9)]
LONG_TRUNK: Segments = [(1, -1, 200), (1, 0, 33), (1, 0, 31), (0, -1, 7)]


def two_rows() -> tuple[PackedGroupContext, np.ndarray]:
    """Trees of three levels below two prompts, and a trunk beyond a block; the rest is padding."""
    made = [row_of(PROMPTS_OF_ROW, segments, (PROMPTS, TREES)) for segments in (FORKED, LONG_TRUNK)]
    return context_of([row for row, _ in made]), np.asarray([[path is not None for path in paths] for _, paths in made])


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng, length = np.random.default_rng(0), PROMPTS + TREES
    shapes = {"q": (2, length, 2, 2, 64), "k": (2, length, 2, 64), "v": (2, length, 2, 64), "w": (2, length, 2, 2, 64)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def mixed(kernel: Kernel, x: dict[str, np.ndarray], rules: ScoreRules) -> Any:
    """Mixed values of live tokens, and their gradients."""
    context, live = two_rows()

    def loss(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        out, _ = context.attend(q, k, v, None, AttentionParams(rules, kernel, AllGather.Config().build()))
        out = jnp.where(live[..., None, None, None], out, 0)
        return jnp.sum(out * x["w"]), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(x["q"], x["k"], x["v"])


@pytest.mark.numerics
@pytest.mark.full
@pytest.mark.parametrize(
    "kernel",
    [
        Splash.Config(block_q=256, block_kv=128, block_kv_compute=128, fused_backward=False, interpret=True),
        Splash.Config(block_q=256, block_kv=128, block_kv_compute=128, fused_backward=True, interpret=True),
        CudnnByXla.Config(),
    ],
)
def test_kernels_make_of_trees_what_xla_does(arrays, kernel):
    rules = ScoreRules()
    (_, expected), slopes = mixed(Xla.Config().build(), arrays, rules)
    (_, out), grads = mixed(kernel.build(), arrays, rules)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    for grad, slope in zip(grads, slopes, strict=True):
        np.testing.assert_allclose(grad, slope, atol=2e-4)


def signature(rows: SharedPrefixTrees, platform: str = "tpu", window: int | None = None) -> AttentionSignature:
    dtype, rules = np.dtype(jnp.bfloat16), ScoreRules(window=window)
    return AttentionSignature(platform, dtype, rows.length, 8, 4, 128, 128, rules, shared_prefix=rows)


@pytest.mark.slow
def test_the_kernel_of_trees_and_why_others_are_refused():
    first, rows = FirstSupported.Config().build(), SharedPrefixTrees(1024, 7168)
    assert isinstance(choose(first, signature(rows)).kernel, Splash)
    assert isinstance(choose(first, signature(rows, "gpu")).kernel, Cudnn)
    assert isinstance(choose(first, signature(rows, "cpu")).kernel, Xla)
    assert isinstance(choose(first, signature(rows, window=512)).kernel, Xla)
    with pytest.raises(UserError, match=f"stores the masks of trees, in rows of {LONGEST_TREES} tokens at most"):
        choose(Splash.Config().build(), signature(SharedPrefixTrees(1024, LONGEST_TREES)))
    with pytest.raises(UserError, match="has no window in rows of a prompt"):
        choose(Splash.Config().build(), signature(rows, window=512))
    context, live = two_rows()
    x = jnp.zeros((*live.shape, 1, 4))
    params = AttentionParams(ScoreRules(causal=False), Xla.Config().build(), AllGather.Config().build())
    with pytest.raises(UserError, match="expected causal attention in trees"):
        context.attend(x[..., None, :], x, x, None, params)


@pytest.mark.slow
def test_blocks_of_other_branches_are_not_computed():
    """The kernel's tables, which the program makes of the codes: a block of queries is led to its own path alone."""
    lengths, rows = [128, 128, 128, 128, 256], SharedPrefixTrees(128, 768)
    segments: Segments = [(0, -1, lengths[0]), (0, 0, lengths[1]), (0, 1, lengths[2]), (0, 0, lengths[3]), (0, -1, 256)]
    row, paths = row_of([128], segments, (128, 768))
    kernel = Splash.Config(block_q=128, block_kv=128, block_kv_compute=128, fused_backward=False).build()
    visible = rows.visible(rows.codes(jnp.asarray(row["ends"])), jnp.arange(rows.length))
    tables = tables_of_array(visible, kernel.sizes((rows.length, rows.length)))
    assert sorted(len(path) // 128 for path in paths[127::128]) == [1, 2, 2, 3, 3, 3, 4]
    for table in tables.arrays:  # the last completion is of two blocks: the prompt, and one or both
        assert np.count_nonzero(table.block_mask) == 1 + 2 + 3 + 4 + 3 + 2 + 3
        assert np.count_nonzero(np.asarray(table.block_mask) == 1) == 7, "those of the diagonal are masked"


def compile_trees() -> dict[str, dict[str, int]]:
    """Gradient of the attention of a row of 512 + 3,584 tokens, 8 x 4 heads of 128, bfloat16, on a v5e."""
    from jax.experimental import topologies
    from jax.sharding import NamedSharding

    from mesh import make_mesh

    devices = list(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices)[:1]
    mesh, found = make_mesh({}, devices), dict[str, dict[str, int]]()
    for name, kernel in (("chosen", FirstSupported.Config()), ("xla", Xla.Config())):
        attention = AttentionParams(ScoreRules(), kernel.build(), AllGather.Config().build())
        with jax.set_mesh(mesh):

            def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P()))

            def loss(q: Any, k: Any, v: Any, prompt: Any, trees: Any, attention: Any = attention) -> jax.Array:
                context = PackedGroupContext(prompt, trees, prompt, trees, None, trees)
                return jnp.sum(context.attend(q, k, v, None, attention)[0].astype(jnp.float32) ** 2)

            keys = array(jnp.bfloat16, 1, 4096, 8, 128)
            arrays = array(jnp.bfloat16, 1, 4096, 8, 4, 128), keys, keys, array(jnp.int32, 1, 512)
            program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays, array(jnp.int32, 1, 3584)).compile()
        memory, text = program.memory_analysis(), program.as_text()
        assert memory is not None and text is not None
        found[name] = {"temporary": memory.temp_size_in_bytes, "kernels": text.count("tpu_custom_call")}
    return found


@pytest.mark.full
@needs_tpu_compiler
def test_compiled_for_a_tpu_trees_store_masks_and_no_scores():
    found = elsewhere(compile_trees, environ=TPU_COMPILER, timeout=600)
    scores = 4096 * 3584 * 32 * 4
    assert found["xla"]["kernels"] == 0 and found["xla"]["temporary"] > scores
    assert found["chosen"]["kernels"] == 2 and found["chosen"]["temporary"] < scores / 5
