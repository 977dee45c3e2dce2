"""The kernels of `policy_head` for TPUs: logits live in fast memory, a tile of words and a block of tokens at a time.

One forward pass, and one backward pass each for the hidden states and for the head; both compute the logits again. The
grid's inner axis is the one that is summed over, so that sums stay in scratch memory, in float32.

The vocabulary is rarely a multiple of a tile (151,936 = 128 x 1,187). What is read behind its end may be anything, even
NaN, so the last tile is masked, columns included, and no other pays for it.

Shape letters: as in sums.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axlearn_like.kernels.policy_head.sums import NEVER, HeadRules, Sums, d_products
from mesh.cost.expected import costs
from mesh.manual import varying

_VMEM = 96 << 20  # bytes that a kernel may use of the fast memory of v5e, v5p and v6e, 128 MiB (tpu7x: 64 MiB)
_TRANSPOSED = (((1,), (1,)), ((), ()))
_INNER = (((0,), (0,)), ((), ()))


def forward(x_nd: jax.Array, weight_dv: jax.Array, targets_n: jax.Array, rules: HeadRules, *, interpret: bool) -> Sums:
    """Return the sums over all words, float32 [n, 1]."""
    x, targets = _whole_blocks(x_nd, targets_n, rules)
    (rows, width), words = x.shape, weight_dv.shape[1]
    tiles = pl.cdiv(words, rules.tile)
    block, column = (rules.tokens, width), (rules.tokens, 1)
    sums = pl.pallas_call(
        functools.partial(_forward_kernel, rules=rules, words=words, tiles=tiles),
        grid=(rows // rules.tokens, tiles),
        in_specs=[
            pl.BlockSpec(block, lambda n, w: (n, 0)),
            pl.BlockSpec((width, rules.tile), lambda n, w: (0, w)),
            pl.BlockSpec(column, lambda n, w: (n, 0)),
        ],
        out_specs=[pl.BlockSpec(column, lambda n, w: (n, 0))] * 4,
        out_shape=[_like(x, (rows, 1), jnp.float32)] * 4,
        compiler_params=_parameters(),
        interpret=_simulated(interpret),
        name="policy_head_forward",
    )
    with costs(**_work(rows, width, words, 1, x)):
        found = sums(x, weight_dv, targets)
    peak, total, mean, target = (part[: len(x_nd)] for part in found)
    return Sums(peak, total, mean, target, jnp.zeros_like(peak))


def backward(
    x_nd: jax.Array, weight_dv: jax.Array, targets_n: jax.Array, columns: Any, rules: HeadRules, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of hidden states and head; `columns` [n, 1]: the statistics, and their cotangents."""
    x, targets, *columns = _whole_blocks(x_nd, targets_n, rules, *columns)
    (rows, width), words = x.shape, weight_dv.shape[1]
    blocks, tiles = rows // rules.tokens, pl.cdiv(words, rules.tile)

    def call(
        kernel: Any, grid: tuple[int, int], at: Callable[..., Any], out: Any, name: str, *, of_tokens: bool
    ) -> jax.Array:
        def spec(shape: tuple[int, int], place: Callable[[Any, Any], Any]) -> pl.BlockSpec:
            return pl.BlockSpec(shape, lambda *ids: place(*at(*ids)))

        tokens = spec((rules.tokens, width), lambda n, w: (n, 0))
        head = spec((width, rules.tile), lambda n, w: (0, w))
        column = spec((rules.tokens, 1), lambda n, w: (n, 0))
        run = pl.pallas_call(
            functools.partial(kernel, rules=rules, words=words, tiles=tiles),
            grid=grid,
            in_specs=[tokens, head, *[column] * (1 + len(columns))],
            out_specs=tokens if of_tokens else head,
            out_shape=out,
            scratch_shapes=[pltpu.VMEM((rules.tokens, width) if of_tokens else (width, rules.tile), jnp.float32)],
            compiler_params=_parameters(),
            interpret=_simulated(interpret),
            name=name,
        )
        with costs(**_work(rows, width, words, 2, x)):
            return run(x, weight_dv, targets, *columns)

    d_x = call(_d_x_kernel, (blocks, tiles), lambda n, w: (n, w), _like(x, x.shape, x.dtype), "d_x", of_tokens=True)
    like = _like(x, weight_dv.shape, weight_dv.dtype)
    d_weight = call(_d_weight_kernel, (tiles, blocks), lambda w, n: (n, w), like, "d_weight", of_tokens=False)
    return d_x[: len(x_nd)], d_weight


