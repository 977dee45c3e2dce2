"""A self-test of the kernel of paged attention on the devices of an engine: small mixed batches, beside plain XLA.

A kernel is compiled by a compiler that differs between versions and chips, and one that is wrong raises nothing: tokens
are drawn from another distribution. So an engine runs a decoding batch and a batch of chunks (and one with shared keys,
if it shares some) through its kernel when it starts: rows of uneven lengths around the borders of pages and blocks, one
of them idle. It does not start if what they give is not what XLA gives from the same keys, or is not in its page.

Values are bfloat16 numbers, whatever the type of the pool, so that products are exact on every device; scores are
spread so that few keys have the weight of a row, and a wrong one is seen.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from axlearn_like.kernels.attention.interface import MASKED, ScoreRules
from axlearn_like.kernels.int8_heads import LARGEST
from axlearn_like.kernels.paged_attention.kernel import PagedKernel
from axlearn_like.kernels.paged_attention.rows import PagedRows, SharedTiles, padded
from mesh.errors import UserError
from mesh.rules import constrain, use_rules

BOUND = 0.01  # share of the largest value; rounding weights and results to bfloat16 gives up to 0.004
_SPREAD = 4.0  # spread of scores


class KernelDisagrees(UserError):
    """A kernel computes something else than XLA on these devices, or does not compile for them."""


@dataclasses.dataclass(frozen=True)
class KernelShapes:
    """Shapes with which an engine calls its kernel."""

    heads: tuple[int, int, int]  # key/value heads, query heads of each, and their width
    page_size: int  # tokens of a page
    dtype: DTypeLike  # dtype of the pool
    longest: int  # tokens that a row can have, whole pages
    chunk: int  # tokens of a row of a prefill at most
    tile: int | None = None  # rows that share keys; None: none do
    int8: bool = False  # pages hold int8 numbers and their scales (int8.py)

    def __str__(self) -> str:
        kv_heads, per_kv, width = self.heads
        kind = jnp.dtype(self.dtype).name + (", pages of int8" if self.int8 else "")
        return f"{kv_heads} key/value heads x {per_kv} queries of width {width}, pages of {self.page_size}, {kind}"


@dataclasses.dataclass(frozen=True)
class SelfTestBatch:
    """Rows of a self-test: the keys and values of whole sequences, and which of their tokens are new."""

    name: str  # name for people
    # `starts`, `counts`: int32 [r], tokens in the pages, and new ones
    starts: np.ndarray
    counts: np.ndarray
    chunk: int  # tokens of a row, live or not
    tiles: SharedTiles | None = None  # keys in common, arrays of numpy; None: rows share none


# The worst difference from XLA relative to the largest value, and how many numbers of pages are wrong.
Measure = Callable[[PagedKernel, KernelShapes, SelfTestBatch, ScoreRules], tuple[float, int]]


def run_self_test(
    kernel: PagedKernel, shapes: KernelShapes, rules: Sequence[ScoreRules], measure: Measure | None = None
) -> dict[str, Any]:
    """Compare a kernel with XLA under the mesh in force, for each of the rules; returns fields of an event.

    Args:
        measure: what compares one batch; None: `compare`.

    Raises:
        KernelDisagrees: names the batch, the shapes and the worst difference; or the kernel does not compile.
    """
    began, worst = time.monotonic(), 0.0
    for each in dict.fromkeys(rules):
        for batch in make_batches(kernel, shapes):
            try:
                found, pages = (measure or compare)(kernel, shapes, batch, each)
            except UserError:
                raise
            # A refusal has no class of its own: Pallas raises ValueError for shapes and NotImplementedError for what it
            # cannot lower, Mosaic an error without a public name, XLA (memory, and all that ends a run) a
            # JaxRuntimeError. All have Exception alone in common, and an engine must not start on any of them.
            except Exception as error:
                line = (str(error).splitlines() or [""])[0]
                raise KernelDisagrees(
                    f"{_where(kernel, shapes, batch)}: it does not run: {type(error).__name__}: {line}{_HINT}"
                ) from error
            if not found <= BOUND:
                raise KernelDisagrees(
                    f"{_where(kernel, shapes, batch)}, {each}: it differs from XLA by {found:.3g} of the largest "
                    f"value; expected at most {BOUND}{_HINT}"
                )
            if pages:
                raise KernelDisagrees(
                    f"{_where(kernel, shapes, batch)}: {pages} numbers of the pages are not what was written, or have "
                    f"changed{_HINT}"
                )
            worst = max(worst, found)
    return {"worst": worst, "bound": BOUND, "seconds": round(time.monotonic() - began, 3)}


_HINT = (
    "; an engine does not start on it. Other block sizes (kernel.row_keys, ...) may work; kernel.self_test=False "
    "starts without this test"
)


def _where(kernel: PagedKernel, shapes: KernelShapes, batch: SelfTestBatch) -> str:
    return f"self-test of paged attention ({shapes}; {kernel.sizes}), {batch.name} of {len(batch.starts)} rows"


def make_batches(kernel: PagedKernel, shapes: KernelShapes) -> list[SelfTestBatch]:
    """Return the batches: lengths around the borders of pages and of the kernel's blocks, as far as rows go."""
    page, longest, sizes = shapes.page_size, shapes.longest, kernel.sizes

    def rows(name: str, chunk: int, *pairs: tuple[int, int], **more: Any) -> SelfTestBatch:
        starts = [min(max(0, start), longest - max(1, count)) for start, count in pairs]
        return SelfTestBatch(
            name, np.array(starts, np.int32), np.array([count for _, count in pairs], np.int32), chunk, **more
        )

    block, chunk = sizes.row_keys, min(shapes.chunk, longest, 2 * page + 3)
    lengths = (0, page - 1, page, block - 1, block, 2 * block + 1)
    found = [rows("decoding", 1, *((start, 1) for start in lengths), (page, 0))]
    block = sizes.chunk_keys
    pairs = [(2 * block + 1, 1), (0, chunk), (page, 0), (page - 1, max(1, chunk - 1)), (block - 2, chunk)]
    found.append(rows("chunks beside decoding", chunk, *pairs))
    if shapes.tile is not None:
        tile, common = min(shapes.tile, 3), min(sizes.shared_keys + page, longest - 2 * page) // page * page
        pairs = [(common + extra, count) for extra, count in ((0, 1), (1, 0), (page + 1, 1))][:tile] + [(3, 1)]
        tiles = SharedTiles(np.array([common, 0], np.int32), np.array([0, tile], np.int32), tile)
        found.append(rows("decoding with shared keys", 1, *pairs, tiles=tiles))
    return found


