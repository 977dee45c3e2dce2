"""Prefill, decoding and scoring give the same logits, to the bit (float32, CPU), in chunks and batches of any size.

XLA's CPU backend promises nothing of the kind: it sums in other orders for other shapes. The layers avoid that by the
means described in linear.py, reduction.py and paged_context.py; here it is tested that they do, on policies of
different shapes, since a new version of XLA may need new means.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_like.layers.attention.grouped_query import Attention
from axlearn_like.layers.base import Params, bind, split
from axlearn_like.layers.contexts.cells import cells_needed, make_window
from axlearn_like.layers.contexts.packed import PackedContext
from axlearn_like.layers.contexts.paged import PagedContext, RowContext, make_pool
from axlearn_like.layers.contexts.window import Cache, WindowContext
from axlearn_like.layers.decoder import Block, Decoder
from axlearn_like.layers.feed_forward import SwiGLU
from axlearn_like.layers.norm import RMSNorm

LENGTH, ROWS, PAGE, WIDTH = 100, 4, 16, 12
PAGES = 1 + ROWS * WIDTH
# (dim, query heads, key/value heads, head width, feed-forward width, vocabulary)
SHAPES = {
    "narrow heads, even vocabulary": (96, 3, 1, 32, 256, 264),
    "two key/value heads": (192, 6, 2, 32, 512, 128),
    "as many key/value heads, odd vocabulary": (64, 4, 4, 64, 160, 301),
    "very narrow": (16, 4, 2, 4, 24, 262),
    "wide heads": (256, 2, 1, 128, 1024, 512),
}


class Policy:
    """A random decoder, and its logits by each context."""

    def __init__(self, shape: tuple[int, int, int, int, int, int], layers: int = 2):
        self.layers = layers
        dim, heads, self.kv_heads, self.width, hidden, vocab = shape
        attention = Attention.Config(
            num_heads=heads, num_kv_heads=self.kv_heads, head_dim=self.width, qk_norm=RMSNorm.Config()
        )
        block = Block.Config(attention=attention, feed_forward=SwiGLU.Config(hidden=hidden))
        cfg = Decoder.Config(vocab_size=vocab, dim=dim, num_layers=layers, block=block)
        self.vocab = vocab
        self.graphdef, self.params = split(cfg.build(rngs=nnx.Rngs(0)))
        self.tokens = np.random.default_rng(0).integers(0, vocab, (ROWS, LENGTH)).astype(np.int32)
        self._score, self._step = jax.jit(self.score), jax.jit(self.step)
        self._chunk = jax.jit(self.chunk, static_argnums=0)

    def score(self, params: Params, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        model = bind(self.graphdef, params)
        return model.logits(model.hidden(tokens, RowContext(positions)).x)

    def chunk(self, chunk: int, params: Params, pool: Any, table: Any, starts: Any, counts: Any, tokens: Any) -> Any:
        model = bind(self.graphdef, params)
        hidden, pool, _ = model.hidden(tokens, PagedContext(table, starts, counts, chunk=chunk, pages=PAGES), pool)
        return model.logits(hidden), pool

    def step(self, params: Params, caches: Any, lengths: jax.Array, feed: jax.Array) -> Any:
        model = bind(self.graphdef, params)
        context = WindowContext(lengths, cells_needed(caches[0].windows, lengths + 1), jnp.int32(0))
        hidden, caches, _ = model.hidden(feed[:, None], context, caches)
        return model.logits(hidden)[:, 0], caches

    def scored(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(self._score(self.params, tokens))

    def prefilled(self, chunk: int, rows: int, width: int | Callable[[int], int]) -> np.ndarray:
        """`rows` at a time, `chunk` tokens each, in scrambled pages; `width`: pages of a window, by its tokens."""
        table = np.random.default_rng(1).permutation(np.arange(1, PAGES)).reshape(ROWS, WIDTH).astype(np.int32)
        pool = make_pool(
            layers=self.layers,
            pages=PAGES,
            page_size=PAGE,
            kv_heads=self.kv_heads,
            head_dim=self.width,
            dtype=jnp.float32,
        )
        found = []
        for start in range(0, LENGTH, chunk):
            count, parts = min(chunk, LENGTH - start), []
            for first in range(0, ROWS, rows):
                some = slice(first, min(first + rows, ROWS))
                size = some.stop - some.start
                given = np.zeros((rows, chunk), np.int32)
                given[:size, :count] = self.tokens[some, start : start + count]
                columns = width if isinstance(width, int) else width(start + count)
                pages = np.zeros((rows, columns), np.int32)
                pages[:size] = table[some, :columns]
                counts = np.where(np.arange(rows) < size, count, 0).astype(np.int32)
                starts = np.where(np.arange(rows) < size, start, 0).astype(np.int32)
                logits, pool = self._chunk(chunk, self.params, pool, pages, starts, counts, given)
                parts.append(np.asarray(logits)[:size, :count])
            found.append(np.concatenate(parts))
        return np.concatenate(found, axis=1)

    def decoded(self, rows: int, keys: int, late: int = 0) -> np.ndarray:
        """Token by token, in windows of `keys`; each row begins `late` steps after the one before."""
        window = partial(make_window, kv_heads=self.kv_heads, head_dim=self.width, dtype=jnp.float32)
        groups = [rows] if rows < 8 else [4, rows - 4]
        fresh = jnp.zeros((1, rows, self.kv_heads, self.width))
        caches = tuple(Cache(tuple(window(size, keys) for size in groups), fresh, fresh) for _ in range(2))
        found = np.zeros((ROWS, LENGTH, self.vocab), np.float32)
        for step in range(LENGTH + late * (ROWS - 1)):
            at = np.clip(step - late * np.arange(rows), 0, LENGTH - 1).astype(np.int32)
            at[ROWS:] = at[0]
            feed = np.zeros(rows, np.int32)
            feed[:ROWS] = self.tokens[np.arange(ROWS), at[:ROWS]]
            logits, caches = self._step(self.params, caches, at, feed)
            found[np.arange(ROWS), at[:ROWS]] = np.asarray(logits)[:ROWS]
        return found


# Each shape takes 25 seconds to compile for: one is tried in every run.
EVERY_RUN = "two key/value heads"


@pytest.fixture(
    scope="module",
    params=[pytest.param(shape, marks=[pytest.mark.full] * (shape != EVERY_RUN), id=shape) for shape in SHAPES],
)
def policy(request: pytest.FixtureRequest) -> Policy:
    return Policy(SHAPES[request.param])


@pytest.fixture(scope="module")
def expected(policy: Policy) -> np.ndarray:
    return policy.scored(policy.tokens)


@pytest.mark.slow
@pytest.mark.numerics
def test_scoring_is_a_plain_forward_pass(policy: Policy, expected: np.ndarray):
    """Scoring against another context, with another order of sums: equal up to rounding."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH), policy.tokens.shape)
    context = PackedContext(positions=positions, segment_ids=jnp.ones_like(positions))
    plain = jax.jit(lambda params: bind(policy.graphdef, params)(policy.tokens, context))(policy.params)
    np.testing.assert_allclose(expected, plain, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "length"), [(1, 100), (7, 163), pytest.param(48, 128, marks=pytest.mark.full)])