def _parameters() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM)


def _like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the type of a result, which varies over the devices of a shard_map as x does."""
    axes = varying(x)
    kind: dict[str, Any] = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)} if axes else {}
    return jax.ShapeDtypeStruct(shape, dtype, **kind)


def _simulated(interpret: bool) -> Any:
    """Return the interpreter's settings: what nothing has written is NaN."""
    return pltpu.InterpretParams(uninitialized_memory="nan") if interpret else False


def _work(rows: int, width: int, words: int, products: int, like: jax.Array) -> dict[str, int]:
    """Return the FLOPs and bytes of a pass; each block of tokens reads the whole head."""
    return {"flops": 2 * products * rows * width * words, "bytes": width * (words + rows) * like.dtype.itemsize}


def _whole_blocks(x: jax.Array, targets: jax.Array, rules: HeadRules, *columns: jax.Array) -> list[jax.Array]:
    """Return hidden states, targets [n, 1] and columns with tokens added up to whole blocks: they have no gradient."""
    missing = -len(x) % rules.tokens
    found = [x, targets.astype(jnp.int32)[:, None], *columns]
    return [jnp.pad(one, [(0, missing), (0, 0)]) for one in found]


def _on_tile(tile: jax.Array, tiles: int, words: int, rules: HeadRules, head: Any, act: Callable[..., None]) -> None:
    """Call `act(columns, names)`; in a last tile that is not full, columns behind the end are zeros."""
    names = tile * rules.tile + jax.lax.broadcasted_iota(jnp.int32, (1, rules.tile), 1)
    if words % rules.tile == 0:
        act(head[...], names)
        return

    @pl.when(tile < tiles - 1)
    def _() -> None:
        act(head[...], names)

    @pl.when(tile == tiles - 1)
    def _() -> None:
        act(jnp.where(names < words, head[...], jnp.zeros_like(head)), names)


def _logits(x: Any, columns: jax.Array, names: jax.Array, words: int, rules: HeadRules) -> jax.Array:
    products = jnp.dot(x[...], columns, preferred_element_type=jnp.float32)
    logits = rules.logits(products)
    return logits if words % rules.tile == 0 else jnp.where(names < words, logits, NEVER)


def _forward_kernel(x: Any, head: Any, target: Any, *sums: Any, rules: HeadRules, words: int, tiles: int) -> None:
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def _() -> None:
        for one, empty in zip(sums, (NEVER, 0.0, 0.0, 0.0), strict=True):
            one[...] = jnp.full_like(one, empty)

    def add(columns: jax.Array, names: jax.Array) -> None:
        logits = _logits(x, columns, names, words, rules)
        found = Sums(*(one[...] for one in sums), cross=None).add(logits, names == target[...])
        for one, value in zip(sums, found[:4], strict=True):
            one[...] = value

    _on_tile(tile, tiles, words, rules, head, add)


def _d_x_kernel(x: Any, head: Any, target: Any, *rest: Any, rules: HeadRules, words: int, tiles: int) -> None:
    *columns_n, out, acc = rest
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    def add(columns: jax.Array, names: jax.Array) -> None:
        logits = _logits(x, columns, names, words, rules)
        d = d_products(logits, names == target[...], [one[...] for one in columns_n], rules).astype(x.dtype)
        acc[...] += jax.lax.dot_general(d, columns, _TRANSPOSED, preferred_element_type=jnp.float32)

    _on_tile(tile, tiles, words, rules, head, add)

    @pl.when(tile == tiles - 1)
    def _() -> None:
        out[...] = acc[...].astype(out.dtype)


def _d_weight_kernel(x: Any, head: Any, target: Any, *rest: Any, rules: HeadRules, words: int, tiles: int) -> None:
    *columns_n, out, acc = rest
    tile, block = pl.program_id(0), pl.program_id(1)

    @pl.when(block == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    def add(columns: jax.Array, names: jax.Array) -> None:
        logits = _logits(x, columns, names, words, rules)
        d = d_products(logits, names == target[...], [one[...] for one in columns_n], rules).astype(x.dtype)
        acc[...] += jax.lax.dot_general(x[...], d, _INNER, preferred_element_type=jnp.float32)

    _on_tile(tile, tiles, words, rules, head, add)

    @pl.when(block == pl.num_programs(1) - 1)
    def _() -> None:
        out[...] = acc[...].astype(out.dtype)