def compare(kernel: PagedKernel, shapes: KernelShapes, batch: SelfTestBatch, rules: ScoreRules) -> tuple[float, int]:
    """Return the worst difference from XLA relative to the largest value, and how many numbers of pages are wrong."""
    rows, k, v, before, after = _make_arrays(shapes, batch, rules)

    def measure(rows: PagedRows, k: Any, v: Any, before: Any, after: Any, tiles: SharedTiles | None) -> Any:
        if tiles is None:
            mixed, pool = kernel.attend(rows, before, rules=rules, sinks=False)
        else:
            mixed, pool = kernel.attend_shared(rows, before, tiles, rules=rules)
        mixed = constrain(mixed.astype(jnp.float32), *(None,) * 5)
        right = plain_attention(rows, k, v, rules)
        wrong = jax.tree.leaves(jax.tree.map(_wrong, pool, after))
        return jnp.max(jnp.abs(mixed - right)) / jnp.max(jnp.abs(right)), sum(wrong)

    with use_rules({"batch": ()}):  # every device has all rows
        difference, wrong = jax.jit(measure)(rows, k, v, before, after, batch.tiles)
    return float(difference), int(wrong)


def _wrong(found: jax.Array, right: jax.Array) -> jax.Array:
    """Return how many numbers of pages are wrong; scales, which are computed, may be off by their last bit."""
    found = constrain(found, *(None,) * found.ndim)
    return jnp.sum(found != right if found.ndim == 4 else ~(jnp.abs(found - right) <= 1e-6 * jnp.abs(right)))