def test_scoring_is_the_same_in_any_batch_and_behind_any_padding(
    policy: Policy, expected: np.ndarray, rows: int, length: int
):
    tokens = np.zeros((rows, length), np.int32)
    shared = min(rows, ROWS)
    tokens[:shared, :LENGTH] = policy.tokens[:shared]
    assert policy.scored(tokens)[:shared, :LENGTH].tobytes() == expected[:shared].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "rows", "width"),
    [
        (64, 4, 8),
        (100, 1, 12),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((16, 4, 8), (32, 2, 12), (32, 16, 12))),
    ],
)
def test_prefill_is_the_same_in_chunks_of_any_size(
    policy: Policy, expected: np.ndarray, chunk: int, rows: int, width: int
):
    assert policy.prefilled(chunk, rows, width).tobytes() == expected.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "keys", "late"),
    [
        (64, 128, 0),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((24, 256, 23), (4, 128, 0), (5, 384, 0))),
    ],
)
def test_decoding_is_the_same_with_any_number_of_rows_and_any_window(
    policy: Policy, expected: np.ndarray, rows: int, keys: int, late: int
):
    assert policy.decoded(rows, keys, late).tobytes() == expected.tobytes()


@pytest.mark.slow
def test_padding_writes_to_the_null_page_alone(policy: Policy):
    make = partial(make_pool, layers=2, pages=PAGES, page_size=PAGE, kv_heads=policy.kv_heads, head_dim=policy.width)
    table, tokens = np.array([[1, 2], [3, 4]], np.int32), np.zeros((2, 32), np.int32)
    counts = np.array([5, 0], np.int32)
    _, pool = policy._chunk(32, policy.params, make(dtype=jnp.float32), table, np.zeros(2, np.int32), counts, tokens)
    written = np.flatnonzero(np.asarray(pool["k"]).reshape(2 * PAGES, -1).any(axis=1))
    assert set(written % PAGES) <= {0, 1}
    assert not np.asarray(pool["k"])[[1, PAGES + 1], :, :, 5:].any()