def _make_arrays(shapes: KernelShapes, batch: SelfTestBatch, rules: ScoreRules) -> tuple[Any, ...]:
    """Return rows, the keys and values [r, s, k, h] of whole sequences, and pools.

    The pools are before and after the new tokens; pages that are of no row hold numbers of others.
    """
    rng, (kv_heads, per_kv, width), count = np.random.default_rng(0), shapes.heads, len(batch.starts)
    page, ends = shapes.page_size, batch.starts + batch.counts
    pages = -(-int(ends.max()) // page)
    values = _int8_values if shapes.int8 else random_values
    k, v = (values(rng, (count, pages * page, kv_heads, width), shapes.dtype) for _ in range(2))
    table = 1 + rng.permutation(count * pages).reshape(count, pages).astype(np.int32)
    if (tiles := batch.tiles) is not None:
        for tile, (keys, source) in enumerate(zip(tiles.shared_t, tiles.sources_t, strict=True)):
            some = slice(tile * tiles.rows, (tile + 1) * tiles.rows)
            for x, common in ((k, keys), (v, keys), (table, keys // page)):
                x[some, :common] = x[source, :common]
    table[np.arange(pages) * page >= ends[:, None]] = 0  # unused page, read and ignored
    spread = _SPREAD / (rules.scale_of(width) * width**0.5)
    q = random_values(rng, (count, batch.chunk, kv_heads, per_kv, width), shapes.dtype, spread)
    shape = (1 + count * pages, page, 2 * kv_heads, padded(width))
    before: Any = random_values(rng, shape, shapes.dtype)
    if shapes.int8:
        scales = rng.random((shape[0], kv_heads, 2 * page), np.float32)
        before = {"numbers": rng.integers(-127, 128, shape, np.int8), "scales": scales}
    after = jax.tree.map(np.copy, before)
    for row, (start, end) in enumerate(zip(batch.starts, ends, strict=True)):
        for pool, length in ((before, start), (after, end)):
            _write(pool, k[row, :length], v[row, :length], table[row])
    places = np.minimum(batch.starts[:, None] + np.arange(batch.chunk), k.shape[1] - 1)[..., None, None]
    arrays: Any = q, *(np.take_along_axis(x, places, axis=1) for x in (k, v)), table, batch.starts, batch.counts
    return PagedRows(*arrays), k, v, before, after


def plain_attention(rows: PagedRows, k_rskh: Any, v_rskh: Any, rules: ScoreRules) -> jax.Array:
    """Return attention by XLA in float32 over whole sequences; zero where there is no live token."""
    q, k, v = (x.astype(jnp.float32) for x in (rows.q_rckqh, k_rskh, v_rskh))
    chunk, length, exact = q.shape[1], k.shape[1], jax.lax.Precision.HIGHEST
    scores = jnp.einsum("rckqh,rskh->rckqs", q, k, precision=exact) * rules.scale_of(q.shape[-1])
    if rules.soft_cap is not None:
        scores = rules.soft_cap * jnp.tanh(scores / rules.soft_cap)
    at, keys = rows.starts_r[:, None] + jnp.arange(chunk), jnp.arange(length)
    seen = keys <= at[..., None]
    if rules.window is not None:
        seen &= keys > at[..., None] - rules.window
    weights = jax.nn.softmax(jnp.where(seen[:, :, None, None], scores, MASKED), axis=-1)
    return rows.zero_padding(jnp.einsum("rckqs,rskh->rckqh", weights, v, precision=exact))


def random_values(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike, factor: float = 1.0
) -> np.ndarray:
    """Return numbers of bfloat16 in a type."""
    numbers = factor * rng.standard_normal(shape, np.float32)
    return numbers.astype(jnp.bfloat16).astype(jnp.dtype(dtype))


def _int8_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return values that no rounding to int8 changes: small numbers times a power of two for each token and head."""
    numbers = np.rint(32 * rng.standard_normal(shape, np.float32)).clip(-LARGEST, LARGEST)
    numbers[..., 0] = LARGEST * rng.choice((-1.0, 1.0), shape[:-1])
    return (numbers / rng.choice((32.0, 64.0, 128.0), (*shape[:-1], 1))).astype(jnp.dtype(dtype))


def _write(pool: Any, k_skh: np.ndarray, v_skh: np.ndarray, pages: np.ndarray) -> None:
    """Write keys and values from position 0 on into their pages; lanes behind a narrow head are zero."""
    lines = pool["numbers"] if isinstance(pool, dict) else pool
    places, width, page_size = np.arange(len(k_skh)), k_skh.shape[-1], lines.shape[1]
    page, slot = pages[places // page_size], places % page_size
    lines[page, slot] = 0
    if isinstance(pool, dict):
        (k_skh, k_scales), (v_skh, v_scales) = _rounded(k_skh), _rounded(v_skh)
        pool["scales"][page, :, slot], pool["scales"][page, :, page_size + slot] = k_scales[..., 0], v_scales[..., 0]
    lines[page, slot, 0::2, :width], lines[page, slot, 1::2, :width] = k_skh, v_skh


def _rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 numbers and float32 scales by numpy; as `int8_heads.round_heads`, by which the device rounds."""
    x = x.astype(np.float32)
    scales = np.abs(x).max(-1, keepdims=True) * np.float32(1 / LARGEST)
    return np.rint(x / scales).clip(-LARGEST, LARGEST).astype(np.int8), scales
